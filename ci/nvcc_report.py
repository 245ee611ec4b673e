"""Compiles the CUDA sources without a GPU and reports registers, shared memory and spills of every kernel.

Fails where a shipped kernel spills registers or keeps a stack frame: both mean memory traffic that no formula asks for.
Where no CUDA compiler is, it says so and ends with status 0 (`--require`: 1).

    python ci/nvcc_report.py             a table; status 1 on a spill in code that ships
    python ci/nvcc_report.py --json      the same for programs
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm90a", "sm80")
"""Hopper's own code, which ships, and for a look what this compiler makes of the PTX for compute_80 on an A100."""
GATED = ("sm_90a",)
"""Spills fail the report here. PTX is compiled by the user's driver, so for sm_80 they are shown only."""


class Kernel(NamedTuple):
    name: str
    target: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def clean(self) -> bool:
        return self.stack == 0 and self.spill_stores == 0 and self.spill_loads == 0


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


def parse(text: str) -> list[Kernel]:
    """Kernels of a ``ptxas -v`` report, in order. Raises ValueError where an entry's figures are missing."""
    kernels: list[Kernel] = []
    entry: tuple[str, str] | None = None
    frame: tuple[int, int, int] | None = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            if entry is not None:
                raise ValueError(f"ptxas report: no figures for {entry[0]}")
            entry, frame = (match[1], match[2]), None
        elif entry is not None and (match := _FRAME.search(line)):
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif entry is not None and (match := _USED.search(line)):
            if frame is None:
                raise ValueError(f"ptxas report: no stack and spill figures for {entry[0]}")
            kernels.append(Kernel(*entry, int(match[1]), *frame))
            entry = None
    if entry is not None:
        raise ValueError(f"ptxas report: no figures for {entry[0]}")
    return kernels


def readable(name: str) -> str:
    """The kernel's name and template arguments, from its mangled name."""
    match = re.search(r"\d+((?:wy|kda)_[a-z_]+?_kernel)(?:I(.*?)EEv|E)", name)
    if match is None:
        return name
    if match[2] is None:
        return match[1]
    types = {"f": "float", "6__half": "half", "13__nv_bfloat16": "bf16", "S1_": "same", "S2_": "same"}
    words = re.findall(r"6__half|13__nv_bfloat16|S\d_|Li\d+E|Lb\dE|f", match[2] + "E")
    shown = [types.get(w, w[2:-1] if w.startswith("L") else "same") for w in words]
    return f"{match[1]}<{', '.join(shown)}>"


def load_build():
    spec = importlib.util.spec_from_file_location("mindspeed_kda_cuda_build", ROOT / "cuda_kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_report(build, toolkit, jobs: int) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:

        def one(job: tuple[int, str, str]) -> list[Kernel]:
            i, source, target = job
            command = build.compile_command(toolkit, source, Path(scratch) / f"{i}.o", (target,), verbose=True)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{source} for {target} does not compile:\n{done.stdout}{done.stderr}")
            print(f"nvcc_report: {source} for {target}", file=sys.stderr, flush=True)
            found = parse(done.stdout + done.stderr)
            if not found:
                raise SystemExit(f"{source} for {target}: ptxas reported no kernel")
            return found

        todo = [(source, target) for source in build.KERNEL_SOURCES for target in TARGETS]
        return [k for part in pool.map(one, [(i, *x) for i, x in enumerate(todo)]) for k in part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--require", action="store_true", help="fail where there is no CUDA compiler")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    args = parser.parse_args()
    build = load_build()
    try:
        toolkit = build.find_toolkit()
    except build.UnavailableError as error:
        print(f"nvcc_report: nothing compiled: {error}", file=sys.stderr)
        return 1 if args.require else 0
    kernels = compile_report(build, toolkit, args.jobs)
    bad = [k for k in kernels if not k.clean and k.target in GATED]
    if args.json:
        rows = [{**k._asdict(), "name": readable(k.name), "clean": k.clean} for k in kernels]
        print(json.dumps({"compiler": str(toolkit.nvcc), "kernels": rows, "clean": not bad}, indent=1))
    else:
        for k in kernels:
            print(
                f"{readable(k.name):60s} {k.target:7s} {k.registers:4d} registers, stack {k.stack}, "
                f"spills {k.spill_stores}/{k.spill_loads} bytes{'' if k.clean else '   <- spills'}"
            )
        print(f"{len(kernels)} kernels, {len(bad)} of {', '.join(GATED)} with spills or a stack frame")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
