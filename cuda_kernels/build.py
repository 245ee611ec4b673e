"""Builds ``libmindspeed_kda_cuda.so`` from the sources beside this file. Needs neither torch imported nor a GPU.

The compiler comes from the machine (CUDA_HOME, PATH, /usr/local/cuda) or from PyPI's ``nvidia-cuda-nvcc`` and its
companions. Torch's headers are found without importing torch; its libraries are not linked: stubs with their names
stand in, so one binary serves every torch from 2.10 on, with or without CUDA on the building machine.

    python cuda_kernels/build.py --out DIR        build for release (PTX for compute_80, code for sm_90a)
    python cuda_kernels/build.py --targets ptx80  PTX only: what A100 and later get, forced on any of them
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIBRARY = "libmindspeed_kda_cuda.so"
KERNEL_SOURCES = (
    *("wy_dqkg/f32.cu", "chunk_kda/grads.cu", "chunk_kda/prepare.cu", "chunk_kda/scan.cu"),
    *("wy_dqkg/f16.cu", "wy_dqkg/bf16.cu", "chunk_kda/reduce.cu", "chunk_kda/plan.cu", "chunk_kda/tail.cu"),
)
"""Longest to compile first."""
BIND_SOURCES = ("bind/library.cpp", "bind/chunk_kda.cpp")
EMULATOR_SOURCES = ("emulator/emulator.cpp", "emulator/library.cpp")
"""With these the kernels become a library for the host; not part of the one that ships."""
EMULATOR_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-DKDA_EMULATED", "-Wno-unknown-pragmas"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE"),
)
"""_FORTIFY_SOURCE takes a jump from fiber to fiber for an error."""
MIN_TORCH = (2, 10)
TARGETS = {
    "ptx80": "-gencode=arch=compute_80,code=compute_80",
    "sm80": "-gencode=arch=compute_80,code=sm_80",
    "sm90a": "-gencode=arch=compute_90a,code=sm_90a",
}
RELEASE_TARGETS = ("ptx80", "sm90a")
PYPI_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
)
"""What ``pip install`` needs for a compiler without a system toolkit."""
PYPI_HEADERS = "nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85"
"""And for its headers alone, 6 MB."""


class UnavailableError(RuntimeError):
    """Something the build needs is not on this machine; the message says what and how to get it."""


class Toolkit(NamedTuple):
    nvcc: Path
    origin: str


def config() -> ModuleType:
    """mindspeed_kda/config.py by its path, in a source tree or installed: importing the package would import torch."""
    name = "mindspeed_kda_build_config"
    if name not in sys.modules:
        path = next(p for p in (HERE.parent / "mindspeed_kda/config.py", HERE.parent / "config.py") if p.is_file())
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _outer_site_packages() -> list[str]:
    """Where packages of this interpreter live, also from inside pip's isolated build environment."""
    code = "import site, sysconfig; print(*site.getsitepackages(), sysconfig.get_paths()['purelib'], sep='\\n')"
    out = subprocess.run([sys.executable, "-I", "-c", code + "; import sys; print(*sys.path, sep='\\n')"],
                         capture_output=True, text=True, check=False)  # fmt: skip
    paths = [*sys.path, sysconfig.get_paths()["purelib"], *out.stdout.splitlines()]
    return list(dict.fromkeys(p for p in paths if p and os.path.isdir(p)))


def find_package(name: str) -> list[Path]:
    """Folders of a top-level package, without importing it."""
    spec = importlib.machinery.PathFinder.find_spec(name, _outer_site_packages())
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]


def find_toolkit() -> Toolkit:
    """The CUDA compiler. Raises UnavailableError."""
    candidates = []
    home = config().CUDA_HOME
    if home.read():
        candidates.append((Path(home.read()) / "bin/nvcc", home.name))
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append((Path(on_path), "PATH"))
    candidates.append((Path("/usr/local/cuda/bin/nvcc"), "/usr/local/cuda"))
    for folder in find_package("nvidia"):
        candidates += [(p, "PyPI's nvidia packages") for p in sorted(folder.glob("*/bin/nvcc"), reverse=True)]
    for nvcc, origin in candidates:
        if nvcc.is_file() and os.access(nvcc, os.X_OK):
            return Toolkit(nvcc, origin)
    raise UnavailableError(
        "no CUDA compiler: nvcc is neither under CUDA_HOME, on PATH, in /usr/local/cuda, nor installed from PyPI "
        f"(pip install {PYPI_PACKAGES})"
    )


