"""Contract of ``flash_attention``: arguments, checks, the call as backends see it, and what a backend must provide.

The table of shapes and dtypes stands in the public function's docstring (``mindspeed_kda.api``).

**Which keys a query sees.** With Tq queries and Tk keys of one sequence, query i stands at key i + Tk - Tq (aligned at
the bottom right). ``left`` and ``right`` bound how many keys before and after that place it sees; None is no bound, and
causal is ``right = 0``. A query that sees no key has output 0, lse -inf and gradients 0.

**Backend protocol.** ``Backend.load()`` returns an object (a module will do) with the functions of
``FlashAttentionImpl``:

* ``forward(call) -> (o, lse)``: o [B, Tq, H, DV] in the main dtype, lse [B, H, Tq] in the ``wide`` dtype, the
  natural-log sum of exponentials of the scaled, capped scores.
* ``backward(call, o, lse, do) -> FlashAttentionGrads``: do has o's shape and dtype, any strides; each gradient has its
  input's shape and dtype, and is 0 for rows that belong to no sequence.

Neither may hold a tensor of Tq x Tk elements, and a backend that serves ``deterministic`` repeats bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mindspeed_kda.contracts import checks
from mindspeed_kda.contracts.wy_dqkg import MAIN_DTYPES, wide

OP = "flash_attention"


class FlashAttentionGrads(NamedTuple):
    """Gradients in the order of the inputs."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(slots=True, eq=False)
class FlashAttentionCall:
    """One checked call: the tensors as given (strides too), the options and the sizes. Not to be modified.

    left, right: bounds of the window, None without one; causal has already made right 0. softcap 0 is none.
    needs_grad: whether a backward may follow.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    left: int | None
    right: int | None
    softcap: float
    scale: float
    deterministic: bool
    needs_grad: bool
    B: int
    TQ: int
    TK: int
    H: int
    HK: int
    D: int
    DV: int

    @property
    def dtype(self) -> torch.dtype:
        """The main dtype."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def with_tensors(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> FlashAttentionCall:
        """The same call on other tensors of the same shapes and dtypes; unchecked."""
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return dataclasses.replace(self, **tensors)


class FlashAttentionImpl(Protocol):
    """What a backend's ``load()`` returns for this op (see the head of this file)."""

    def forward(self, call: FlashAttentionCall) -> tuple[Tensor, Tensor]: ...

    def backward(self, call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads: ...


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = True,
    needs_grad: bool = True,
) -> FlashAttentionCall:
    """Validates one call. Raises ValueError or TypeError; runs no kernel and reads device values only if asked to."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, value)
    checks.rank("q", q, "[B, Tq, H, D]")
    checks.rank("k", k, "[B, Tk, HK, D]")
    checks.rank("v", v, "[B, Tk, HK, DV]")
    B, TQ, H, D = q.shape
    TK, HK, DV = k.shape[1], k.shape[2], v.shape[3]
    checks.head_size("q", "D", D)
    checks.head_size("v", "DV", DV)
    if H < 1:
        raise ValueError(f"q: expected at least one head H, got {H}")
    if HK < 1 or H % HK:
        raise ValueError(f"k: expected HK to divide H = {H}, got HK = {HK}")
    checks.shape("k", k, "[B, Tk, HK, D]", (B, TK, HK, D))
    checks.shape("v", v, "[B, Tk, HK, DV]", (B, TK, HK, DV))
    checks.dtype("q", q, MAIN_DTYPES)
    for name, t in (("k", k), ("v", v)):
        checks.dtype(name, t, (q.dtype,))
        checks.device(name, t, q.device, "q")
    checks.flag("causal", causal)
    checks.flag("deterministic", deterministic)
    left, right = _window(window)
    cap = _softcap(softcap)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        present, absent = ("q", "k") if cu_seqlens_k is None else ("k", "q")
        raise ValueError(f"cu_seqlens_{absent}: expected a tensor beside cu_seqlens_{present}, got None")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q = checks.cu_seqlens(cu_seqlens_q, B, TQ, q.device, "cu_seqlens_q")
        cu_seqlens_k = checks.cu_seqlens(cu_seqlens_k, B, TK, q.device, "cu_seqlens_k")
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            checks.fail_shape("cu_seqlens_k", "[N+1]", tuple(cu_seqlens_q.shape), cu_seqlens_k.shape)
    return FlashAttentionCall(
        q, k, v, cu_seqlens_q, cu_seqlens_k, left, 0 if causal else right, cap, checks.scale(scale, D),
        deterministic, needs_grad, B, TQ, TK, H, HK, D, DV,
    )  # fmt: skip


def check_backward(call: FlashAttentionCall, do: Tensor, o: Tensor, lse: Tensor) -> None:
    """Validates what the backward on its own takes beside the call."""
    o_shape, lse_shape = output_shapes(call)
    for name, t, axes, expected, dtype in (
        ("do", do, "[B, Tq, H, DV]", o_shape, call.dtype),
        ("o", o, "[B, Tq, H, DV]", o_shape, call.dtype),
        ("lse", lse, "[B, H, Tq]", lse_shape, wide(call.dtype)),
    ):
        checks.tensor(name, t)
        checks.rank(name, t, axes)
        checks.shape(name, t, axes, expected)
        checks.dtype(name, t, (dtype,))
        checks.device(name, t, call.device, "q")


def _window(window: object) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected a pair (left, right), got {window!r}")
    for side, value in zip(("left", "right"), window, strict=True):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"window: expected {side} to be an int or None, got {value!r}")
        if value < 0:
            raise ValueError(f"window: expected {side} of 0 or more, or None for no bound, got {value}")
    return window[0], window[1]


def _softcap(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"softcap: expected a float, got {type(value).__name__}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"softcap: expected a finite number of 0 (none) or more, got {number}")
    return number


def output_shapes(call: FlashAttentionCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and of lse."""
    return (call.B, call.TQ, call.H, call.DV), (call.B, call.H, call.TQ)


def pairs_seen(call: FlashAttentionCall) -> int:
    """Query-key pairs inside the mask of one head of one sequence, for a call that is not packed."""
    total = 0
    for i in range(call.TQ):
        at = i + call.TK - call.TQ
        first = 0 if call.left is None else max(0, at - call.left)
        end = call.TK if call.right is None else min(call.TK, at + call.right + 1)
        total += max(0, end - first)
    return total


def flops(call: FlashAttentionCall) -> tuple[int, int]:
    """Floating-point operations in matrix products of forward and backward: 2 and 5 products over the pairs seen."""
    pairs = pairs_seen(call) * call.B * call.H
    return 2 * pairs * (call.D + call.DV), 2 * pairs * (3 * call.D + 2 * call.DV)
