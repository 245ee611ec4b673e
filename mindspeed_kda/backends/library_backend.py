"""Backend ``library``: the kernels behind PyTorch's ``scaled_dot_product_attention``, forward and backward: cuDNN's and
flash-attention's on NVIDIA, and by name the CPU's. What they do not serve as the contract says is declined with the
reason.

On NVIDIA cuDNN's kernel runs where it serves the call, since it is the faster one (benchmarks/flash_attention.py); its
backward does not repeat bit for bit, so that a call that must takes the flash kernel, under PyTorch's own switch. Both
keep the same o and lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kda.contracts import flash_attention
from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionGrads
from mindspeed_kda.registry import Backend, Registry

NAME = "library"
HALVES = (torch.float16, torch.bfloat16)
CUDNN_MAJOR = 9
"""The compute capability from which cuDNN's kernel is taken: it was measured, and found faster, on 9.0."""


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
    if min(call.B, call.TQ, call.TK) == 0:
        return f"q: expected B, Tq and Tk above 0, got {call.B}, {call.TQ}, {call.TK}"
    if call.q.stride(-1) != 1 or call.k.stride(-1) != 1 or call.v.stride(-1) != 1:
        return "q, k, v: expected the last dimension to be contiguous, got other strides"
    if kind == "cpu":
        return _supports_flash(call) or (
            f"k: expected HK = H = {call.H} on cpu, got {call.HK}" if call.HK != call.H else None
        )
    if call.dtype not in HALVES:
        return "q: expected float16 or bfloat16 on cuda, got float32"
    if call.D % 8 or call.DV % 8:
        return f"q, v: expected D and DV to be multiples of 8 on cuda, got {call.D} and {call.DV}"
    if call.deterministic and call.needs_grad and not _repeats():
        return "deterministic: expected False unless torch.use_deterministic_algorithms(True), got True"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major < 8:
        return f"q: expected compute capability 8.0 or later, got {major}.{minor}"
    return None if takes_cudnn(call) else _supports_flash(call)


def _supports_flash(call: FlashAttentionCall) -> str | None:
    return f"v: expected DV = D = {call.D} from this kernel, got {call.DV}" if call.D != call.DV else None


def _repeats() -> bool:
    """Whether PyTorch's flash backward runs its repeatable form: with warn_only it warns and runs the other one."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def takes_cudnn(call: FlashAttentionCall) -> bool:
    """Whether cuDNN's kernel runs a call that ``supports`` let through so far: PyTorch's own predicate, and ours."""
    if call.device.type != "cuda" or (call.deterministic and call.needs_grad):
        return False
    if torch.cuda.get_device_capability(call.device)[0] < CUDNN_MAJOR:
        return False
    if call.TQ == 1 or call.TK == 1:  # cuDNN refuses, or has forms of its own
        return False
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, call.right == 0, call.HK != call.H)
    return torch.backends.cuda.can_use_cudnn_attention(params)


class Library:
    """The kernels behind PyTorch's scaled_dot_product_attention, called so that the lse comes out."""

    @staticmethod
    def forward(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """o and lse."""
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        aten, causal = torch.ops.aten, call.right == 0
        if call.device.type == "cpu":
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=call.scale)
        elif takes_cudnn(call):
            o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=call.scale)[:2]
            lse = lse.reshape(call.B, call.H, call.TQ)
        else:
            o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=call.scale)[:2]
        return o.transpose(1, 2).contiguous(), lse.contiguous()

    @staticmethod
    def backward(call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads:
        """Gradients by the same kernels' backward."""
        q, k, v, b_o, b_do = (x.transpose(1, 2) for x in (call.q, call.k, call.v, o.contiguous(), do.contiguous()))
        aten, causal, lse = torch.ops.aten, call.right == 0, lse.contiguous()
        if call.device.type == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                b_do, q, k, v, b_o, lse, 0.0, causal, scale=call.scale
            )
        elif takes_cudnn(call):
            none = torch.zeros((), dtype=torch.int64, device=call.device)  # the dropout's state
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                b_do, q, k, v, b_o, lse[..., None], none, none, None, None, None, call.TQ, call.TK, 0.0, causal,
                scale=call.scale,
            )  # fmt: skip
        else:
            none = torch.empty(0, dtype=torch.int64, device=call.device)  # the dropout's state, which is not read
            grads = aten._scaled_dot_product_flash_attention_backward(
                b_do, q, k, v, b_o, lse, None, None, call.TQ, call.TK, 0.0, causal, none, none, scale=call.scale
            )
        return FlashAttentionGrads(*(g.transpose(1, 2).contiguous() for g in grads[:3]))


def register(registry: Registry) -> None:
    registry.register(Backend(flash_attention.OP, NAME, supports, lambda: Library, priority={"cuda": 75}))
