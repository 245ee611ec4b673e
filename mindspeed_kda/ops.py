"""Schemas and fake implementations for ``torch.compile``: one opaque operator per public op.

Eager calls do not pass through here (a Python operator costs tens of microseconds a call); ``api`` takes this way only
while Dynamo traces, so that no graph break occurs. ``chunk_kda`` is an operator forward, one backward, and the formula
that ties them; a request for a backend is read when the function is traced, and holds for both; so is
``flash_attention``. The two halves of ``chunk_kda``'s backward (K2, K1) are plain functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda.autograd import run_backward
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.contracts import flash_attention as attention
from mindspeed_kda.contracts import wy_dqkg as wy
from mindspeed_kda.registry import REGISTRY


@torch.library.custom_op("mindspeed_kda::chunk_kda_bwd_wy_dqkg_fused", mutates_args=())
def chunk_kda_bwd_wy_dqkg_fused(
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
    scale: float | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    chunk_indices: Tensor | None,
    state_v_first: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = wy.check(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices, state_v_first
    )
    return tuple(REGISTRY.choose(wy.OP, call, call.device.type, backend).load()(call))


@chunk_kda_bwd_wy_dqkg_fused.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(wy.empty_outputs(wy.check(*arguments[:-1])))  # all but backend


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
_OPTIONS = (
    "float? scale, bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool safe_gate, float? lower_bound, "
    "bool disable_recompute, bool state_v_first, int chunk_size, bool needs_grad, str? backend"
)
OPTION_NAMES = tuple(text.split()[1] for text in _OPTIONS.split(", "))
_NUM_TENSORS = len(kda.ChunkKdaTensors._fields)


def _chosen(args: Sequence[Any]) -> tuple[kda.ChunkKdaCall, kda.ChunkKdaImpl]:
    """The checked call and its backend, from the tensors and options of either operator."""
    t = kda.ChunkKdaTensors(*args[:_NUM_TENSORS])
    options = dict(zip(OPTION_NAMES, args[_NUM_TENSORS:], strict=True))
    backend = options.pop("backend")
    call = kda.check(
        t.q, t.k, t.v, t.g, t.beta,
        A_log=t.A_log, dt_bias=t.dt_bias, initial_state=t.initial_state, cu_seqlens=t.cu_seqlens, **options,
    )  # fmt: skip
    return call, REGISTRY.choose(kda.OP, call, call.device.type, backend).load()


@torch.library.custom_op(
    "mindspeed_kda::chunk_kda_fwd", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor[])"
)
def chunk_kda_fwd(*args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, the final state (an empty tensor where it is not asked for) and what backward needs."""
    call, impl = _chosen(args)
    o, final_state, saved = impl.forward(call)
    return o, call.q.new_empty(0) if final_state is None else final_state, list(saved)


@chunk_kda_fwd.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    call, impl = _chosen(args)
    (o, o_dtype), (state, state_dtype) = kda.output_specs(call)
    q = call.q
    final = q.new_empty(state, dtype=state_dtype) if call.output_final_state else q.new_empty(0)
    return q.new_empty(o, dtype=o_dtype), final, [q.new_empty(s, dtype=d) for s, d in impl.saved_specs(call)]


@torch.library.custom_op(
    "mindspeed_kda::chunk_kda_bwd",
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dht, Tensor[] saved, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
)
def chunk_kda_bwd(do: Tensor | None, dht: Tensor | None, saved: Sequence[Tensor], *args: Any) -> list[Tensor]:
    """The gradients of the inputs that are there, in the order of ``ChunkKdaGrads``."""
    call, impl = _chosen(args)
    return [g for g in run_backward(call, impl, tuple(saved), do, dht) if g is not None]


@chunk_kda_bwd.register_fake
def _(do: Tensor | None, dht: Tensor | None, saved: Sequence[Tensor], *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[: _NUM_TENSORS - 1] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[2])
    ctx.options = inputs[_NUM_TENSORS:]


def _backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _saved: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # read once: checkpointing hands each tensor out a single time
    tensors, saved = kept[:_NUM_TENSORS], kept[_NUM_TENSORS:]
    if not ctx.options[OPTION_NAMES.index("output_final_state")]:
        dht = None
    grads = iter(chunk_kda_bwd(do, dht, list(saved), *tensors, *ctx.options))
    of_inputs = [None if x is None else next(grads) for x in tensors[:-1]]
    return (*of_inputs, None, *(None for _ in ctx.options))


