"""What turns the raw inputs into q, k, a and b, and their gradients back (docs/kda_math.md, sections 2 and 7).

Every function works in the dtype it is given; gates take z's parameters per value head, x and a [B, T, HV, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND, PREGATED, ChunkKdaCall

L2_EPS = 1e-6


def inverse_norm(x: Tensor) -> Tensor:
    """r = 1 / sqrt(sum_d x^2 + eps), [..., 1]."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def l2norm_backward(dy: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


def _gate_input(call: ChunkKdaCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """z = x + dt_bias and exp(A_log) [HV, 1]."""
    z = call.g.to(dtype)
    if call.dt_bias is not None:
        z = z + call.dt_bias.to(dtype).view(call.HV, call.K)
    assert call.A_log is not None
    return z, call.A_log.to(dtype).exp().unsqueeze(-1)


def log_decay(call: ChunkKdaCall, dtype: torch.dtype) -> Tensor:
    """a: the natural log of each token's decay."""
    if call.gate == PREGATED:
        return call.g.to(dtype)
    z, rate = _gate_input(call, dtype)
    if call.gate == LOWER_BOUND:
        assert call.lower_bound is not None
        return call.lower_bound * torch.sigmoid(rate * z)
    return rate * F.logsigmoid(-z)  # -softplus(z) = logsigmoid(-z), exact at both ends


def log_decay_backward(call: ChunkKdaCall, da: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dA_log, ddt_bias) from da [B, T, HV, K]; no factor can be infinite times 0."""
    if call.gate == PREGATED:
        return da, None, None
    z, rate = _gate_input(call, da.dtype)
    if call.gate == LOWER_BOUND:
        assert call.lower_bound is not None
        y = rate * z
        dx = da * call.lower_bound * (torch.sigmoid(y) * torch.sigmoid(-y)) * rate
        dA_log = (dx * z).sum((0, 1, 3))
    else:
        dx = -da * rate * torch.sigmoid(z)
        dA_log = (da * rate * F.logsigmoid(-z)).sum((0, 1, 3))
    ddt_bias = None if call.dt_bias is None else dx.sum((0, 1)).reshape(call.dt_bias.shape)
    return dx, dA_log, ddt_bias


def write_strength(call: ChunkKdaCall, dtype: torch.dtype) -> Tensor:
    """b [B, T, HV]."""
    beta = call.beta.to(dtype)
    return call.beta_scale * torch.sigmoid(beta) if call.beta_sigmoid else beta


def write_strength_backward(call: ChunkKdaCall, db: Tensor) -> Tensor:
    """db * b * (1 - b / c), with 1 - sigmoid(x) taken as sigmoid(-x)."""
    if not call.beta_sigmoid:
        return db
    beta = call.beta.to(db.dtype)
    return db * call.beta_scale * torch.sigmoid(beta) * torch.sigmoid(-beta)
