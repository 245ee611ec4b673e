"""One kernel through the whole public pipeline: Triton source, Triton IR, linalg, BiSheng HIVM with its memory plan.

The last step of CANN's own tool chain, ``hivmc`` (HIVM to device object), is not public: a stand-in answers for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_kda import config
from mindspeed_kda.npu_kernels.ascend_check import hivm, toolchain
from mindspeed_kda.npu_kernels.ascend_check.targets import Target

TIMEOUT_S = 120
"""Some kernels send the compiler into an endless loop; those that compile take a second or two."""
TIMED_OUT = 124
MEMORIES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
DISCRETE_MARKS = ("DiscreteMemAccess", "ExtractedLoadOrStore")
# Threads are off because threaded runs of the compiler crash now and then.
FLAGS = (
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-memory-display=true",
    "--mlir-disable-threading",
)
# Launch options of triton-ascend and the compiler flag each becomes; the values are its defaults.
OPTION_FLAGS = {
    "multibuffer": "--enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "--enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "--enable-hivm-auto-cv-balance",
    "sync_solver": "--enable-hivm-graph-sync-solver",
    "unit_flag": "--enable-hivm-unit-flag-sync",
    "inject_barrier_all": "--enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "--enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "--limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "--limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "--set-workspace-multibuffer",
    "tile_mix_vector_loop": "--tile-mix-vector-loop",
    "tile_mix_cube_loop": "--tile-mix-cube-loop",
    "disable_auto_inject_block_sync": "--disable-auto-inject-block-sync",
}
DEFAULT_OPTIONS = {"multibuffer": True, "enable_auto_bind_sub_block": True}

_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available")
_NOTE = re.compile(r"^\[NOTE\] (.*)$", re.M)
_ERROR = re.compile(r"(?:error: |\[ERROR\] )(.*)")
_UB_PRINTED = re.compile(r"Allocated UB size = (\d+) bits")


@dataclass(frozen=True)
class Overflow:
    """A memory (``UB``, ``L1``, ``L0C``) that the default configuration does not fit into, in bytes."""

    memory: str
    required: int
    available: int


@dataclass(frozen=True)
class CompileReport:
    """What came of one compilation. Sizes in bytes; a peak is None where nothing was planned.

    ``stopped_in`` is None after success, else ``triton`` or ``bishengir``. ``notes`` are the compiler's own remarks on
    a configuration it weakened. ``dots`` counts ``tt.dot`` in the Triton IR, ``products`` the matrix products left in
    the final HIVM. ``marks`` counts the adapter's marks of discrete access; ``scalar`` lists element-indexed accesses
    in loops.
    """

    stopped_in: str | None
    exit_code: int
    seconds: float
    error: str = ""
    notes: tuple[str, ...] = ()
    overflows: tuple[Overflow, ...] = ()
    ub: int | None = None
    l1: int | None = None
    l0c: int | None = None
    workspace: int = 0
    core: str = "unknown"
    dots: int = 0
    products: int = 0
    marks: Mapping[str, int] | None = None
    scalar: tuple[str, ...] = ()


def load_kernel(reference: str) -> Any:
    """The jitted function behind ``module:name`` or ``file.py:name``."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        return getattr(_module_of_file(Path(place)), name)
    return getattr(importlib.import_module(place), name)


def _module_of_file(path: Path) -> ModuleType:
    name = f"_ascend_check_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"kernel file: cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: Target,
    workdir: Path | None = None,
    options: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> CompileReport:
    """Compiles one jitted function for a target and reads everything the compiler tells.

    ``signature`` maps every argument to its Triton type in order (``constexpr`` included), ``constants`` gives the
    constexpr values, ``options`` are launch options beside the defaults. ``workdir`` keeps all intermediate files;
    without it they are dropped. ``cache`` is a folder of earlier reports: one is taken where the linalg, target,
    options and packages are the same. Never raises for a kernel that does not compile: the report says so.
    """
    started = time.perf_counter()
    with _folder(workdir) as folder:
        try:
            ttir, adapter = lower(fn, signature, constants, target, options)
        except Exception as error:  # whatever Triton raises is the result of this compilation
            detail = getattr(error, "stderr", None)
            message = detail.decode(errors="replace") if isinstance(detail, bytes) else f"{error}"
            return CompileReport(
                "triton", 1, time.perf_counter() - started, f"{type(error).__name__}: {message}".strip()
            )
        (folder / "kernel.ttir").write_text(ttir, encoding="utf-8")
        (folder / "kernel.mlir").write_text(adapter, encoding="utf-8")
        known = cache / f"{_digest(ttir, adapter, target, options)}.json" if cache is not None else None
        if known is not None and known.is_file():
            return report_from_json(known.read_text(encoding="utf-8"))
        done = run_bishengir(folder, target, options)
        report = read_report(folder, target, done, time.perf_counter() - started)
        if known is not None and report.exit_code != TIMED_OUT:
            known.write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
        return report


