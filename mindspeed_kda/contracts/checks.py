"""Checks shared by the contracts. Each error names the argument, what was expected and what came."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mindspeed_kda import config

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_SIZE = 256
CHUNK_SIZES = (16, 32, 64)


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))


def fail_shape(name: str, axes: str, expected: Sequence[int | str], got: Sequence[int]) -> NoReturn:
    raise ValueError(f"{name}: expected shape {axes} = [{', '.join(map(str, expected))}], got {list(got)}")


def tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected layout torch.strided, got {value.layout}")
    return value


def rank(name: str, t: torch.Tensor, axes: str) -> None:
    """``axes`` is the shape in words, such as ``[B, T, H, K]``."""
    expected = axes.count(",") + 1
    if t.dim() != expected:
        raise ValueError(f"{name}: expected {expected} dimensions {axes}, got {t.dim()} (shape {list(t.shape)})")


def shape(name: str, t: torch.Tensor, axes: str, expected: tuple[int, ...]) -> None:
    if t.shape != expected:
        fail_shape(name, axes, expected, t.shape)


def dtype(name: str, t: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {dtype_names(allowed)}, got {dtype_names((t.dtype,))}")


def device(name: str, t: torch.Tensor, expected: torch.device, of: str) -> None:
    if t.device != expected:
        raise ValueError(f"{name}: expected device {expected} (that of {of}), got {t.device}")


def head_size(name: str, axis: str, size: int) -> None:
    if not 1 <= size <= MAX_HEAD_SIZE:
        raise ValueError(f"{name}: expected {axis} from 1 to {MAX_HEAD_SIZE}, got {size}")


def value_heads(heads: int, value_heads: int) -> None:
    if heads < 1:
        raise ValueError(f"q: expected at least one head H, got {heads}")
    if value_heads < 1 or value_heads % heads:
        raise ValueError(f"v: expected HV to be a positive multiple of H = {heads}, got HV = {value_heads}")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def scale(value: object, key_size: int) -> float:
    """The scale of the scores; None stands for K^-0.5."""
    if value is None:
        return float(key_size**-0.5)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's scalars are Real, tensors are not
        raise TypeError(f"scale: expected a float or None, got {type(value).__name__}")
    return float(value)


def chunk_size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"chunk_size: expected an int, got {type(value).__name__}")
    if value not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected {', '.join(map(str, CHUNK_SIZES))}, got {value}")
    return value


def values_readable(t: torch.Tensor) -> bool:
    """Whether reading ``t`` on the host costs no device synchronisation, or was asked for and is possible.

    While a CUDA graph is captured nothing may synchronise, so there the values are not looked at, asked for or not.
    """
    if isinstance(t, FakeTensor) or t.device.type == "meta":
        return False
    if t.device.type == "cpu":
        return True
    return bool(config.VALIDATE.flag()) and not (t.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def cu_seqlens(t: object, batch: int, tokens: int, where: torch.device, name: str = "cu_seqlens") -> torch.Tensor:
    """Checks packed-sequence bounds: [N+1], from 0, not decreasing, within T. Values only where that costs no sync."""
    t = tensor(name, t)
    rank(name, t, "[N+1]")
    dtype(name, t, INDEX_DTYPES)
    if t.shape[0] < 1:
        raise ValueError(f"{name}: expected at least one element [N+1], got 0")
    device(name, t, where, "q")
    if batch != 1:
        raise ValueError(f"{name}: expected B = 1 with packed sequences, got B = {batch}")
    if values_readable(t):
        bounds = t.tolist()
        if bounds[0] != 0:
            raise ValueError(f"{name}: expected to start at 0, got {bounds[0]}")
        for i, (a, b) in enumerate(itertools.pairwise(bounds)):
            if b < a:
                raise ValueError(f"{name}: expected non-decreasing values, got {a} then {b} at position {i + 1}")
        if bounds[-1] > tokens:
            raise ValueError(f"{name}: expected to end within T = {tokens}, got {bounds[-1]}")
    return t
