"""What turns the raw inputs into q, k, a and b, and their gradients back (docs/kda_math.md, sections 2 and 7).

All tensors are on chunks in the compute dtype: gate inputs, a and their gradients [B, NT, HV, BT, K], beta [B, NT, HV,
BT]. Rows without a token hold 0 and their incoming gradients are 0, so that nothing they hold reaches a parameter.
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


def _gate_input(call: ChunkKdaCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """z = x + dt_bias, and exp(A_log) [HV, 1, 1]."""
    assert call.A_log is not None
    z = x if call.dt_bias is None else x + call.dt_bias.to(x.dtype).reshape(call.HV, 1, call.K)
    return z, call.A_log.to(x.dtype).exp().view(call.HV, 1, 1)


def log_decay(call: ChunkKdaCall, x: Tensor) -> Tensor:
    """a, the natural log of each token's decay, from g as given."""
    if call.gate == PREGATED:
        return x
    z, rate = _gate_input(call, x)
    if call.gate == LOWER_BOUND:
        assert call.lower_bound is not None
        return call.lower_bound * torch.sigmoid(rate * z)
    return rate * F.logsigmoid(-z)  # -softplus(z) = logsigmoid(-z), exact at both ends


def log_decay_backward(call: ChunkKdaCall, x: Tensor, da: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dA_log, ddt_bias); no factor can be infinite where another is 0."""
    if call.gate == PREGATED:
        return da, None, None
    z, rate = _gate_input(call, x)
    if call.gate == LOWER_BOUND:
        assert call.lower_bound is not None
        y = rate * z
        dx = da * call.lower_bound * (torch.sigmoid(y) * torch.sigmoid(-y)) * rate
        dA_log = (dx * z).sum((0, 1, 3, 4))
    else:
        dx = -da * rate * torch.sigmoid(z)
        dA_log = (da * rate * F.logsigmoid(-z)).sum((0, 1, 3, 4))
    ddt_bias = None if call.dt_bias is None else dx.sum((0, 1, 3)).reshape(call.dt_bias.shape)
    return dx, dA_log, ddt_bias


def write_strength(call: ChunkKdaCall, beta: Tensor) -> Tensor:
    """b, from beta as given."""
    return call.beta_scale * torch.sigmoid(beta) if call.beta_sigmoid else beta


def write_strength_backward(call: ChunkKdaCall, beta: Tensor, db: Tensor) -> Tensor:
    """db * b * (1 - b / c), with 1 - sigmoid(x) taken as sigmoid(-x)."""
    if not call.beta_sigmoid:
        return db
    return db * call.beta_scale * torch.sigmoid(beta) * torch.sigmoid(-beta)
