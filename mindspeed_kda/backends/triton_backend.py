"""Backend ``triton``: npu_kernels, for Ascend NPUs, NVIDIA GPUs, and CPU tensors under Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mindspeed_kda import config
from mindspeed_kda.contracts import chunk_kda, flash_attention, fused_recurrent_kda, wy_dqkg
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall
from mindspeed_kda.contracts.flash_attention import FlashAttentionCall
from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall
from mindspeed_kda.registry import Backend, Registry

NAME = "triton"


def available() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the module triton is not installed (triton-ascend on an NPU, triton on NVIDIA)"
    return None


def supports(call: WyDqkgCall | ChunkKdaCall | FlashAttentionCall) -> str | None:
    reason = available()
    if reason is not None:
        return reason
    if call.dtype == torch.float64:
        return "q: expected float16, bfloat16 or float32, got float64"
    kind = call.device.type
    if kind == "cpu" and not config.TRITON_INTERPRET.flag():
        return "tensors are on cpu, which Triton serves only in its interpreter (TRITON_INTERPRET=1)"
    if kind == "cpu" and call.dtype == torch.bfloat16:
        return "q: expected float16 or float32 in Triton's interpreter, whose bfloat16 products are wrong, got bfloat16"
    if kind not in ("cpu", "cuda", "npu"):
        return f"tensors: expected device npu, cuda or cpu, got {kind}"
    return None


def _load_wy_dqkg() -> Any:
    from mindspeed_kda.npu_kernels.wy_dqkg.plan import run

    return run


def _load_chunk_kda() -> Any:
    from mindspeed_kda.npu_kernels.chunk_kda import plan

    return plan


def _load_fused_recurrent_kda() -> Any:
    from mindspeed_kda.npu_kernels.fused_recurrent_kda.plan import run

    return run


def _load_flash_attention() -> Any:
    from mindspeed_kda.npu_kernels.flash_attention import plan

    return plan


def register(registry: Registry) -> None:
    priority = {"npu": 100, "cuda": 50}
    for op, load in (
        (wy_dqkg.OP, _load_wy_dqkg),
        (chunk_kda.OP, _load_chunk_kda),
        (fused_recurrent_kda.OP, _load_fused_recurrent_kda),
        (flash_attention.OP, _load_flash_attention),
    ):
        registry.register(Backend(op, NAME, supports, load, available=available, priority=priority))