def _halves(backend: str | None, arguments: dict[str, Any]) -> tuple[kda.ChunkKdaCall, Any, tuple[Tensor, ...]]:
    """The checked call, its backend, and what its forward keeps."""
    call = kda.check(**arguments, needs_grad=True)
    chosen = REGISTRY.choose(kda.OP, call, call.device.type, backend)
    impl = chosen.load()
    if not hasattr(impl, "bwd_recurrence"):
        raise RuntimeError(f"backend {chosen.name!r} has no K1 and K2 of their own; cuda and torch have")
    return call, impl, impl.forward(call)[2]


@torch.no_grad()
def chunk_kda_bwd_recurrence(
    do: Tensor, dht: Tensor | None = None, *, backend: str | None = None, **arguments: Any
) -> kda.Recurrence:
    """K2, the recurrence of ``chunk_kda``'s backward: h, v_new, dh, dv, dh0 (``contracts.chunk_kda.Recurrence``).

    do is the gradient of o [B, T, HV, V], dht that of the final state or None; ``arguments`` are the keyword arguments
    of ``chunk_kda`` but ``backend``. A and Aqk are computed first, as its forward does. Chunks past the last one of
    packed sequences hold nothing. Formulas: docs/kda_math.md, section 4. Raises what ``chunk_kda`` raises, and
    RuntimeError where the backend has no K2 of its own.
    """
    call, impl, saved = _halves(backend, arguments)
    return impl.bwd_recurrence(call, saved, do, dht)


@torch.no_grad()
def chunk_kda_bwd_inputs(
    do: Tensor, recurrence: kda.Recurrence, *, backend: str | None = None, **arguments: Any
) -> kda.ChunkKdaGrads:
    """K1, the way back to ``chunk_kda``'s inputs: their gradients, from what K2 left; dh0 is handed on.

    Arguments as those of ``chunk_kda_bwd_recurrence``; each gradient has its input's shape, and its dtype or a wider
    one. Formulas: docs/kda_math.md, sections 5 to 7. Raises what ``chunk_kda_bwd_recurrence`` raises.
    """
    call, impl, saved = _halves(backend, arguments)
    return impl.bwd_inputs(call, saved, do, recurrence)


chunk_kda_fwd.register_autograd(_backward, setup_context=_setup_context)


_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool causal, int? left, int? right, "
    "float softcap, float? scale, bool deterministic, bool needs_grad, str? backend"
)


def _attention_call(args: Sequence[Any]) -> attention.FlashAttentionCall:
    """The checked call, from the tensors and options of either operator."""
    q, k, v, cu_q, cu_k, causal, left, right, softcap, scale, deterministic, needs_grad, _backend = args
    return attention.check(
        q, k, v, causal=causal, window=(left, right), softcap=softcap, scale=scale, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, deterministic=deterministic, needs_grad=needs_grad,
    )  # fmt: skip


def _attention(args: Sequence[Any]) -> tuple[attention.FlashAttentionCall, attention.FlashAttentionImpl]:
    """The checked call and its backend."""
    call = _attention_call(args)
    return call, REGISTRY.choose(attention.OP, call, call.device.type, args[-1]).load()


@torch.library.custom_op(
    "mindspeed_kda::flash_attention_fwd", mutates_args=(), schema=f"({_ATTENTION}) -> (Tensor, Tensor)"
)
def flash_attention_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """o and lse."""
    call, impl = _attention(args)
    return impl.forward(call)


@flash_attention_fwd.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    call = _attention_call(args)
    o, lse = attention.output_shapes(call)
    return call.q.new_empty(o), call.q.new_empty(lse, dtype=wy.wide(call.dtype))


@torch.library.custom_op(
    "mindspeed_kda::flash_attention_bwd",
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, {_ATTENTION}) -> (Tensor, Tensor, Tensor)",
)
def flash_attention_bwd(do: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, impl = _attention(args)
    dq, dk, dv = impl.backward(call, o, lse, do)
    return dq, dk, dv


@flash_attention_bwd.register_fake
def _(do: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in args[:3])
    return q, k, v


def _attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]


def _attention_backward(ctx: Any, do: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    o, lse, *tensors = ctx.saved_tensors
    none = (None,) * (2 + len(ctx.options))
    if do is None:
        return (None, None, None, *none)
    return (*flash_attention_bwd(do, o, lse, *tensors, *ctx.options), *none)


flash_attention_fwd.register_autograd(_attention_backward, setup_context=_attention_context)
