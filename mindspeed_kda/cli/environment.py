"""What is installed and what is wrong with it. Survives broken modules: a vendor module is only ever imported in a
process of its own, so that an exception, a crash or a hang in it becomes a sentence."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

import mindspeed_kda
from mindspeed_kda import config
from mindspeed_kda.registry import REGISTRY

DISTRIBUTIONS = (
    "triton",
    "triton-ascend",
    "torch-npu",
    "ascendnpu-ir",
    "flash-linear-attention",
    "fla-core",
    "matplotlib",
    "rich",
)
IMPORT_TIMEOUT = 120.0
"""Seconds; importing torch_npu on a busy host takes tens of them."""


@dataclass(frozen=True)
class Imported:
    """Whether a module can be imported here: its version, or why not."""

    version: str | None
    error: str | None


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with this environment, and what mends it."""

    what: str
    cure: str


def distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Whether the import system finds the module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # a broken parent, or a half-initialised module
        return module in sys.modules


def try_import(module: str) -> Imported:
    """Imports ``module`` in a new process with this one's path."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"import {module} as m; print('version:', getattr(m, '__version__', 'unknown'))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        return Imported(None, f"import {module} did not end within {IMPORT_TIMEOUT:.0f} s")
    found = re.search(r"^version: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and found:
        return Imported(found.group(1), None)
    if done.returncode < 0:
        return Imported(None, f"import {module} crashes with signal {-done.returncode}")
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), None)
    return Imported(None, error or (lines[-1] if lines else f"exit code {done.returncode}"))


def cann() -> tuple[str | None, str | None]:
    """CANN's folder and version; (None, None) where there is none."""
    for root in (config.ASCEND_HOME_PATH.read(), config.ASCEND_TOOLKIT_HOME.read(), *CANN_FOLDERS):
        if root and Path(root).is_dir():
            return root, _cann_version(Path(root))
    return None, None


CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
"""Where CANN's installer puts it by default."""


def _cann_version(root: Path) -> str | None:
    for pattern in ("version.cfg", "*/ascend_toolkit_install.info", "*/ascend_*_install.info", "opp/version.info"):
        for path in sorted(root.glob(pattern)):
            found = re.search(
                r"(?:version|runtime_running_version)\s*=\s*\[?([\w.:]+)", path.read_text("utf-8", "replace"), re.I
            )
            if found:
                return found.group(1).split(":")[-1]
    return None


