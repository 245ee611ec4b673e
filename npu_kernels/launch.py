"""Cores and launches: the only file that speaks to the driver.

Every kernel is launched on a persistent 1-D grid of at most the cores it can use, and walks its tasks in a loop; so a
grid stays far below Ascend's limit of 65535 whatever the number of tasks.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton

from mindspeed_kda.npu_kernels.tiling import AttentionTile, Tile

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


def options(kind: str, tile: Tile | AttentionTile) -> dict[str, Any]:
    """Compile options of a launch. Warps and stages mean nothing on an NPU, whose defaults are the right ones."""
    if kind == "cuda":
        return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {}


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current, since a launch goes to the current device."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device.type).device(device)


ALIGNMENT = 16
"""Bytes; stock Triton compiles a kernel anew for a pointer that is not aligned to them."""
_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels on NVIDIA, with the order of their arguments, by everything that stock Triton compiles them for."""


def _compiled_for(x: Any) -> Any:
    """What stock Triton specialises an argument on: type and alignment of a tensor, width of an int and whether 1 or 16
    divides it, and the value of everything else that is not a float."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    if type(x) is int:
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
    return float if type(x) is float else x


class Launched(NamedTuple):
    """One launch on NVIDIA, ready to be made again: on its grid, with its constants, on other memory."""

    run: Callable[..., None]
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    constants: tuple[Any, ...]


def launch(
    kernel: Any,
    device: torch.device,
    tasks: int,
    args: Mapping[str, Any],
    constants: Mapping[str, Any],
    tile: Tile | AttentionTile,
    *,
    cube: bool = True,
    persistent: bool = True,
) -> Launched | None:
    """Runs ``kernel`` over ``tasks`` tasks; ``cube`` says whether it holds a matrix product.

    Not ``persistent``: a program per task on NVIDIA, which hands them out as others end. For tasks of unequal length.

    On NVIDIA a kernel's second launch with arguments of the same kinds goes to the compiled kernel at once: binding the
    arguments anew takes Triton longer than most of these kernels run. The answer there is the launch for ``repeat``.
    """
    if tasks == 0:
        return None
    available = cores(device.type, device.index or 0)
    grid = min(tasks, available.cube if cube else available.vector)
    if not persistent and device.type == "cuda":
        grid = tasks
    if not repeats(device):
        kernel[(grid,)](**args, **constants, **options(device.type, tile))
        return None
    key = (kernel.fn, device.index, tile, *constants.values(), *map(_compiled_for, args.values()))
    known = _COMPILED.get(key)
    if known is None:
        names = kernel.arg_names[: len(args)]
        if set(names) != set(args):
            raise TypeError(f"{kernel.fn.__name__}: expected its constants last, got {', '.join(kernel.arg_names)}")
        pick, fixed = operator.itemgetter(*names), tuple(constants[n] for n in kernel.arg_names[len(args) :])
        compiled = kernel[(grid,)](**args, **constants, **options(device.type, tile))
        _COMPILED[key] = compiled, pick, fixed
        return Launched(compiled[(grid, 1, 1)], pick, fixed)
    compiled, pick, fixed = known
    again = Launched(compiled[(grid, 1, 1)], pick, fixed)
    again.run(*pick(args), *fixed)
    return again


def repeats(device: torch.device) -> bool:
    """Whether ``launch`` answers with what ``repeat`` takes."""
    return device.type == "cuda"


def repeat(launches: tuple[Launched, ...], values: Mapping[str, Any], device: torch.device) -> None:
    """Makes these launches again, on the current stream. ``values``: the run-time arguments of all of them by name.

    A tensor is given by its address, which Triton takes as it is; it must be aligned to ALIGNMENT bytes wherever the
    recorded one was, of the same dtype, and a number of the same width and divisibility. Nothing is looked at: binding,
    specialising and picking are what takes the time that this saves.
    """
    stream = current_stream(device)
    for run, pick, constants in launches:
        run(*pick(values), *constants, stream=stream)


def current_stream(device: torch.device) -> int:
    """Handle of the current stream of ``device``."""
    return int(torch.get_device_module(device.type).current_stream(device).cuda_stream)


def addresses(tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | None:
    """Address of each tensor; None where one is not contiguous or not aligned to ALIGNMENT bytes."""
    out, bits = {}, 0
    for name, t in tensors.items():
        if not t.is_contiguous():
            return None
        out[name] = p = t.data_ptr()
        bits |= p
    return None if bits % ALIGNMENT else out
