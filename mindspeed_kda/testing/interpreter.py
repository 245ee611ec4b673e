"""Triton kernels on a CPU: a child process in which Triton interprets.

Triton decides between compiling and interpreting when it is imported, for the whole process; so interpreted kernels get
a process of their own, and the caller's stays as it was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch

from mindspeed_kda import config
from mindspeed_kda.testing.memory import hostile_memory

R = TypeVar("R")


class Interpreter:
    """Runs functions in the child, one at a time, on hostile memory.

    ``interpreter(fn, *args, **kwargs)`` returns what ``fn`` returns there, or raises what it raises. ``fn`` is a
    function of a module that the child can import; tensors keep their values and strides.
    """

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return self._pool.submit(_call, fn, args, kwargs).result()


@contextlib.contextmanager
def interpreter() -> Iterator[Interpreter]:
    """Starts the child, and ends it with the block."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        # set while the child starts, so that it holds before anything there can import Triton
        with mock.patch.dict(os.environ, {config.TRITON_INTERPRET.name: "1"}):
            pool.submit(torch.set_num_threads, 1).result()
        yield Interpreter(pool)


def _call(fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    with hostile_memory():
        return fn(*args, **kwargs)
