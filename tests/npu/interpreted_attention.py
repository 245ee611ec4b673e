"""What test_flash_attention.py runs inside the interpreter's process."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_kda import flash_attention


def run(x: tuple[torch.Tensor, ...], **options: Any) -> tuple[torch.Tensor, ...]:
    """o, lse, dq, dk, dv of the Triton kernels."""
    q, k, v, do = x
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    o, lse = flash_attention(q, k, v, return_lse=True, backend="triton", **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do)
