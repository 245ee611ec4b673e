"""``chunk_kda`` by its definition in chunk form, forward and backward (docs/kda_math.md, sections 2 to 7).

The implementation behind backend ``torch``: ``ChunkKdaImpl`` and ``ChunkKdaHalves`` of ``contracts.chunk_kda``.
Everything is computed in float32 (float64 for float64 inputs), all chunks at once; only the two recurrences over the
states walk the chunks. Nothing is saved for backward unless ``disable_recompute``: what backward recomputes is then
never a rounded copy of what forward used.

Tensors on chunks are [B, NT, HV, BT, K or V]; rows that hold no token are 0, so that they decay by 2^0 and write 0.
Decays are sums of per-token decays in both directions, never differences of a running sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall, ChunkKdaGrads, Recurrence, Spec
from mindspeed_kda.contracts.wy_dqkg import wide
from mindspeed_kda.reference import transforms
from mindspeed_kda.reference.intra import (
    decayed_products,
    decayed_products_backward,
    sum_after,
    sum_before,
    unit_lower_inverse,
)
from mindspeed_kda.reference.layout import ChunkLayout, chunk_layout
from mindspeed_kda.reference.products import matmul, without_autocast
from mindspeed_kda.reference.wy_dqkg import wy_chunks

LOG2E = 1.0 / math.log(2.0)


class Rows(NamedTuple):
    """The inputs after their transforms, on chunks, per value head; x and beta are g and beta as given."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor  # [B, NT, HV, BT, 1]
    a: Tensor  # log2 decay per token
    decay: Tensor  # 2^g
    to_end: Tensor  # 2^(g_L - g)
    decay_last: Tensor  # 2^(g_L), [B, NT, HV, 1, K]
    x: Tensor
    beta: Tensor  # [B, NT, HV, BT]
    q_rnorm: Tensor | None  # [B, NT, H, BT, 1], with qk_l2norm
    k_rnorm: Tensor | None


class BeforeWy(NamedTuple):
    """Everything that the op of section 5 is given, on chunks, and dh0 [N, HV, K, V]."""

    layout: ChunkLayout
    rows: Rows
    states: States
    do: Tensor
    dh: Tensor
    dv: Tensor
    dh0: Tensor


class States(NamedTuple):
    """What the forward recurrence leaves: A, Aqk, v_new, the state h at each chunk's start [B, NT, HV, K, V]."""

    A: Tensor
    Aqk: Tensor
    v_new: Tensor
    h: Tensor


def _layout(c: ChunkKdaCall) -> tuple[ChunkLayout, Tensor | None]:
    """Where the chunks lie, and the sequence of each, int64 [NT], where sequences are packed.

    A dense batch has one sequence a row, and the recurrences walk all rows together.
    """
    if c.cu_seqlens is None:
        return chunk_layout(c.T, c.BT, c.NT, c.device, None, None), None
    indices = chunks.chunk_indices(c.cu_seqlens, c.BT, c.NT)
    return chunk_layout(c.T, c.BT, c.NT, c.device, c.cu_seqlens, indices), indices[:, 0].long()


def _rows(c: ChunkKdaCall, layout: ChunkLayout) -> Rows:
    compute, group = wide(c.dtype), c.HV // c.H

    def rows(x: Tensor) -> Tensor:
        return layout.gather(x).to(compute)

    def heads(given: Tensor) -> tuple[Tensor, Tensor | None]:
        x = rows(given)
        r = transforms.inverse_norm(x) if c.qk_l2norm else None
        return (x if r is None else x * r).repeat_interleave(group, dim=2), r

    (q, q_rnorm), (k, k_rnorm) = heads(c.q), heads(c.k)
    x, beta, valid = rows(c.g), rows(c.beta), layout.valid.view(1, c.NT, 1, c.BT)
    a = torch.where(valid.unsqueeze(-1), transforms.log_decay(c, x) * LOG2E, 0.0)
    g = a.cumsum(-2)
    return Rows(
        q=q,
        k=k,
        v=rows(c.v),
        b=torch.where(valid, transforms.write_strength(c, beta), 0.0).unsqueeze(-1),
        a=a,
        decay=torch.exp2(g),
        to_end=torch.exp2(sum_after(a)),
        decay_last=torch.exp2(g[..., -1:, :]),
        x=x,
        beta=beta,
        q_rnorm=q_rnorm,
        k_rnorm=k_rnorm,
    )


def _state(c: ChunkKdaCall, given: Tensor | None) -> Tensor:
    """The running state of each sequence [N, HV, K, V], a copy of ``given`` or 0."""
    if given is None:
        return torch.zeros((c.N, c.HV, c.K, c.V), dtype=wide(c.dtype), device=c.device)
    return (given.mT if c.state_v_first else given).to(wide(c.dtype)).clone(memory_format=torch.contiguous_format)


