"""Compiles the Triton kernels of the frozen cases for an NVIDIA GPU on a machine that needs none.

A run of all cases needs some 2600 kernels, and compiling them takes a slow host far longer than the cases themselves.
They are compiled here through the package's own plans, with launches that only compile, and put where Triton's cache on
the machine with the GPU finds them; a kernel whose source has changed since is compiled there as ever. Stock Triton of
the same version stands on both sides. How to use it::

    python -m tests.atk.precompile make DIR --part 1/2 &      # each part in a process of its own, ended or not
    python -m tests.atk.precompile make DIR --part 2/2        # in the end; what is there already costs nothing
    python -m tests.atk.precompile pack DIR kernels.tar.xz
    python -m tests.atk.precompile unpack kernels.tar.xz      # on the other machine, into its Triton cache

Both sides leave out line numbers (TRITON_DISABLE_LINE_INFO=1): they are two thirds of a binary.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.atk import records

NO_LINES = "TRITON_DISABLE_LINE_INFO"
KEY = "key.txt"
"""Holds what Triton's cache key of a kernel says besides its own installation: source, options, compiler."""
KEPT = (".cubin", ".json")


class _Driver:
    """What Triton asks of a driver before a launch, for a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _keys_seen() -> Iterator[dict[str, str]]:
    """Within the block, each kernel's cache key less Triton's own part, by the hash of the whole."""
    from triton.compiler import compiler
    from triton.runtime.cache import triton_key

    seen: dict[str, str] = {}
    get, own = compiler.get_cache_key, triton_key()

    def record(*args: Any, **kwargs: Any) -> str:
        key: str = get(*args, **kwargs)
        assert key.startswith(own)
        seen[hashlib.sha256(key.encode()).hexdigest()] = key[len(own) :]
        return key

    with mock.patch.object(compiler, "get_cache_key", record):
        yield seen


@contextlib.contextmanager
def compiling(folder: Path, arch: int = 90, part: int = 0, parts: int = 1) -> Iterator[set[str]]:
    """Within the block each op has a backend "precompile", which compiles the kernels of a call into ``folder``, or
    those of one part, and leaves the results uninitialised. Gives the hashes of the kernels compiled or found there."""
    import triton
    from triton.runtime.cache import _base32

    from mindspeed_kda.npu_kernels.chunk_kda import plan as kda
    from mindspeed_kda.npu_kernels.launch import options
    from mindspeed_kda.npu_kernels.wy_dqkg import plan as wy
    from mindspeed_kda.registry import REGISTRY, Backend

    done: set[str] = set()
    triton.runtime.driver.set_active(_Driver(arch))

    def compile_only(kernel: Any, device: Any, tasks: int, args: Any, constants: Any, tile: Any, **_: Any) -> None:
        dtypes = [str(getattr(x, "dtype", None)) for x in args.values()]
        kind = f"{kernel.fn.__module__} {tile} {dtypes} {list(map(str, constants.values()))}"
        mine = int(hashlib.sha256(kind.encode()).hexdigest(), 16) % parts == part
        if tasks == 0 or not mine:
            return
        compiled = kernel.warmup(grid=(1,), **args, **constants, **options("cuda", tile))
        if compiled.hash not in done:
            done.add(compiled.hash)
            (folder / _base32(compiled.hash) / KEY).write_text(seen[compiled.hash], encoding="utf-8")

    def for_cuda(sizes_of: Any) -> Any:
        return lambda *args, **kwargs: dataclasses.replace(sizes_of(*args, **kwargs), target="cuda")

    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(_keys_seen())
        for plan in (kda, wy):
            stack.enter_context(mock.patch.object(plan, "launch", compile_only))
            stack.enter_context(mock.patch.object(plan, "sizes_of", for_cuda(plan.sizes_of)))
        for op, backend in {"chunk_kda": kda, "chunk_kda_bwd_wy_dqkg_fused": wy.run}.items():
            REGISTRY.register(Backend(op, "precompile", lambda call: None, lambda backend=backend: backend))
            stack.callback(REGISTRY.unregister, op, "precompile")
        yield done


def make(folder: Path, ops: Sequence[str], arch: int, part: int, parts: int, seconds: float) -> int:
    """Compiles what is not in ``folder`` yet of this part; the number of kernels compiled or found."""
    import torch

    from tests.atk import suite

    deadline = time.monotonic() + seconds
    with compiling(folder, arch, part, parts) as done:
        for op in ops:
            it = suite.executor(op)
            for spec in (*records.load(op), *records.load(op, "model")):
                if time.monotonic() < deadline:
                    it.run(it.build(spec, torch.device("cpu")), "precompile")
            print(f"{op}: {len(done)} kernels", file=sys.stderr)
    return len(done)


def pack(folder: Path, file: Path) -> int:
    """The binaries of ``folder`` as one archive; the number of kernels."""
    kernels = sorted(p.parent for p in folder.glob(f"*/{KEY}"))
    by_name = sorted(kernels, key=lambda p: [f.name for f in sorted(p.glob("*.cubin"))])  # alike beside alike
    with tarfile.open(file, "w:xz", preset=9) as tar:
        for kernel in by_name:
            for f in sorted(kernel.iterdir()):
                if f.name == KEY or (f.suffix in KEPT and not f.name.startswith("__grp__")):
                    tar.add(f, f"{kernel.name}/{f.name}")
    return len(kernels)


def unpack(file: Path, folder: Path) -> int:
    """The archive's kernels under the keys that the Triton of this machine gives them; the number of kernels."""
    from triton.runtime.cache import _base32, triton_key

    own, contents = triton_key(), {}
    with tarfile.open(file) as tar:
        for member in tar:
            handle = tar.extractfile(member)
            assert isinstance(handle, io.BufferedReader)
            kernel, name = member.name.split("/")
            contents.setdefault(kernel, {})[name] = handle.read()
    for files in contents.values():
        whole = own + files.pop(KEY).decode()
        place = folder / _base32(hashlib.sha256(whole.encode()).hexdigest())
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / name).write_bytes(content)
        group = {"child_paths": {name: str(place / name) for name in files}}
        name = next(name for name in files if name.endswith(".json"))
        (place / f"__grp__{name}").write_text(json.dumps(group), encoding="utf-8")
    return len(contents)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m tests.atk.precompile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = p.add_subparsers(dest="verb", required=True)
    m = verbs.add_parser("make", help="compile into DIR")
    m.add_argument("dir", type=Path)
    m.add_argument("--op", action="append", choices=records.ops(), help="only this op (may be repeated)")
    m.add_argument("--arch", type=int, default=90, help="compute capability, default 90")
    m.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts")
    m.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    k = verbs.add_parser("pack", help="write the archive")
    k.add_argument("dir", type=Path)
    k.add_argument("file", type=Path)
    u = verbs.add_parser("unpack", help="put the archive's kernels into the Triton cache of this machine")
    u.add_argument("file", type=Path)
    args = p.parse_args(argv)
    os.environ[NO_LINES] = "1"
    if args.verb == "make":
        os.environ["TRITON_CACHE_DIR"] = str(args.dir)
        part, parts = map(int, args.part.split("/"))
        n = make(args.dir, args.op or records.ops(), args.arch, part - 1, parts, args.seconds)
    elif args.verb == "pack":
        n = pack(args.dir, args.file)
    else:
        from triton import knobs

        n = unpack(args.file, Path(knobs.cache.dir))
    print(f"{args.verb}: {n} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
