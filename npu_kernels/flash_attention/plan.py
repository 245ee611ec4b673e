"""Host side of the attention kernels: memory, arguments, launches. No synchronisation with the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda.chunks import cdiv, chunk_indices, max_chunks
from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionGrads, output_shapes
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.flash_attention.specs import ATOMIC, STAGES, Sizes, constants
from mindspeed_kda.npu_kernels.launch import launch, on_device
from mindspeed_kda.npu_kernels.wy_dqkg.plan import TRITON_DTYPE
from mindspeed_kda.npu_kernels.wy_dqkg.specs import BITS


def sizes_of(call: FlashAttentionCall) -> Sizes:
    c = call
    return Sizes(
        target=c.device.type,
        main=TRITON_DTYPE[c.dtype],
        index=None if c.cu_seqlens_q is None else TRITON_DTYPE[c.cu_seqlens_q.dtype],
        H=c.H,
        HK=c.HK,
        D=c.D,
        DV=c.DV,
        left=c.left is not None,
        right=c.right is not None,
        cap=c.softcap != 0,
    )


def adds_dq(call: FlashAttentionCall) -> bool:
    """Whether dq is added into by atomics: only where the call allows it and the tile table says that it is faster."""
    c, z = call, sizes_of(call)
    return not c.deterministic and tiling.attention_adds_dq(z.target, BITS[z.main], c.D, c.DV, z.left, z.right)


def _launch(call: FlashAttentionCall, name: str, tensors: dict[str, Any], atomic: bool = False) -> None:
    c, stage, sizes = call, STAGES[name], sizes_of(call)
    tile, fixed = sizes.tile(ATOMIC if atomic else name), constants(sizes, name, atomic)
    keys = name == "attention_dkdv"
    cu, tokens, side = (c.cu_seqlens_k, c.TK, tile.BN) if keys else (c.cu_seqlens_q, c.TQ, tile.BM)
    table = None
    if cu is None:
        blocks, batches = cdiv(tokens, side), c.B
    else:  # the most blocks that the shapes allow; which ones they are stays on the device
        blocks, batches = max_chunks(tokens, cu.shape[0] - 1, side), 1
        table = chunk_indices(cu, side, blocks)
    tasks = batches * blocks * (c.HK if keys else c.H)
    far = c.TQ + c.TK  # no window reaches further, and 32 bits hold it
    base = 1.0 if c.dtype == torch.float32 else math.log2(math.e)  # blocks.power
    values = {
        "cu_q": c.cu_seqlens_q, "cu_k": c.cu_seqlens_k, "blocks": table, "TQ": c.TQ, "TK": c.TK,
        "MB": blocks, "NB": blocks, "n_tasks": tasks, "left": min(c.left or 0, far), "right": min(c.right or 0, far),
        "scale": c.scale, "factor": c.scale * base, "cap": c.softcap * base, "inner": c.scale / (c.softcap or 1.0),
        "dq": None, **tensors,
    }  # fmt: skip
    args = {n: values[n] for n in stage.arguments if n not in fixed}
    launch(stage.kernel, c.device, tasks, args, stage.pick(fixed), tile, cube=stage.cube, persistent=False)


def forward(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
    """o and lse."""
    c = call
    o_shape, lse_shape = output_shapes(c)
    with torch.no_grad(), on_device(c.device):
        # rows of no sequence are filled here, and only a packed call can have some
        o = c.q.new_empty(o_shape) if c.cu_seqlens_q is None else c.q.new_zeros(o_shape)
        lse = c.q.new_full(lse_shape, -torch.inf, dtype=torch.float32)
        _launch(
            c, "attention", {"q": c.q.contiguous(), "k": c.k.contiguous(), "v": c.v.contiguous(), "o": o, "lse": lse}
        )
    return o, lse


def backward(call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads:
    """rowsum(dO * O), then dK and dV, then dQ, unless the launch before has added it up."""
    c, atomic = call, adds_dq(call)
    make = torch.empty_like if c.cu_seqlens_q is None else torch.zeros_like
    with torch.no_grad(), on_device(c.device):
        q, k, v, do = (x.contiguous() for x in (c.q, c.k, c.v, do))
        dq, dk, dv = (make(x) for x in (q, k, v))
        r = torch.empty(lse.shape, dtype=torch.float32, device=c.device)
        t = {"q": q, "k": k, "v": v, "o": o.contiguous(), "do": do, "lse": lse.contiguous(), "r": r}
        _launch(c, "attention_preprocess", t)
        if atomic:
            total = torch.zeros(q.shape, dtype=torch.float32, device=c.device)
            _launch(c, "attention_dkdv", {**t, "dq": total, "dk": dk, "dv": dv}, atomic=True)
            torch.mul(total, c.scale, out=dq)
        else:
            _launch(c, "attention_dkdv", {**t, "dk": dk, "dv": dv})
            _launch(c, "attention_dq", {**t, "dq": dq})
    return FlashAttentionGrads(dq, dk, dv)
