"""The judge: KDA token by token in float64, differentiated by autograd (docs/kda_math.md, sections 2 and 3).

It shares nothing with the chunked code: no chunk, no running sum of decays, no formula of a gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of ``chunk_kda``'s arguments in their own dtype; built of differentiable torch operations."""
    unknown = set(ignored) - {"output_final_state", "chunk_size", "disable_recompute", "backend"}
    if unknown:
        raise TypeError(f"recurrence: unknown arguments {sorted(unknown)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    scale = K**-0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    if use_gate_in_kernel:
        assert A_log is not None
        z = g if dt_bias is None else g + dt_bias.reshape(HV, K)
        rate = A_log.exp().reshape(HV, 1)
        g = lower_bound * torch.sigmoid(rate * z) if lower_bound is not None else -rate * F.softplus(z, threshold=60.0)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        spans = [(0, begin, end) for begin, end in itertools.pairwise(cu_seqlens.tolist())]
    rows: dict[tuple[int, int], Tensor] = {}
    finals = []
    for n, (b, begin, end) in enumerate(spans):
        S = q.new_zeros(HV, K, V)
        if initial_state is not None:
            S = initial_state[n].transpose(-1, -2) if state_v_first else initial_state[n]
        for t in range(begin, end):
            S = g[b, t].exp().unsqueeze(-1) * S
            d = beta[b, t].unsqueeze(-1) * (v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t]))
            S = S + torch.einsum("hk,hv->hkv", k[b, t], d)
            rows[b, t] = scale * torch.einsum("hkv,hk->hv", S, q[b, t])
        finals.append(S.transpose(-1, -2) if state_v_first else S)
    nothing = v.new_zeros(HV, V)
    o = [rows.get((b, t), nothing) for b in range(B) for t in range(T)]
    out = torch.stack(o).view(B, T, HV, V) if o else v.new_zeros(B, T, HV, V)
    shape = (V, K) if state_v_first else (K, V)
    return out, torch.stack(finals) if finals else q.new_zeros(0, HV, *shape)


def judge(inputs: dict[str, Any], do: Tensor, dht: Tensor | None = None) -> dict[str, Tensor]:
    """o, final_state and every gradient (``dq``, ..., ``dinitial_state``) in float64, from inputs of any dtype."""
    double = {
        n: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()
    }
    return gradients(recurrence, double, do.double(), None if dht is None else dht.double())


def gradients(fn: Any, inputs: dict[str, Any], do: Tensor, dht: Tensor | None = None) -> dict[str, Tensor]:
    """The same of any function of ``chunk_kda``'s signature, in the inputs' own dtypes."""
    leaves = {n: inputs[n].detach().requires_grad_() for n in DIFFERENTIABLE if inputs.get(n) is not None}
    o, final = fn(**{**inputs, **leaves})
    outs, gs = [o], [do.to(o.dtype)]
    if dht is not None:
        outs.append(final)
        gs.append(dht.to(final.dtype))
    grads = torch.autograd.grad(outs, list(leaves.values()), gs, allow_unused=True)
    out = {"o": o.detach()}
    if final is not None:
        out["final_state"] = final.detach()
    for (name, x), g in zip(leaves.items(), grads, strict=True):
        out[f"d{name}"] = torch.zeros_like(x) if g is None else g
    return out
