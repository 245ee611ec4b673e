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

import torch
from torch import Tensor

from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads, wide
from mindspeed_kda.reference.layout import chunk_layout


@torch.no_grad()
def wy_dqkg(call: WyDqkgCall) -> WyDqkgGrads:
    c, compute, group = call, wide(call.dtype), call.HV // call.H
    layout = chunk_layout(c.T, c.BT, c.NT, c.device, c.cu_seqlens, c.chunk_indices)

    def rows(x: Tensor) -> Tensor:
        return layout.gather(x).to(compute)

    def state(x: Tensor) -> Tensor:
        return (x.transpose(-1, -2) if c.state_v_first else x).to(compute)

    q, k = (rows(x).repeat_interleave(group, dim=2) for x in (c.q, c.k))
    v, v_new, do, dv, g = (rows(x) for x in (c.v, c.v_new, c.do, c.dv, c.g))
    b = rows(c.beta).unsqueeze(-1)
    h, dh = state(c.h), state(c.dh)
    valid = layout.valid.view(1, c.NT, 1, c.BT, 1)
    A = torch.where(valid.transpose(-1, -2), rows(c.A), 0.0)
    At = A.transpose(-1, -2)
    is_last = (torch.arange(c.BT, device=c.device) == layout.last[:, None]).view(1, c.NT, 1, c.BT, 1) & valid
    g_last = torch.where(is_last, g, 0.0).sum(-2, keepdim=True)

    decay = torch.exp2(g)
    dq = c.scale * decay * (do @ h.transpose(-1, -2))
    dk1 = torch.exp2(torch.where(valid, g_last - g, 0.0)) * (v_new @ dh.transpose(-1, -2))
    dw = -(dv @ h.transpose(-1, -2))
    kg = k * decay
    X, Y = At @ dw, At @ dv
    db = (Y * v).sum(-1) + (X * kg).sum(-1)
    dk = dk1 + b * decay * X
    dg = q * dq - k * dk1 + b * kg * X
    dg_last = torch.exp2(g_last) * (h * dh).sum(-1).unsqueeze(-2) + (k * dk1).sum(-2, keepdim=True)
    dg = dg + torch.where(is_last, dg_last, 0.0)
    M = ((dv @ v.transpose(-1, -2) + dw @ kg.transpose(-1, -2)) * b.transpose(-1, -2)).tril(-1)
    dA = -(At @ M @ At).tril(-1)

    def tokens(y: Tensor) -> Tensor:
        return layout.scatter(y, c.T)

    return WyDqkgGrads(tokens(dq), tokens(dk), tokens((b * Y).to(c.dtype)), tokens(db), tokens(dg), tokens(dA))