def _given_layout(c: ChunkKdaCall, state: Tensor) -> Tensor:
    return state.mT.contiguous() if c.state_v_first else state


def _read(state: Tensor, sequence: Tensor | None, i: int) -> Tensor:
    """The state that chunk ``i`` continues, [B, HV, K, V]."""
    return state if sequence is None else state.index_select(0, sequence[i : i + 1])


def _write(state: Tensor, sequence: Tensor | None, i: int, value: Tensor) -> None:
    if sequence is None:
        state.copy_(value)
    else:
        state.index_copy_(0, sequence[i : i + 1], value)


def _w(r: Rows, A: Tensor) -> Tensor:
    return matmul(A, r.b * r.k * r.decay)


def _states(c: ChunkKdaCall, r: Rows, sequence: Tensor | None) -> tuple[States, Tensor]:
    """Stages F2 to F4, and the final states [N, HV, K, V]."""
    Aqk, kk = decayed_products((r.q, r.k), r.k, r.a)
    Aqk = c.scale * (Aqk + torch.diag_embed((r.q * r.k).sum(-1)))
    A = unit_lower_inverse(r.b * kk)
    w, v_new = _w(r, A), matmul(A, r.b * r.v)
    k_end, carry = (r.k * r.to_end).mT, r.decay_last.mT
    h = v_new.new_empty((c.B, c.NT, c.HV, c.K, c.V))
    state = _state(c, c.initial_state)
    for i in range(c.NT):
        S = _read(state, sequence, i)
        h[:, i] = S
        v_new[:, i] -= matmul(w[:, i], S)
        _write(state, sequence, i, carry[:, i] * S + matmul(k_end[:, i], v_new[:, i]))
    return States(A, Aqk, v_new, h), state


