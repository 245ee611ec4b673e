"""What test_attention_numerics.py runs inside the interpreter's process."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_kda import flash_attention
from mindspeed_kda.testing.attention import Results, results


def run(x: tuple[torch.Tensor, ...], **options: Any) -> Results:
    """o, lse, dq, dk, dv of the Triton kernels."""
    return results(flash_attention, *x, return_lse=True, backend="triton", **options)
