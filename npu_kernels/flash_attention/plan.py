"""Host side of the attention kernels: memory, arguments, launches. No synchronisation with the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionGrads, output_shapes
from mindspeed_kda.npu_kernels.flash_attention import backward as bwd
from mindspeed_kda.npu_kernels.flash_attention.forward import flash_attention_fwd_kernel
from mindspeed_kda.npu_kernels.launch import cores, on_device


class Tile(NamedTuple):
    """Rows, keys, and the head sizes rounded up to what a product takes."""

    BM: int
    BN: int
    BD: int
    BDV: int


def tile(call: FlashAttentionCall) -> Tile:
    """Smaller the wider the rows, so that a pair of blocks with its accumulators stays on chip."""
    BD, BDV = (max(16, 1 << (n - 1).bit_length()) for n in (call.D, call.DV))
    side = 64 if max(BD, BDV) <= 128 else 32
    if call.dtype == torch.float32:
        side //= 2
    return Tile(side, side, BD, BDV)


def _sequences(call: FlashAttentionCall) -> int:
    return call.B if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1


def _launch(call: FlashAttentionCall, kernel: Any, tasks: int, names: dict[str, Any], **values: Any) -> None:
    if tasks == 0:
        return
    grid = min(tasks, cores(call.device.type, call.device.index or 0).cube)
    t = tile(call)
    shared = {
        "cu_q": call.cu_seqlens_q, "cu_k": call.cu_seqlens_k, "TQ": call.TQ, "TK": call.TK, "n_tasks": tasks,
        "left": call.left or 0, "right": call.right or 0, "scale": call.scale, "softcap": call.softcap,
        "H": call.H, "HK": call.HK, "D": call.D, "DV": call.DV, "HAS_LEFT": call.left is not None,
        "HAS_RIGHT": call.right is not None, "CAP": call.softcap != 0, "PACKED": call.packed, **t._asdict(),
    }  # fmt: skip
    arguments = {**shared, **names, **values}
    options = {"num_warps": 4, "num_stages": 2} if call.device.type == "cuda" else {}
    with on_device(call.device):
        kernel[(grid,)](**{n: arguments[n] for n in kernel.arg_names}, **options)


def forward(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
    """o and lse."""
    o_shape, lse_shape = output_shapes(call)
    o = call.q.new_zeros(o_shape)
    lse = call.q.new_full(lse_shape, -torch.inf, dtype=torch.float32)
    q, k, v = (x.contiguous() for x in (call.q, call.k, call.v))
    MB = -(-call.TQ // tile(call).BM)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    _launch(call, flash_attention_fwd_kernel, _sequences(call) * MB * call.H, tensors, MB=MB)
    return o, lse


def backward(call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads:
    """Three launches: rowsum(dO * O), then dK and dV, then dQ. Repeats bit for bit, asked for or not."""
    q, k, v, o, lse, do = (x.contiguous() for x in (call.q, call.k, call.v, o, lse, do))
    r = torch.empty_like(lse)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    t, n = tile(call), _sequences(call)
    MB, NB = -(-call.TQ // t.BM), -(-call.TK // t.BN)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "r": r, "dq": dq, "dk": dk, "dv": dv}
    _launch(call, bwd.flash_attention_bwd_kernel_preprocess, n * MB * call.H, tensors, MB=MB)
    _launch(call, bwd.flash_attention_bwd_kernel_dkdv, n * NB * call.HK, tensors, NB=NB)
    _launch(call, bwd.flash_attention_bwd_kernel_dq, n * MB * call.H, tensors, MB=MB)
    return FlashAttentionGrads(dq, dk, dv)