def cuda_driver() -> tuple[str | None, int]:
    """Highest CUDA version that the NVIDIA driver serves, and its device count; (None, 0) without a driver."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            lib = ctypes.CDLL(name)
            version, count = ctypes.c_int(0), ctypes.c_int(0)
            if lib.cuDriverGetVersion(ctypes.byref(version)) != 0:
                continue
            if lib.cuInit(0) == 0:
                lib.cuDeviceGetCount(ctypes.byref(count))
            return f"{version.value // 1000}.{version.value % 1000 // 10}", count.value
        except (OSError, AttributeError):
            continue
    return None, 0


def versions() -> dict[str, str | None]:
    cann_root, cann_version = cann()
    driver, _ = cuda_driver()
    found: dict[str, str | None] = {
        "mindspeed_kda": mindspeed_kda.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "torch built for CUDA": torch.version.cuda,
        "CUDA driver serves": driver,
        "CANN": None if cann_root is None else f"{cann_version or 'unknown version'} in {cann_root}",
        "numpy": numpy.__version__,
    }
    return {**found, **{name: distribution(name) for name in DISTRIBUTIONS}}


def triton_owner() -> str | None:
    """Which of triton and triton-ascend wrote the module ``triton`` that is on disk; None where neither or unclear."""
    owners = []
    for name in ("triton", "triton-ascend"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if str(file) == "triton/__init__.py" and file.hash is not None and Path(str(file.locate())).is_file():
                digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
                if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value:
                    owners.append(name)
    return owners[0] if len(owners) == 1 else None


def findings(modules: dict[str, Imported]) -> list[Finding]:
    """The classic mistakes that this environment makes. ``modules``: what ``try_import`` said of each one installed."""
    return [*_triton(modules), *_npu(modules), *_cuda(), *_settings()]


def _triton(modules: dict[str, Imported]) -> list[Finding]:
    out = []
    stock, ascend = distribution("triton"), distribution("triton-ascend")
    if stock and ascend:
        owner = triton_owner() or "unclear which of the two"
        out.append(
            Finding(
                f"triton {stock} and triton-ascend {ascend} are both installed and both own the module `triton`; "
                f"on disk now: {owner}",
                "pip uninstall -y triton triton-ascend, then install the one for this machine's accelerator",
            )
        )
    elif stock and installed("torch_npu"):
        out.append(
            Finding(
                f"triton {stock} is installed beside torch_npu; it has no Ascend backend",
                "pip uninstall -y triton && pip install 'mindspeed_kda[npu]'",
            )
        )
    if ascend and tuple(int(x) for x in re.findall(r"\d+", numpy.__version__)[:2]) >= (2, 4):
        out.append(
            Finding(
                f"numpy {numpy.__version__}: the interpreter of triton-ascend needs numpy below 2.4",
                "pip install 'numpy<2.4'",
            )
        )
    state = modules.get("triton")
    if state is not None and state.error is not None:
        out.append(Finding(f"triton is installed but cannot be imported: {state.error}", "reinstall it"))
    return out


def _npu(modules: dict[str, Imported]) -> list[Finding]:
    state = modules.get("torch_npu")
    if state is None:
        return []
    out = []
    if cann()[0] is None:
        out.append(
            Finding(
                "torch_npu is installed but CANN is not found (ASCEND_HOME_PATH is unset and the default folders are "
                "absent); `import torch` itself may fail then",
                "install CANN and `source set_env.sh`, or uninstall torch_npu; until then run with "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            )
        )
    if state.error is not None:
        out.append(
            Finding(
                f"torch_npu is installed but cannot be imported: {state.error}",
                "match torch, torch_npu and CANN versions (torch 2.7.1, torch_npu 2.7.1, CANN 8.5)",
            )
        )
    elif config.TORCH_AUTOLOAD.flag() is False:
        out.append(
            Finding("TORCH_DEVICE_BACKEND_AUTOLOAD=0 hides the NPU from torch", "unset it, or import torch_npu first")
        )
    return out


def _cuda() -> list[Finding]:
    out = []
    driver, gpus = cuda_driver()
    native = torch.version.cuda is not None or torch.version.hip is not None
    available = torch.cuda.is_available()
    if available and not native:
        out.append(
            Finding(
                "torch.cuda.is_available() is True although this torch has no CUDA: a shim redirects torch.cuda to "
                "another device. Backends here are chosen by the tensors' device type and are not misled",
                "do not read torch.cuda.is_available() as 'an NVIDIA GPU is present'",
            )
        )
    if gpus and not native:
        out.append(
            Finding(f"{gpus} NVIDIA GPU(s) present, but this torch is built without CUDA", "install a CUDA torch")
        )
    if native and gpus and not available:
        out.append(
            Finding(
                f"torch is built for CUDA {torch.version.cuda} and cannot use the driver, which serves CUDA {driver}",
                "update the driver, or install a torch built for an older CUDA",
            )
        )
    return out


def _settings() -> list[Finding]:
    out = []
    known = {name for op in REGISTRY.ops() for name in REGISTRY.of(op)}
    backend = config.BACKEND.read()
    if backend and backend not in known:
        out.append(Finding(f"{config.BACKEND.name}={backend} names no backend", f"one of {', '.join(sorted(known))}"))
    for variable in (config.VALIDATE, config.TRITON_INTERPRET):
        try:
            variable.flag()
        except ValueError as error:
            out.append(Finding(str(error), "set it to 1 or 0, or unset it"))
            continue
        if variable is config.TRITON_INTERPRET and variable.flag() and torch.cuda.is_available():
            out.append(
                Finding("TRITON_INTERPRET=1 runs Triton kernels in the interpreter, on a GPU's tensors too", "unset it")
            )
    return out
