"""The chunk-space backward of docs/kda_math.md, section 8, for one head of one sequence: the form that native kernels
use, in all its groupings of the gate gradient, so that their errors can be compared.

``store`` is applied to every operand that a kernel keeps (a rounding to bfloat16, say); products and sums stay in the
dtype of the inputs. Shapes: q, k, a [T, K] after norm and gate, v and do [T, V], b [T, 1], states [K, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_kda.reference.intra import sum_after, sum_before
from mindspeed_kda.reference.products import matmul

LOG2E = 1.4426950408889634
GROUPINGS = ("stored", "recomputed", "prefix", "stable")
"""dg from the stored operands; from recomputed factors; that with k * dkr as a prefix sum; and without i = j too."""


class ChunkSpaceGrads(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    da: Tensor
    db: Tensor
    dh0: Tensor


class _Operands(NamedTuple):
    up: Tensor  # 2^g
    down: Tensor  # 2^(-g)
    end: Tensor  # 2^(g_T - g)
    last: Tensor  # 2^(g_T), [K, 1]
    kd: Tensor
    qd: Tensor
    kr: Tensor
    ki: Tensor
    inv: Tensor
    mqk: Tensor
    U: Tensor
    S: Tensor
    S_next: Tensor


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor, scale: float, store: Callable[[Tensor], Tensor]
) -> _Operands:
    g = (a * LOG2E).cumsum(0)
    up, down, end = torch.exp2(g), torch.exp2(-g), torch.exp2(g[-1] - g)
    kd, qd, kr, ki = (store(x) for x in (k * up, scale * q * up, k * end, k * down))
    L = (b * matmul(kd, ki.T)).tril(-1)
    inv = store(torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype), upper=False, unitriangular=True))
    mqk = store(matmul(qd, ki.T).tril())
    U = matmul(inv, b * (v - matmul(kd, S)))
    last = up[-1].unsqueeze(-1)
    return _Operands(up, down, end, last, kd, qd, kr, ki, inv, mqk, U, S, last * S + matmul(kr.T, U))


def chunk_space_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    do: Tensor,
    dht: Tensor,
    scale: float,
    *,
    grouping: str = "stable",
    store: Callable[[Tensor], Tensor] = lambda x: x,
    store_between: Callable[[Tensor], Tensor] = lambda x: x,
    chunk: int = 16,
) -> ChunkSpaceGrads:
    """``store_between`` is applied to dqd, dki, dkd and dkr, what K2 would hand to K1 through memory."""
    spans = [slice(s, min(s + chunk, len(q))) for s in range(0, len(q), chunk)]
    states, S = [], h0
    for rows in spans:
        states.append(_forward(q[rows], k[rows], v[rows], a[rows], b[rows], S, scale, store))
        S = states[-1].S_next
    parts, dS = [], dht
    for rows, x in zip(reversed(spans), reversed(states), strict=True):
        grads, dS = _chunk_backward(q[rows], k[rows], v[rows], b[rows], do[rows], dS, x, scale, grouping, store_between)
        parts.append(grads)
    dq, dk, dv, da, db = (torch.cat(p) for p in zip(*reversed(parts), strict=True))
    return ChunkSpaceGrads(dq, dk, dv, da, db, dS)


def _chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    do: Tensor,
    dS: Tensor,
    x: _Operands,
    scale: float,
    grouping: str,
    store: Callable[[Tensor], Tensor],
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    dU = matmul(x.mqk.T, do) + matmul(x.kr, dS)
    dvc = matmul(x.inv.T, dU)
    dL = -matmul(dvc, x.U.T).tril(-1)
    R, dM = b * dL, matmul(do, x.U.T).tril()
    m = dM.diagonal().unsqueeze(-1)
    pairs = dM.tril(-1) if grouping == "stable" else dM
    dqd, dki, dkd, dkr = (
        store(t)
        for t in (
            matmul(do, x.S.T) + matmul(pairs, x.ki),
            matmul(pairs.T, x.qd) + matmul(R.T, x.kd),
            -matmul(b * dvc, x.S.T) + matmul(R, x.ki),
            matmul(x.U, dS.T),
        )
    )
    diagonal = m if grouping == "stable" else 0.0
    dq = scale * (x.up * dqd + diagonal * k)
    dk = x.up * dkd + x.down * dki + x.end * dkr + scale * diagonal * q
    db = (dvc * (v - matmul(x.kd, x.S))).sum(-1, keepdim=True) + (dL * matmul(x.kd, x.ki.T)).sum(-1, keepdim=True)
    state = (x.last * dS * x.S).sum(-1)
    k_dkr = k * x.end * dkr
    if grouping == "stored":
        rows = x.kd * dkd - x.ki * dki - x.kr * dkr + x.qd * dqd
        da = rows + sum_after(rows) + (x.kr * dkr).sum(0) + state
    elif grouping == "recomputed":
        rows = k * (x.up * dkd - x.down * dki) - k_dkr + q * scale * x.up * dqd
        da = rows + sum_after(rows) + (x.kr * dkr).sum(0) + state
    else:
        rows = k * (x.up * dkd - x.down * dki) + q * scale * x.up * dqd
        da = rows + sum_after(rows) + sum_before(k_dkr) + state
    dS = x.last * dS + matmul(x.qd.T, do) - matmul(x.kd.T, b * dvc)
    return (dq, dk, b * dvc, da, db), dS