def _states_backward(
    c: ChunkKdaCall, r: Rows, s: States, do: Tensor, dht: Tensor | None, sequence: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage B2: dh [B, NT, HV, K, V], dv [B, NT, HV, BT, V], and dh0 [N, HV, K, V]."""
    w, dv = _w(r, s.A).mT, matmul(s.Aqk.mT, do)
    k_end, carry = r.k * r.to_end, r.decay_last.mT
    from_o = c.scale * matmul((r.q * r.decay).mT, do)
    dh = torch.empty_like(s.h)
    state = _state(c, dht)
    for i in reversed(range(c.NT)):
        dS = _read(state, sequence, i)
        dh[:, i] = dS
        dv[:, i] += matmul(k_end[:, i], dS)
        _write(state, sequence, i, carry[:, i] * dS + from_o[:, i] - matmul(w[:, i], dv[:, i]))
    return dh, dv, state


@without_autocast
def forward(call: ChunkKdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    layout, sequence = _layout(call)
    r = _rows(call, layout)
    s, final = _states(call, r, sequence)
    o = call.scale * matmul(r.q * r.decay, s.h) + matmul(s.Aqk, s.v_new)
    return (
        layout.scatter(o.to(call.dtype), call.T),
        _given_layout(call, final) if call.output_final_state else None,
        tuple(s) if saved_specs(call) else (),
    )


def before_wy(c: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> BeforeWy:
    """The forward recomputed or read from ``saved``, and stages B1 (dv) and B2."""
    layout, sequence = _layout(c)
    r = _rows(c, layout)
    s = States(*saved) if saved else _states(c, r, sequence)[0]
    do = layout.gather(do).to(wide(c.dtype))
    dh, dv, dh0 = _states_backward(c, r, s, do, dht, sequence)
    return BeforeWy(layout, r, s, do, dh, dv, dh0)


class Intra(NamedTuple):
    """Stage B4 on chunks: dq, dk, dg [B, NT, HV, BT, K], db [B, NT, HV, BT]; to be added to the op's."""

    dq: Tensor
    dk: Tensor
    db: Tensor
    dg: Tensor


def intra_backward(r: Rows, dAqk: Tensor, dA: Tensor) -> Intra:
    """Section 6. dAqk's diagonal goes to dq and dk alone: its two terms in dg cancel, so neither is formed."""
    q_rows, k_rows, columns = decayed_products_backward(dAqk, dA, r.b * dA, r.q, r.k, r.a)
    m = dAqk.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return Intra(
        dq=q_rows + m * r.k,
        dk=r.b * k_rows + columns + m * r.q,
        db=(r.k * k_rows).sum(-1),
        dg=r.q * q_rows + r.k * (r.b * k_rows - columns),
    )


@without_autocast
def op_inputs(call: ChunkKdaCall, do: Tensor, dht: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors that ``chunk_kda_bwd_wy_dqkg_fused`` receives in this training step, in the compute dtype.

    q and k per query/key head, g in log2; h and dh [B, NT, HV, K, V] with the call's NT, K before V.
    """
    x = before_wy(call, (), do, dht)
    r, s = x.rows, x.states
    group = call.HV // call.H
    rows = {
        "q": r.q[:, :, ::group],
        "k": r.k[:, :, ::group],
        "v": r.v,
        "v_new": s.v_new,
        "g": r.a.cumsum(-2),
        "beta": r.b.squeeze(-1),
        "A": s.A,
        "do": x.do,
        "dv": x.dv,
    }
    return {name: x.layout.scatter(t, call.T) for name, t in rows.items()} | {"h": s.h, "dh": x.dh}


@without_autocast
def backward(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> ChunkKdaGrads:
    return _inputs_backward(call, before_wy(call, saved, do, dht))


@without_autocast
def bwd_recurrence(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> Recurrence:
    c, x = call, before_wy(call, saved, do, dht)
    v_new, dv = (x.layout.scatter(t, c.T) for t in (x.states.v_new, x.dv))
    return Recurrence(x.states.h, v_new, x.dh, dv, None if c.initial_state is None else _given_layout(c, x.dh0))


@without_autocast
def bwd_inputs(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, recurrence: Recurrence) -> ChunkKdaGrads:
    """A is recomputed from the inputs, or read from ``saved``."""
    layout, _ = _layout(call)
    r, compute = _rows(call, layout), wide(call.dtype)
    A = States(*saved).A if saved else unit_lower_inverse(r.b * decayed_products((r.q, r.k), r.k, r.a)[1])
    h, dh = recurrence.h.to(compute), recurrence.dh.to(compute)
    v_new, dv, do = (layout.gather(t).to(compute) for t in (recurrence.v_new, recurrence.dv, do))
    states = States(A, torch.empty_like(A), v_new, h)
    grads = _inputs_backward(call, BeforeWy(layout, r, states, do, dh, dv, torch.empty_like(h)))
    return grads._replace(dh0=recurrence.dh0)


def _inputs_backward(c: ChunkKdaCall, x: BeforeWy) -> ChunkKdaGrads:
    """Stages B3 to B6; reads all of ``x`` but Aqk, and dh0 only to hand it on."""
    layout, r, s, do, dh, dv, dh0 = x
    wy = wy_chunks(
        q=r.q, k=r.k, v=r.v, v_new=s.v_new, b=r.b, A=s.A, h=s.h, do=do, dh=dh, dv=dv,
        decay=r.decay, to_end=r.to_end, decay_last=r.decay_last, scale=c.scale,
    )  # fmt: skip
    intra = intra_backward(r, c.scale * matmul(do, s.v_new.mT), wy.dA)
    # The stable grouping of section 8: k * dk1 as a sum over earlier rows, so that it need not cancel.
    dg = wy.dg_rows + intra.dg
    da = dg + sum_after(dg) + sum_before(wy.k_dk1) + wy.dg_state
    da.masked_fill_(~layout.valid.view(1, c.NT, 1, c.BT, 1), 0.0)  # rows behind the last one see its sums

    def tokens(y: Tensor) -> Tensor:
        return layout.scatter(y, c.T)

    def heads(dy: Tensor, y: Tensor, rnorm: Tensor | None) -> Tensor:
        group = c.HV // c.H
        dy = dy.unflatten(2, (c.H, group)).sum(3)
        return tokens(dy if rnorm is None else transforms.l2norm_backward(dy, y[:, :, ::group], rnorm))

    dx, dA_log, ddt_bias = transforms.log_decay_backward(c, r.x, da)
    return ChunkKdaGrads(
        dq=heads(wy.dq + intra.dq, r.q, r.q_rnorm),
        dk=heads(wy.dk + intra.dk, r.k, r.k_rnorm),
        dv=tokens(wy.dv),
        dg=tokens(dx),
        dbeta=tokens(transforms.write_strength_backward(c, r.beta, wy.db + intra.db)),
        dA_log=dA_log,
        ddt_bias=ddt_bias,
        dh0=None if c.initial_state is None else _given_layout(c, dh0),
    )


def saved_specs(call: ChunkKdaCall) -> tuple[Spec, ...]:
    """``States`` in the compute dtype with disable_recompute, nothing otherwise."""
    c, compute = call, wide(call.dtype)
    if not (c.needs_grad and c.disable_recompute):
        return ()
    sizes = ((c.BT, c.BT), (c.BT, c.BT), (c.BT, c.V), (c.K, c.V))
    return tuple(((c.B, c.NT, c.HV, *size), compute) for size in sizes)
