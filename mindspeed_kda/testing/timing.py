"""Time and copy speed of a device: one way for ``bench`` and for every script in benchmarks/.

On an accelerator, device events around each call, with a cache larger than L2 overwritten in between, so that inputs
come from memory as they do in training; on the CPU, the wall clock. Figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""Overwritten before each timed call on an accelerator; the largest L2 today holds about half of it."""
COPY_BYTES = {"cpu": 256 << 20}
"""Size of the buffer of the copy test; COPY_BYTES_ACCELERATOR elsewhere."""
COPY_BYTES_ACCELERATOR = 2 << 30


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median, the quartiles around it, and how many calls were timed."""

    median: float
    low: float
    high: float
    calls: int


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def device_name(device: torch.device) -> str:
    """The device in words, for a result file."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def median_time(
    fn: Callable[[], Any],
    device: torch.device | str,
    *,
    warmup: int = 3,
    budget: float = 0.5,
    min_calls: int = 5,
    max_calls: int = 200,
    flush: bool = True,
) -> Timing:
    """Median seconds of ``fn()``.

    ``warmup`` calls are not timed (compilation, caches). Then as many calls are timed as fit into ``budget`` seconds,
    at least ``min_calls`` and at most ``max_calls``. ``flush=False`` leaves the device's L2 as the last call left it.
    """
    device = torch.device(device)
    for _ in range(max(warmup, 1)):
        fn()
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(min_calls, min(max_calls, int(budget / once)))
    seconds = _wall(fn, calls) if device.type == "cpu" else _events(fn, device, calls, flush)
    seconds.sort()
    return Timing(statistics.median(seconds), seconds[len(seconds) // 4], seconds[-1 - len(seconds) // 4], calls)


def _wall(fn: Callable[[], Any], calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return seconds


def _events(fn: Callable[[], Any], device: torch.device, calls: int, flush: bool) -> list[float]:
    module = torch.get_device_module(device)
    cache = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.uint8, device=device)
    starts = [module.Event(enable_timing=True) for _ in range(calls)]
    ends = [module.Event(enable_timing=True) for _ in range(calls)]
    for start, end in zip(starts, ends, strict=True):
        cache.zero_()
        start.record()
        fn()
        end.record()
    synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in zip(starts, ends, strict=True)]


def copy_speed(device: torch.device | str, nbytes: int | None = None) -> float:
    """Bytes a second of a device-to-device copy, bytes read plus bytes written: the roof of a memory-bound op.

    ``nbytes`` is the size of the buffer copied; by default 2 GiB on an accelerator, 256 MiB on the CPU.
    """
    device = torch.device(device)
    n = nbytes or COPY_BYTES.get(device.type, COPY_BYTES_ACCELERATOR)
    source = torch.ones(n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = median_time(lambda: target.copy_(source), device, budget=0.2)
    return 2 * n / timing.median
