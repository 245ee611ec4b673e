"""Contract of ``chunk_kda_bwd_wy_dqkg_fused``: arguments, checks, outputs and bytes.

The table of shapes and dtypes stands in the public function's docstring (``mindspeed_kda.api``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts import checks

OP = "chunk_kda_bwd_wy_dqkg_fused"
MAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class WyDqkgGrads(NamedTuple):
    """Outputs of the op, in their fixed order; unpacks as a plain tuple."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    db: Tensor
    dg: Tensor
    dA: Tensor


@dataclass(slots=True, eq=False)
class WyDqkgCall:
    """One checked call: the tensors as given (strides too) and their sizes. Not to be modified."""

    q: Tensor
    k: Tensor
    v: Tensor
    v_new: Tensor
    g: Tensor
    beta: Tensor
    A: Tensor
    h: Tensor
    do: Tensor
    dh: Tensor
    dv: Tensor
    scale: float
    cu_seqlens: Tensor | None
    chunk_indices: Tensor | None
    state_v_first: bool
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int
    NT: int

    @property
    def dtype(self) -> torch.dtype:
        """The main dtype."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.v_new, self.g, self.beta, self.A, self.h, self.do, self.dh, self.dv)


def wide(main: torch.dtype) -> torch.dtype:
    """The dtype of g and of the fp32 outputs: float32, or float64 where the main tensors are float64."""
    return torch.float64 if main == torch.float64 else torch.float32


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    state_v_first: bool = False,
) -> WyDqkgCall:
    """Validates one call. Raises ValueError or TypeError; runs no kernel and reads device values only if asked to."""
    # One look first, since this runs before every launch; the steps below say what is wrong where it finds anything.
    NT = _obvious_chunks(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, cu_seqlens, chunk_size, chunk_indices, state_v_first
    )
    if NT >= 0:
        B, T, H, K = q.shape
        return WyDqkgCall(
            q, k, v, v_new, g, beta, A, h, do, dh, dv,
            checks.scale(scale, K),
            cu_seqlens, chunk_indices, state_v_first, B, T, H, v.shape[2], K, v.shape[3], chunk_size, NT,
        )  # fmt: skip
    named = {"q": q, "k": k, "v": v, "v_new": v_new, "g": g, "beta": beta, "A": A, "h": h, "do": do, "dh": dh, "dv": dv}
    for name, value in named.items():
        checks.tensor(name, value)
    checks.rank("q", q, "[B, T, H, K]")
    checks.rank("v", v, "[B, T, HV, V]")
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    checks.head_size("q", "K", K)
    checks.head_size("v", "V", V)
    BT = checks.chunk_size(chunk_size)
    checks.value_heads(H, HV)
    checks.flag("state_v_first", state_v_first)

    main = q.dtype
    checks.dtype("q", q, MAIN_DTYPES)
    main_only, state_dtypes = (main,), (wide(main), main)
    qk, vv = (B, T, H, K), (B, T, HV, V)
    for name, t, axes, expected, dtypes in (
        ("k", k, "[B, T, H, K]", qk, main_only),
        ("v", v, "[B, T, HV, V]", vv, main_only),
        ("v_new", v_new, "[B, T, HV, V]", vv, main_only),
        ("do", do, "[B, T, HV, V]", vv, main_only),
        ("dv", dv, "[B, T, HV, V]", vv, main_only),
        ("g", g, "[B, T, HV, K]", (B, T, HV, K), (wide(main),)),
        ("beta", beta, "[B, T, HV]", (B, T, HV), state_dtypes),
    ):
        checks.rank(name, t, axes)
        checks.shape(name, t, axes, expected)
        checks.dtype(name, t, dtypes)
    checks.rank("A", A, "[B, T, HV, BT]")
    if A.shape[3] != BT:
        raise ValueError(f"chunk_size: expected A.shape[-1] = {A.shape[3]}, got {BT}")
    checks.shape("A", A, "[B, T, HV, BT]", (B, T, HV, BT))
    checks.dtype("A", A, main_only)
    for name, t in named.items():
        checks.device(name, t, q.device, "q")

    NT = chunks.cdiv(T, BT)
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, B, T, q.device)
        checks.rank("h", h, "[B, NT, HV, K, V]")
        NT = h.shape[1]
        if checks.values_readable(cu_seqlens):
            NT = chunks.count_chunks(cu_seqlens.tolist(), BT)
        elif (most := chunks.max_chunks(T, cu_seqlens.shape[0] - 1, BT)) < NT:
            raise ValueError(f"h: expected NT of at most {most} chunks for T = {T} and this cu_seqlens, got {NT}")
    if chunk_indices is not None:
        NT = _check_chunk_indices(chunk_indices, cu_seqlens, NT, BT, q.device)
    state = (B, NT, HV, V, K) if state_v_first else (B, NT, HV, K, V)
    state_axes = "[B, NT, HV, V, K]" if state_v_first else "[B, NT, HV, K, V]"
    for name, t in (("h", h), ("dh", dh)):
        checks.rank(name, t, state_axes)
        checks.shape(name, t, state_axes, state)
        checks.dtype(name, t, state_dtypes)
    if dh.dtype != h.dtype:
        raise TypeError(
            f"dh: expected h's dtype {checks.dtype_names((h.dtype,))}, got {checks.dtype_names((dh.dtype,))}"
        )
    return WyDqkgCall(
        q, k, v, v_new, g, beta, A, h, do, dh, dv,
        checks.scale(scale, K),
        cu_seqlens, chunk_indices, state_v_first, B, T, H, HV, K, V, BT, NT,
    )  # fmt: skip


def plain(
    q: object, k: object, v: object, v_new: object, g: object, beta: object, A: object, h: object, do: object,
    dh: object, dv: object, cu_seqlens: object, chunk_indices: object, scale: object, chunk_size: object,
    state_v_first: object,
) -> bool:  # fmt: skip
    """Whether these are of the very types that a call usually has, with no value of theirs to be read by ``check``."""
    return (
        Tensor is type(q) is type(k) is type(v) is type(v_new) is type(g) is type(beta) is type(A) is type(h)
        is type(do) is type(dh) is type(dv)
        and (scale is None or type(scale) is float)
        and type(chunk_size) is int
        and type(state_v_first) is bool
        and (
            chunk_indices is None
            if cu_seqlens is None
            else type(cu_seqlens) is Tensor
            and (chunk_indices is None or type(chunk_indices) is Tensor)
            and not checks.values_readable(cu_seqlens)
        )
    )  # fmt: skip


def _obvious_chunks(
    q: Any, k: Any, v: Any, v_new: Any, g: Any, beta: Any, A: Any, h: Any, do: Any, dh: Any, dv: Any,
    cu_seqlens: Any, chunk_size: Any, chunk_indices: Any, state_v_first: Any,
) -> int:  # fmt: skip
    """NT of a call with nothing to say about it; -1 where ``check`` has to look closer, for an error or for values."""
    for t in (q, k, v, v_new, g, beta, A, h, do, dh, dv):
        if (type(t) is not Tensor and type(t) is not torch.nn.Parameter) or t.layout is not torch.strided:
            return -1
    qs, vs, hs, where, main, state = q.shape, v.shape, h.shape, q.device, q.dtype, h.dtype
    if len(qs) != 4 or len(vs) != 4 or len(hs) != 5 or type(chunk_size) is not int or type(state_v_first) is not bool:
        return -1
    B, T, H, K = qs
    HV, V, NT = vs[2], vs[3], hs[1]
    if cu_seqlens is None:
        if chunk_indices is not None or chunk_size not in checks.CHUNK_SIZES or chunks.cdiv(T, chunk_size) != NT:
            return -1
    else:
        if type(cu_seqlens) is not Tensor or cu_seqlens.layout is not torch.strided:
            return -1
        if cu_seqlens.device != where or checks.values_readable(cu_seqlens):
            return -1
        if cu_seqlens.dtype not in checks.INDEX_DTYPES or cu_seqlens.dim() != 1 or B != 1 or cu_seqlens.shape[0] < 1:
            return -1
        if chunk_size not in checks.CHUNK_SIZES or chunks.max_chunks(T, cu_seqlens.shape[0] - 1, chunk_size) < NT:
            return -1
        if chunk_indices is not None and (
            type(chunk_indices) is not Tensor
            or chunk_indices.layout is not torch.strided
            or chunk_indices.dtype not in checks.INDEX_DTYPES
            or chunk_indices.shape != (NT, 2)
            or chunk_indices.device != where
        ):
            return -1
    row = (B, T, HV)
    fine = (
        1 <= K <= checks.MAX_HEAD_SIZE
        and 1 <= V <= checks.MAX_HEAD_SIZE
        and HV > 0 < H
        and HV % H == 0
        and k.shape == qs
        and vs[0] == B
        and vs[1] == T
        and v_new.shape == vs
        and do.shape == vs
        and dv.shape == vs
        and g.shape == (*row, K)
        and beta.shape == row
        and A.shape == (*row, chunk_size)
        and hs == ((B, NT, HV, V, K) if state_v_first else (B, NT, HV, K, V))
        and dh.shape == hs
        and main in MAIN_DTYPES
        and main is k.dtype is v.dtype is v_new.dtype is do.dtype is dv.dtype is A.dtype
        and g.dtype is wide(main)
        and (beta.dtype is main or beta.dtype is g.dtype)
        and (state is main or state is g.dtype)
        and dh.dtype is state
        and where == k.device == v.device == v_new.device == do.device == dv.device == A.device == g.device
        and where == beta.device == h.device == dh.device
    )
    return NT if fine else -1


def _check_chunk_indices(t: object, cu_seqlens: Tensor | None, NT: int, BT: int, where: torch.device) -> int:
    t = checks.tensor("chunk_indices", t)
    if cu_seqlens is None:
        raise ValueError("chunk_indices: expected None without cu_seqlens, got a tensor")
    checks.dtype("chunk_indices", t, checks.INDEX_DTYPES)
    checks.rank("chunk_indices", t, "[NT, 2]")
    checks.shape("chunk_indices", t, "[NT, 2]", (NT, 2))
    checks.device("chunk_indices", t, where, "q")
    if checks.values_readable(t) and checks.values_readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        expected = {(n, c) for n in range(len(bounds) - 1) for c in range(chunks.cdiv(bounds[n + 1] - bounds[n], BT))}
        got = [tuple(row) for row in t.tolist()]
        if len(got) != len(expected) or set(got) != expected:
            stray = next((f"{row}" for row in got if row not in expected), None)
            stray = stray or next(f"{row} twice" for i, row in enumerate(got) if row in got[:i])
            raise ValueError(f"chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got {stray}")
    return NT


def output_specs(call: WyDqkgCall) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Name, shape and dtype of each output, in return order."""
    w, B, T, HV = wide(call.dtype), call.B, call.T, call.HV
    return (
        ("dq", (B, T, HV, call.K), w),
        ("dk", (B, T, HV, call.K), w),
        ("dv", (B, T, HV, call.V), call.dtype),
        ("db", (B, T, HV), w),
        ("dg", (B, T, HV, call.K), w),
        ("dA", (B, T, HV, call.BT), w),
    )


def empty_outputs(call: WyDqkgCall) -> WyDqkgGrads:
    """Uninitialised, contiguous outputs on the call's device; for the plan or binding of a backend."""
    return WyDqkgGrads(*(torch.empty(shape, dtype=d, device=call.device) for _, shape, d in output_specs(call)))


def bytes_moved(call: WyDqkgCall) -> int:
    """Fewest bytes through device memory: each input read once, each output written once."""
    read = sum(t.numel() * t.element_size() for t in call.inputs)
    write = 0
    for _, shape, d in output_specs(call):
        n = d.itemsize
        for s in shape:
            n *= s
        write += n
    return read + write
