"""``chunk_kda`` on the native library: forward and backward (``contracts.chunk_kda.ChunkKdaImpl``), and the backward's
two halves on their own (``contracts.chunk_kda.ChunkKdaHalves``). ``load_operators`` first.

Kept between forward and backward: A and Aqk in the main dtype. Kernels and workspace: docs/chunk_kda_cuda.md.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda.contracts.chunk_kda import (
    LOWER_BOUND,
    PREGATED,
    SOFTPLUS,
    ChunkKdaCall,
    ChunkKdaGrads,
    Recurrence,
    Spec,
)
from mindspeed_kda.cuda_kernels.chunk_kda import layout

GATES = {PREGATED: 0, SOFTPLUS: 1, LOWER_BOUND: 2}
"""kda::Gate of cuda_kernels/chunk_kda/params.h."""
ALIGNMENT = 16
"""Bytes that divide the address of each tensor."""

_ops = torch.ops.mindspeed_kda_cuda


def _given(x: Tensor) -> Tensor:
    """The tensor as the kernels read it; a copy where strides or address are not theirs."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _maybe(x: Tensor | None) -> Tensor | None:
    return None if x is None else _given(x)


def _inputs(c: ChunkKdaCall) -> tuple[Any, ...]:
    return (*map(_given, (c.q, c.k, c.v, c.g, c.beta)), _maybe(c.A_log), _maybe(c.dt_bias))


def _cu_seqlens(c: ChunkKdaCall) -> Tensor | None:
    return None if c.cu_seqlens is None else c.cu_seqlens.contiguous()


def _options(c: ChunkKdaCall) -> tuple[Any, ...]:
    return c.scale, GATES[c.gate], c.lower_bound or 0.0, c.beta_sigmoid, c.beta_scale, c.qk_l2norm


def forward(call: ChunkKdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    c = call
    o, final_state, A, Aqk = _ops.chunk_kda_forward.default(
        *_inputs(c), _maybe(c.initial_state), _cu_seqlens(c), *_options(c),
        c.state_v_first, c.output_final_state, c.needs_grad,
    )  # fmt: skip
    return o, final_state if c.output_final_state else None, (A, Aqk) if c.needs_grad else ()


def backward(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> ChunkKdaGrads:
    c = call
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 = _ops.chunk_kda_backward.default(
        *_inputs(c), _maybe(c.initial_state), _cu_seqlens(c), *map(_given, saved), _given(do), _maybe(dht),
        *_options(c), c.state_v_first,
    )  # fmt: skip
    return ChunkKdaGrads(
        dq, dk, dv, dg, dbeta, _of(c.A_log, dA_log), _of(c.dt_bias, ddt_bias), _of(c.initial_state, dh0)
    )


def _of(given: Tensor | None, gradient: Tensor) -> Tensor | None:
    """The gradient in the shape of what was given, None where nothing was."""
    return None if given is None else gradient.view(given.shape)


def saved_specs(call: ChunkKdaCall) -> tuple[Spec, ...]:
    return (((call.B, call.T, call.HV, layout.CHUNK), call.dtype),) * 2 if call.needs_grad else ()


def _expect_chunks_of_64(c: ChunkKdaCall) -> None:
    """forward and backward serve any chunk_size, which changes no result of theirs; the states of K2 it does."""
    if c.BT != layout.CHUNK:
        raise RuntimeError(f"chunk_size: expected {layout.CHUNK} for K1 and K2 of backend 'cuda', got {c.BT}")


def bwd_recurrence(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> Recurrence:
    c = call
    _expect_chunks_of_64(c)
    h, v_new, dh, dv, dh0 = _ops.chunk_kda_bwd_recurrence.default(
        *_inputs(c), _maybe(c.initial_state), _cu_seqlens(c), *map(_given, saved), _given(do), _maybe(dht),
        *_options(c), c.state_v_first,
    )  # fmt: skip
    h, dh = layout.states(c, h), layout.states(c, dh)
    return Recurrence(h, layout.tokens(c, v_new), dh, layout.tokens(c, dv), _of(c.initial_state, dh0))


def bwd_inputs(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, recurrence: Recurrence) -> ChunkKdaGrads:
    c, r = call, recurrence
    _expect_chunks_of_64(c)
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias = _ops.chunk_kda_bwd_inputs.default(
        *_inputs(c), _cu_seqlens(c), _given(saved[0]), _given(do),
        layout.state_images(c, r.h), layout.tiles(c, r.v_new), layout.state_images(c, r.dh), layout.tiles(c, r.dv),
        *_options(c),
    )  # fmt: skip
    return ChunkKdaGrads(dq, dk, dv, dg, dbeta, _of(c.A_log, dA_log), _of(c.dt_bias, ddt_bias), r.dh0)


def _fake_states(q: Tensor, v: Tensor, cu: Tensor | None, v_first: bool) -> Tensor:
    N, HV, K, V = q.shape[0] if cu is None else cu.shape[0] - 1, v.shape[2], q.shape[3], v.shape[3]
    return q.new_empty((N, HV, V, K) if v_first else (N, HV, K, V), dtype=torch.float32)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _fake_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, ...]:
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, g, beta)),
        _nothing(q) if A_log is None else A_log.new_empty(A_log.shape),
        _nothing(q) if dt_bias is None else dt_bias.new_empty((v.shape[2], q.shape[3])),
    )


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *_, v_first, output_final_state, keep = options
    B, T, HV = v.shape[:3]
    state = _fake_states(q, v, cu_seqlens, v_first) if output_final_state else _nothing(q)
    kept = (q.new_empty((B if keep else 0, T, HV, layout.CHUNK)) for _ in range(2))
    return v.new_empty(v.shape), state, *kept


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    q, _k, v, *_, v_first = arguments
    initial_state, cu_seqlens = arguments[7:9]
    dh0 = _nothing(q) if initial_state is None else _fake_states(q, v, cu_seqlens, v_first)
    return *_fake_grads(*arguments[:7]), dh0


def _fake_bwd_recurrence(*arguments: Any) -> tuple[Tensor, ...]:
    q, _k, v, *_, v_first = arguments
    initial_state, cu_seqlens = arguments[7:9]
    (B, T, _, K), HV, V = q.shape, v.shape[2], v.shape[3]
    NT = B * -(-T // layout.CHUNK) if cu_seqlens is None else T // layout.CHUNK + cu_seqlens.shape[0] - 1
    h, dh = (q.new_empty((NT, HV, K, V)) for _ in range(2))
    v_new, dv = (q.new_empty((NT, HV, layout.CHUNK, V)) for _ in range(2))
    dh0 = _nothing(q) if initial_state is None else _fake_states(q, v, cu_seqlens, v_first)
    return h, v_new, dh, dv, dh0


def _fake_bwd_inputs(*arguments: Any) -> tuple[Tensor, ...]:
    return _fake_grads(*arguments[:7])


@functools.cache
def load_operators(library: Path) -> None:
    """Loads the native library, once, and tells torch the shapes of what its operators return."""
    torch.ops.load_library(str(library))
    for name, fake in (
        ("chunk_kda_forward", _fake_forward),
        ("chunk_kda_backward", _fake_backward),
        ("chunk_kda_bwd_recurrence", _fake_bwd_recurrence),
        ("chunk_kda_bwd_inputs", _fake_bwd_inputs),
    ):
        torch.library.register_fake(f"mindspeed_kda_cuda::{name}", fake)
