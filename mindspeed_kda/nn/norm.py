"""RMSNorm times a gate, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedRMSNorm(nn.Module):
    """``sigmoid(gate) * weight * x / rms(x)`` over the last axis; computed in float32, returned in x's dtype.

    float64 inputs are computed in float64. Parameter: ``weight`` [size].
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(compute), (x.shape[-1],), self.weight.to(compute), self.eps)
        return (y * gate.to(compute).sigmoid()).to(x.dtype)
