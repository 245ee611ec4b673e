"""Gradients of ``chunk_kda`` and ``flash_attention``: one autograd function each for all backends. No mathematics here.

The backend chosen in forward also runs backward. Inputs are kept by ``save_for_backward``, so that hooks on saved
tensors (offloading, checkpointing) see them; gradients leave in their inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall, ChunkKdaGrads, ChunkKdaImpl
from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionImpl

BackwardHook = Callable[[ChunkKdaCall, Tensor, "Tensor | None"], None]
BACKWARD_HOOKS: list[BackwardHook] = []
"""Called as ``hook(call, do, dht)`` before each backward: how ``testing.capture`` sees a real training step."""


class ChunkKda(torch.autograd.Function):
    """``apply(call, impl, *call.tensors)``: (o, final_state or None)."""

    @staticmethod
    def forward(ctx: Any, call: ChunkKdaCall, impl: ChunkKdaImpl, *tensors: Tensor | None) -> tuple[Tensor, Any]:
        o, final_state, saved = impl.forward(call.with_tensors(tensors))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.num_inputs = len(tensors)
        ctx.call, ctx.impl = call.with_tensors([None] * len(tensors)), impl
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        kept = ctx.saved_tensors  # read once: checkpointing hands each tensor out a single time
        tensors, saved = kept[: ctx.num_inputs], kept[ctx.num_inputs :]
        call = ctx.call.with_tensors(tensors)
        grads = run_backward(call, ctx.impl, saved, do, dht)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(g if need else None for g, need in zip((*grads, None), needed, strict=True))


def run_backward(
    call: ChunkKdaCall, impl: ChunkKdaImpl, saved: tuple[Tensor, ...], do: Tensor | None, dht: Tensor | None
) -> list[Tensor | None]:
    """The gradients in the order of ``ChunkKdaGrads``, each in its input's dtype. A ``do`` of None counts as 0."""
    if do is None:
        do = call.q.new_zeros((call.B, call.T, call.HV, call.V))
    for hook in tuple(BACKWARD_HOOKS):
        hook(call, do, dht)
    grads = impl.backward(call, saved, do, dht)
    out: list[Tensor | None] = []
    for name, g, x in zip(ChunkKdaGrads._fields, grads, call.tensors, strict=False):
        if (g is None) != (x is None):
            raise RuntimeError(f"{name}: expected {'None' if x is None else 'a tensor'} from the backend's backward")
        out.append(None if g is None or x is None else g.to(x.dtype))
    return out


class FlashAttention(torch.autograd.Function):
    """``apply(call, impl, q, k, v)``: (o, lse); no gradient flows through lse."""

    @staticmethod
    def forward(ctx: Any, call: FlashAttentionCall, impl: FlashAttentionImpl, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        o, lse = impl.forward(call.with_tensors(q, k, v, call.cu_seqlens_q, call.cu_seqlens_k))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, o, lse)
        ctx.call, ctx.impl = call.with_tensors(None, None, None, None, None), impl
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, _dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        if do is None:
            return None, None, None, None, None
        grads = ctx.impl.backward(ctx.call.with_tensors(*tensors), o, lse, do)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(g if need else None for g, need in zip(grads, needed, strict=True))