def _digest(ttir: str, adapter: str, target: Target, options: Any) -> str:
    """Of all that decides a report."""
    parts = [ttir, adapter, target.name, {**DEFAULT_OPTIONS, **(options or {})}, FLAGS, toolchain.versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def report_from_json(text: str) -> CompileReport:
    """The report that ``dataclasses.asdict`` turned into JSON."""
    values: dict[str, Any] = json.loads(text)
    values["overflows"] = tuple(Overflow(**overflow) for overflow in values["overflows"])
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return CompileReport(**values)


def read_report(
    folder: Path, target: Target, done: subprocess.CompletedProcess[str], seconds: float = 0.0
) -> CompileReport:
    """Reads what a finished compiler left in its folder and said."""
    final = folder / "temps" / "module.hivm.opt.mlir"
    adapter = (folder / "kernel.mlir").read_text(encoding="utf-8")
    module = hivm.parse_module(final.read_text(encoding="utf-8") if done.returncode == 0 else "")
    peaks = read_peaks(folder, module, done.stdout, target)
    return CompileReport(
        stopped_in="bishengir" if done.returncode else None,
        exit_code=done.returncode,
        seconds=seconds,
        error="; ".join(dict.fromkeys(_ERROR.findall(done.stderr))) if done.returncode else "",
        notes=tuple(_NOTE.findall(done.stderr)),
        overflows=read_overflows(done.stderr),
        ub=peaks.get("ub"),
        l1=peaks.get("cbuf"),
        l0c=peaks.get("cc"),
        workspace=hivm.workspace_bytes(module),
        core=hivm.core_type(module),
        dots=len(re.findall(r"\btt\.dot\b", (folder / "kernel.ttir").read_text(encoding="utf-8"))),
        products=hivm.matrix_products(module),
        marks={mark: adapter.count(mark) for mark in DISCRETE_MARKS},
        scalar=tuple(hivm.scalar_accesses(module)),
    )


@contextlib.contextmanager
def _folder(workdir: Path | None) -> Iterator[Path]:
    if workdir is not None:
        workdir.mkdir(parents=True, exist_ok=True)
        yield workdir.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ascend_check_") as name:
        yield Path(name).resolve()


def lower(
    fn: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: Target, options: Any = None
) -> tuple[str, str]:
    """Triton IR and the adapter's linalg for a kernel, by triton-ascend alone."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    with toolchain.stand_in_driver(target):
        gpu = GPUTarget("npu", target.name, 0)
        backend = AscendBackend(gpu)
        source = ASTSource(fn, dict(signature), dict(constants))
        parsed = backend.parse_options({"compile_on_910_95": target.regbase, **DEFAULT_OPTIONS, **(options or {})})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed)
        metadata = {"hash": "ascend-check", "target": gpu, **parsed.__dict__}
        module = stages["ttir"](module, metadata)
        return str(module), stages["ttadapter"](module, metadata)


def run_bishengir(folder: Path, target: Target, options: Any = None) -> subprocess.CompletedProcess[str]:
    """Runs the target's compiler over ``kernel.mlir`` in its own folder."""
    toolchain.write_hivmc_stand_ins(folder / "bin")
    chosen = {**DEFAULT_OPTIONS, **(options or {})}
    command = [str(toolchain.compiler_path(target)), "kernel.mlir", f"--target={target.name}", *FLAGS]
    command += [f"{flag}={chosen[name]}" for name, flag in OPTION_FLAGS.items() if chosen.get(name) is not None]
    command += ["--enable-print-memory-allocated-size"] if target.regbase else []
    command += ["--save-temps=temps", "-o", "kernel"]
    path = f"{folder / 'bin'}{os.pathsep}{config.child_environment().get('PATH', '')}"
    environment = config.child_environment(PATH=path)
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, TIMED_OUT, "", f"error: no end after {TIMEOUT_S} s")


def read_overflows(stderr: str) -> tuple[Overflow, ...]:
    """Every distinct overflow in the compiler's messages; the largest demand of each memory."""
    largest: dict[str, Overflow] = {}
    for scope, required, available in _OVERFLOW.findall(stderr):
        memory = MEMORIES.get(scope.lower(), scope)
        overflow = Overflow(memory, int(required) // 8, int(available) // 8)
        if memory not in largest or overflow.required > largest[memory].required:
            largest[memory] = overflow
    return tuple(largest.values())


def read_peaks(folder: Path, module: hivm.Module, stdout: str, target: Target) -> dict[str, int]:
    """Peak bytes of each on-chip memory: from the memory report, or from the final IR where there is none."""
    if target.regbase:
        peaks = hivm.planned_peaks(module)
        printed = [int(bits) // 8 for bits in _UB_PRINTED.findall(stdout)]
        return {**peaks, **({"ub": max(printed)} if printed else {})}
    peaks = {}
    for path in sorted(folder.glob("memory_info_*.json")):
        for scope, peak in read_memory_report(path.read_text(encoding="utf-8")).items():
            peaks[scope] = max(peaks.get(scope, 0), peak)
    return peaks


def read_memory_report(text: str) -> dict[str, int]:
    """Peak bytes by memory scope of one ``memory_info_*.json``. Offsets there are bytes, extents are bits."""
    peaks: dict[str, int] = {}
    for record in json.loads(text)["Record"]:
        for buffer in record["memory_info_array"]:
            end = max(buffer["offset"], default=0) + buffer["extent"] // 8
            peaks[record["scope"]] = max(peaks.get(record["scope"], 0), end)
    return peaks
