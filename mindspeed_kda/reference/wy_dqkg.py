"""``chunk_kda_bwd_wy_dqkg_fused`` by its definition (docs/kda_math.md, section 5).

Per chunk and value head, C rows, L the last of them, E = 2^:

    dq   = scale * 2^g * (do h^T)
    dk1  = 2^(g_L - g) * (v_new dh^T)
    dw   = -(dv h^T)              kg = k * 2^g
    X    = A^T dw                 Y = A^T dv
    dv   = b * Y
    db   = sum_v Y * v + sum_k X * kg
    dk   = dk1 + b * 2^g * X
    dg   = q * dq - k * dk1 + b * kg * X,  on row L also  2^(g_L) * sum_v h * dh + sum_rows k * dk1
    M    = stril((dv v^T + dw kg^T) diag(b))
    dA   = -stril(A^T M A^T)

A and g are used as given: A need not be triangular, g need not be a cumsum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads, wide
from mindspeed_kda.reference.layout import chunk_layout
from mindspeed_kda.reference.products import matmul, without_autocast


class WyChunks(NamedTuple):
    """The op on chunks, dg in its three groups: which of them a row sums is the caller's choice (section 8).

    dq, dk, dg_rows (q * dq + b * kg * X), k_dk1 (k * dk1): [..., BT, K]; dv [..., BT, V]; db [..., BT]; dA
    [..., BT, BT]; dg_state (2^(g_L) * sum_v h * dh): [..., 1, K].
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    db: Tensor
    dg_rows: Tensor
    k_dk1: Tensor
    dg_state: Tensor
    dA: Tensor


def wy_chunks(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    b: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    decay: Tensor,
    to_end: Tensor,
    decay_last: Tensor,
    scale: float,
) -> WyChunks:
    """All chunks at once, [..., BT, K or V] each, b [..., BT, 1], h and dh [..., K, V], in one compute dtype.

    decay = 2^g, to_end = 2^(g_L - g) [..., BT, K], decay_last = 2^(g_L) [..., 1, K]. Padding rows of every other tensor
    are 0, and rows and columns of A beyond a chunk's length.
    """
    At, ht = A.mT, h.mT
    dq = scale * decay * matmul(do, ht)
    dk1 = to_end * matmul(v_new, dh.mT)
    dw = -matmul(dv, ht)
    kg = k * decay
    X, Y = matmul(At, dw), matmul(At, dv)
    db = (Y * v).sum(-1) + (X * kg).sum(-1)
    M = ((matmul(dv, v.mT) + matmul(dw, kg.mT)) * b.mT).tril(-1)
    return WyChunks(
        dq=dq,
        dk=dk1 + b * decay * X,
        dv=b * Y,
        db=db,
        dg_rows=q * dq + b * kg * X,
        k_dk1=k * dk1,
        dg_state=decay_last * (h * dh).sum(-1).unsqueeze(-2),
        dA=-matmul(matmul(At, M), At).tril(-1),
    )


def wy_dqkg(call: WyDqkgCall) -> WyDqkgGrads:
    return wy_dqkg_in(call, wide(call.dtype))


@without_autocast
def wy_dqkg_in(call: WyDqkgCall, compute: torch.dtype) -> WyDqkgGrads:
    """The same with every tensor and product in ``compute``, decays alone in g's dtype; outputs in ``compute``, dv in
    the main dtype. With the main dtype this is what plain PyTorch gives, the measure of Ascend's dual benchmark."""
    c, group = call, call.HV // call.H
    layout = chunk_layout(c.T, c.BT, c.NT, c.device, c.cu_seqlens, c.chunk_indices)

    def rows(x: Tensor) -> Tensor:
        return layout.gather(x).to(compute)

    def state(x: Tensor) -> Tensor:
        return (x.mT if c.state_v_first else x).to(compute).contiguous()

    g = layout.gather(c.g)
    valid = layout.valid.view(1, c.NT, 1, c.BT, 1)
    is_last = (torch.arange(c.BT, device=c.device) == layout.last[:, None]).view(1, c.NT, 1, c.BT, 1) & valid
    g_last = torch.where(is_last, g, 0.0).sum(-2, keepdim=True)
    out = wy_chunks(
        q=rows(c.q).repeat_interleave(group, dim=2),
        k=rows(c.k).repeat_interleave(group, dim=2),
        v=rows(c.v),
        v_new=rows(c.v_new),
        b=rows(c.beta).unsqueeze(-1),
        A=torch.where(valid.mT, rows(c.A), 0.0),
        h=state(c.h),
        do=rows(c.do),
        dh=state(c.dh),
        dv=rows(c.dv),
        decay=torch.exp2(g).to(compute),
        to_end=torch.exp2(torch.where(valid, g_last - g, 0.0)).to(compute),
        decay_last=torch.exp2(g_last).to(compute),
        scale=c.scale,
    )
    dg_last = out.dg_state + out.k_dk1.sum(-2, keepdim=True)
    dg = out.dg_rows - out.k_dk1 + torch.where(is_last, dg_last, 0.0)

    def tokens(y: Tensor) -> Tensor:
        return layout.scatter(y, c.T)

    return WyDqkgGrads(
        tokens(out.dq), tokens(out.dk), tokens(out.dv.to(c.dtype)), tokens(out.db), tokens(dg), tokens(out.dA)
    )
