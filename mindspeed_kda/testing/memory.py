"""Hostile memory: uninitialised tensors hold NaN (floats) or the largest value (integers), so that a read of what was
never written shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def hostile_memory() -> Iterator[None]:
    """Within the block ``torch.empty``, ``empty_like``, ``new_empty`` and ``empty_strided`` return poisoned memory.

    torch fills them itself, in Python and in native code alike, as part of its deterministic mode; that mode also picks
    torch's own deterministic algorithms on CUDA, and here only warns where there is none. The settings are process-wide
    and are put back at the end.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    module: Any = torch.utils.deterministic  # its flags are properties of a module class, unknown to type checkers
    fill = module.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    module.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        module.fill_uninitialized_memory = fill
