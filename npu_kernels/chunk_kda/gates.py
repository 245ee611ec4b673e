"""Jit helpers of the gate: per-token decay, its gradients, sigmoid and softplus that keep their digits.

    softplus     a = -rate * softplus(z)            da/dz = -rate * sigmoid(z)                   dA_log gets da * a
    lower bound  a = bound * sigmoid(rate * z)      da/dz = bound * s * (1 - s) * rate           dA_log gets dx * z

with rate = exp(A_log), z = x + dt_bias, and a the natural log of the decay.
"""

import triton
import triton.language as tl

PREGATED = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
LOWER_BOUND = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
# A token that decays by 2^-64 leaves 5e-20 of its channel, far below fp32's 6e-8. Bounding it there keeps the digits of
# the running sum for the tokens behind it, and makes a decay of -inf a plain zero.
MIN_LOG2 = tl.constexpr(-64.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); exp never overflows, so that sigmoid(-x) is 1 - sigmoid(x) to full relative precision."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to fp32 relative precision at both ends: max(x, 0) + 2 atanh(e / (2 + e)), e = exp(-|x|)."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    p = s2 * (1.0 / 15.0) + 1.0 / 13.0
    p = p * s2 + 1.0 / 11.0
    p = p * s2 + 1.0 / 9.0
    p = p * s2 + 1.0 / 7.0
    p = p * s2 + 1.0 / 5.0
    p = p * s2 + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * (s + s * s2 * p)


@triton.jit
def log_decay(z, rate, bound, GATE: tl.constexpr):
    """Natural log of the decay per token."""
    if GATE == SOFTPLUS:
        a = -rate * softplus(z)
    elif GATE == LOWER_BOUND:
        a = bound * sigmoid(rate * z)
    else:
        a = z
    return a


@triton.jit
def log_decay_backward(z, b_da, rate, bound, GATE: tl.constexpr):
    """(dx, the terms of dA_log) from the gradient of a. No factor is infinite: s * (1 - s) is two bounded quotients."""
    if GATE == SOFTPLUS:
        b_dx = -b_da * (rate * sigmoid(z))
        b_dl = -b_da * (rate * softplus(z))
    elif GATE == LOWER_BOUND:
        b_dx = b_da * (bound * (sigmoid(rate * z) * sigmoid(-rate * z)) * rate)
        b_dl = b_dx * z
    else:
        b_dx = b_da
        b_dl = b_da
    return b_dx, b_dl
