"""The two packages behind the gate, found or missed with a sentence; a driver and an hivmc that stand in for CANN's."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS, Target

INSTALL = "pip install 'mindspeed_kda[ascend-check]' (triton-ascend 3.2.0 and ascendnpu-ir 1.2.0, Python 3.10 or 3.11)"


def missing() -> str | None:
    """None where the gate can run, else what is missing and how to install it. Imports neither package."""
    try:
        importlib.metadata.version("triton-ascend")
    except importlib.metadata.PackageNotFoundError:
        stock = " (stock triton is installed and takes its place)" if importlib.util.find_spec("triton") else ""
        return f"ascend-check needs triton-ascend, which is not installed{stock}: {INSTALL}"
    if importlib.util.find_spec("triton.backends.ascend") is None:
        return f"the module triton is not triton-ascend's (stock triton was installed over it): reinstall it, {INSTALL}"
    if importlib.util.find_spec("ascendnpuir") is None:
        return f"ascend-check needs ascendnpu-ir, which is not installed: {INSTALL}"
    absent = [t.compiler for t in TARGETS.values() if not compiler_path(t).is_file()]
    if absent:
        return f"ascendnpu-ir has no {absent[0]}: {INSTALL}"
    return None


def versions() -> dict[str, str]:
    """Versions of the packages that decide the result."""
    return {name: importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")}


def compiler_path(target: Target) -> Path:
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise RuntimeError(INSTALL)
    return Path(spec.origin).parent / "bin" / target.compiler


def write_hivmc_stand_ins(folder: Path) -> None:
    """Writes an ``hivmc`` and an ``hivmc-a5`` that do nothing and succeed: CANN alone has the real ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("hivmc", "hivmc-a5"):
        path = folder / name
        path.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
        path.chmod(0o755)


@contextlib.contextmanager
def stand_in_driver(target: Target) -> Iterator[None]:
    """Within the block Triton believes that this target is the active device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Utils:
        def get_device_properties(self, device: Any) -> dict[str, int]:
            return {"max_shared_mem": 1, "num_aicore": target.cube_cores, "num_vectorcore": target.vector_cores}

    class Driver:
        utils = Utils()

        def get_current_target(self) -> Any:
            return GPUTarget("npu", target.name, 0)

        def get_current_device(self) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            return None  # asked for where an autotuned kernel is defined; nothing is timed here

    before = driver.active
    driver.set_active(Driver())
    try:
        yield
    finally:
        driver.set_active(before)