def find_cuda_headers() -> Path:
    """The folder of cuda_fp16.h and its companions, which a host compiler takes too. Raises UnavailableError."""
    candidates = []
    home = config().CUDA_HOME
    if home.read():
        candidates.append(Path(home.read()) / "include")
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path).resolve().parent.parent / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in find_package("nvidia"):
        candidates += sorted(folder.glob("*/include"), reverse=True)
    needed = ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "crt/host_defines.h", "nv/target")
    for include in candidates:
        if all((include / name).is_file() for name in needed):
            return include
    raise UnavailableError(
        f"no CUDA headers ({', '.join(needed)}): neither under CUDA_HOME, beside nvcc, in /usr/local/cuda/include, nor "
        f"installed from PyPI (pip install {PYPI_HEADERS})"
    )


def find_torch_headers() -> Path:
    """The include folder of an installed torch that is new enough. Raises UnavailableError."""
    folders = find_package("torch")
    if not folders:
        raise UnavailableError("no torch headers: torch is not installed for this interpreter")
    text = (folders[0] / "version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = '([^']+)'", text)
    if version is None:
        raise UnavailableError(f"no torch headers: {folders[0] / 'version.py'} names no version")
    major, minor = (int(x) for x in version.group(1).split(".")[:2])
    if (major, minor) < MIN_TORCH:
        raise UnavailableError(
            f"torch headers: expected torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}, got {version.group(1)}"
        )
    return folders[0] / "include"


def compile_command(
    toolkit: Toolkit,
    source: str,
    out: Path,
    targets: tuple[str, ...],
    headers: Path | None = None,
    verbose: bool = False,
) -> list[str]:
    """The compiler call for one source. ``headers`` (torch's) are needed by the binding alone."""
    command = [str(toolkit.nvcc), "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    command += [TARGETS[t] for t in targets]
    if headers is not None:
        major, minor = MIN_TORCH
        command += [f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000", "-I", str(headers)]
    if verbose:
        command += ["-Xptxas", "-v"]
    return [*command, "-c", str(HERE / source), "-o", str(out)]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def build(out_dir: Path, targets: tuple[str, ...] = RELEASE_TARGETS, jobs: int | None = None, log: bool = True) -> Path:
    """Compiles and links the library into ``out_dir``. Raises UnavailableError before anything is compiled."""
    toolkit, headers = find_toolkit(), find_torch_headers()
    out_dir.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def say(text: str) -> None:
        if log:
            print(f"cuda_kernels: [{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    say(f"{toolkit.nvcc} ({toolkit.origin}), targets {', '.join(targets)}")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        tmp = Path(scratch)

        def compile_one(source: str) -> Path:
            out = tmp / (source.replace("/", "_") + ".o")
            _run(compile_command(toolkit, source, out, targets, headers if source in BIND_SOURCES else None))
            say(f"compiled {source}")
            return out

        objects = list(pool.map(compile_one, (*KERNEL_SOURCES, *BIND_SOURCES)))
        # Empty libraries under torch's names: the real ones are found by the process that loads this library.
        (tmp / "stub.c").write_text("void mindspeed_kda_stub(void) {}\n")
        stubs = []
        for name in ("torch_cpu", "torch_cuda"):
            stub = tmp / f"lib{name}.so"
            _run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{stub.name}", str(tmp / "stub.c"),
                  "-o", str(stub)])  # fmt: skip
            stubs.append(f"-l{name}")
        made = tmp / LIBRARY
        _run([str(toolkit.nvcc), "-shared", "--cudart=static", *(TARGETS[t] for t in targets), "-o", str(made),
              *map(str, objects), "-L", str(tmp), "-Xlinker", "--no-as-needed", *stubs])  # fmt: skip
        out = out_dir / LIBRARY
        shutil.copyfile(made, out.with_suffix(".tmp"))
        os.replace(out.with_suffix(".tmp"), out)
    say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return out


def build_emulator(
    out: Path, sources: tuple[str, ...] = KERNEL_SOURCES, root: Path = HERE, jobs: int | None = None
) -> Path:
    """The kernels of ``sources`` under ``root``, compiled for this machine's processor, as the shared library ``out``.

    Raises UnavailableError where there is no g++ or no CUDA headers.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("no host compiler: g++ is not on PATH")
    flags = [*EMULATOR_FLAGS, "-I", str(find_cuda_headers())]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:

        def compile_one(source: str) -> str:
            made = Path(scratch) / (source.replace("/", "_") + ".o")
            _run([compiler, *flags, "-x", "c++", "-c", str(root / source), "-o", str(made)])
            return str(made)

        objects = list(pool.map(compile_one, (*sources, *EMULATOR_SOURCES)))
        _run([compiler, "-shared", "-o", str(out), *objects])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the library (default: beside this file)")
    parser.add_argument("--targets", default=",".join(RELEASE_TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    args = parser.parse_args()
    targets = tuple(args.targets.split(","))
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        parser.error(f"--targets: expected {', '.join(TARGETS)}, got {', '.join(unknown)}")
    try:
        build(args.out, targets, args.jobs)
    except UnavailableError as error:
        print(f"cuda_kernels: not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
