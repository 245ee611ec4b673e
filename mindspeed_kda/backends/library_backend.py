"""Backend ``library``: PyTorch's own flash-attention kernels (those of ``scaled_dot_product_attention``), forward and
backward, on NVIDIA and, by name, on CPU. Whatever they do not serve as the contract says is declined with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kda.contracts import flash_attention
from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionGrads
from mindspeed_kda.registry import Backend, Registry

NAME = "library"
HALVES = (torch.float16, torch.bfloat16)


def supports(call: FlashAttentionCall) -> str | None:
    kind = call.device.type
    if kind not in ("cuda", "cpu"):
        return f"q: expected device cuda or cpu, got {kind}"
    if call.dtype == torch.float64:  # CPU's kernel would take it, but the definition is the judge there
        return "q: expected float16, bfloat16 or float32, got float64"
    if call.packed:
        return "cu_seqlens_q: expected None, since this kernel takes no packed sequences, got a tensor"
    if call.softcap:
        return f"softcap: expected 0, since this kernel has none, got {call.softcap}"
    if call.left is not None or call.right not in (None, 0):
        return f"window: expected no bound, since this kernel has none, got ({call.left}, {call.right})"
    if call.right == 0 and call.TQ != call.TK:
        return f"causal: expected Tq = Tk, since this kernel aligns at the top left, got {call.TQ} and {call.TK}"
    if call.D != call.DV:
        return f"v: expected DV = D = {call.D} from this kernel, got {call.DV}"
    if min(call.B, call.TQ, call.TK) == 0:
        return f"q: expected B, Tq and Tk above 0, got {call.B}, {call.TQ}, {call.TK}"
    if call.q.stride(-1) != 1 or call.k.stride(-1) != 1 or call.v.stride(-1) != 1:
        return "q, k, v: expected the last dimension to be contiguous, got other strides"
    if kind == "cpu":
        return f"k: expected HK = H = {call.H} on cpu, got {call.HK}" if call.HK != call.H else None
    return _supports_cuda(call)


def _repeats() -> bool:
    """Whether PyTorch's flash backward runs its repeatable form: with warn_only it warns and runs the other one."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _supports_cuda(call: FlashAttentionCall) -> str | None:
    if call.dtype not in HALVES:
        return "q: expected float16 or bfloat16 on cuda, got float32"
    if call.D % 8:
        return f"q: expected D to be a multiple of 8 on cuda, got {call.D}"
    if call.deterministic and call.needs_grad and not _repeats():
        return "deterministic: expected False unless torch.use_deterministic_algorithms(True), got True"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major < 8:
        return f"q: expected compute capability 8.0 or later, got {major}.{minor}"
    return None


class Library:
    """The kernels behind PyTorch's scaled_dot_product_attention, called so that the lse comes out."""

    @staticmethod
    def forward(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """o and lse."""
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        aten, causal = torch.ops.aten, call.right == 0
        if call.device.type == "cpu":
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=call.scale)
        else:
            o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=call.scale)[:2]
        return o.transpose(1, 2).contiguous(), lse.contiguous()

    @staticmethod
    def backward(call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads:
        """Gradients by the same kernels' backward."""
        q, k, v, b_o, b_do = (x.transpose(1, 2) for x in (call.q, call.k, call.v, o, do.contiguous()))
        aten, causal = torch.ops.aten, call.right == 0
        if call.device.type == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                b_do, q, k, v, b_o, lse, 0.0, causal, scale=call.scale
            )
        else:
            none = torch.empty(0, dtype=torch.int64, device=call.device)  # the dropout's state, which is not read
            grads = aten._scaled_dot_product_flash_attention_backward(
                b_do, q, k, v, b_o, lse, None, None, call.TQ, call.TK, 0.0, causal, none, none, scale=call.scale
            )
        return FlashAttentionGrads(*(g.transpose(1, 2).contiguous() for g in grads[:3]))


def register(registry: Registry) -> None:
    registry.register(Backend(flash_attention.OP, NAME, supports, lambda: Library, priority={"cuda": 75}))
