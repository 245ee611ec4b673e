"""Cores and launches: the only file that speaks to the driver.

Every kernel is launched on a persistent 1-D grid of at most the cores it can use, and walks its tasks in a loop; so a
grid stays far below Ascend's limit of 65535 whatever the number of tasks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from mindspeed_kda.npu_kernels.tiling import Tile

PROGRAMS_PER_SM = 4
"""Programs per multiprocessor on NVIDIA, where several hide each other's memory latency."""
INTERPRETER_CORES = 2
"""The interpreter has no cores; two, so that both the grid and the loop inside a program are walked."""


class Cores(NamedTuple):
    """Programs that run at once: cube for kernels with a matrix product, vector for the others."""

    cube: int
    vector: int


@functools.cache
def cores(kind: str, index: int) -> Cores:
    """Asks the driver. ``kind`` is a device type; RuntimeError for one that these kernels do not serve."""
    if kind == "cpu":
        return Cores(INTERPRETER_CORES, INTERPRETER_CORES)
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    if kind == "npu":
        return Cores(properties["num_aicore"], properties["num_vectorcore"])
    if kind == "cuda":
        n = properties["multiprocessor_count"] * PROGRAMS_PER_SM
        return Cores(n, n)
    raise RuntimeError(f"device: expected npu, cuda or cpu, got {kind}")


def options(kind: str, tile: Tile) -> dict[str, Any]:
    """Compile options of a launch. Warps and stages mean nothing on an NPU, whose defaults are the right ones."""
    if kind == "cuda":
        return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {}


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current, since a launch goes to the current device."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device.type).device(device)


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels on NVIDIA by everything that stock Triton compiles them for."""


def _compiled_for(x: Any) -> Any:
    """What stock Triton specialises an argument on: type and alignment of a tensor, width of an int and whether 1 or 16
    divides it, and the value of everything else that is not a float."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
    return float if type(x) is float else x


def launch(
    kernel: Any,
    device: torch.device,
    tasks: int,
    args: Mapping[str, Any],
    constants: Mapping[str, Any],
    tile: Tile,
    *,
    cube: bool = True,
) -> None:
    """Runs ``kernel`` over ``tasks`` tasks; ``cube`` says whether it holds a matrix product.

    On NVIDIA a kernel's second launch with arguments of the same kinds goes to the compiled kernel at once: binding the
    arguments anew takes Triton longer than most of these kernels run.
    """
    if tasks == 0:
        return
    available = cores(device.type, device.index or 0)
    grid = min(tasks, available.cube if cube else available.vector)
    if device.type != "cuda":
        kernel[(grid,)](**args, **constants, **options(device.type, tile))
        return
    values = {**args, **constants}
    key = (kernel.fn, device.index, tile, *constants.values(), *map(_compiled_for, args.values()))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(grid,)](**values, **options(device.type, tile))
    else:
        compiled[(grid, 1, 1)](*(values[name] for name in kernel.arg_names))
