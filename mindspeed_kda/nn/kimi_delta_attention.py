"""The layer of Kimi Linear (arXiv 2510.26692), its published parametrisation in plain torch around ``chunk_kda``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_kda import api
from mindspeed_kda.contracts.wy_dqkg import wide
from mindspeed_kda.nn.norm import GatedRMSNorm
from mindspeed_kda.nn.short_convolution import ShortConvolution

STEP_TOKENS = 8
"""Without gradients, calls of at most so many tokens go token by token, which is cheaper than a padded chunk."""


class KdaState(NamedTuple):
    """What a layer carries from call to call: the convolutions' last inputs [N, W - 1, channels] (None without short
    convolutions) and the KDA state [N, HV, V, K] in float32."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    memory: Tensor


class KimiDeltaAttention(nn.Module):
    """hidden states [B, T, hidden_size] to the same, linear in T.

    q, k, v are projections, short convolutions and SiLU; q and k are normalised per head. The decay per value head and
    key channel is -exp(A_log) * softplus(f_proj(x) + dt_bias), or lower_bound * sigmoid(exp(A_log) * (f_proj(x) +
    dt_bias)) with ``lower_bound``; beta is sigmoid(b_proj(x)), twice that with ``allow_neg_eigval``. The result of
    ``chunk_kda`` is normalised per head, gated by sigmoid(g_proj(x)), and projected back.

    Arguments, parameters and their names are those of flash-linear-attention's layer of this name, so ``state_dict``
    passes between the two unchanged: q_proj, k_proj, v_proj, q_conv1d, k_conv1d, v_conv1d, f_proj (0, 1), b_proj,
    g_proj (0, 1), A_log [HV], dt_bias [HV * K], o_norm, o_proj. Parameters may be of any float dtype; A_log and dt_bias
    are used in float32.

    ``chunk_size`` and ``backend`` go to ``mindspeed_kda.chunk_kda``; single steps without gradients take whatever
    backend serves ``fused_recurrent_kda``. Raises ValueError on sizes that do not fit.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        chunk_size: int = 64,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if safe_gate and lower_bound is None:
            raise ValueError("lower_bound: expected a number below 0 with safe_gate, got None")
        self.H, self.HV = num_heads, num_heads if num_v_heads is None else num_v_heads
        self.K, self.V = head_dim, round(head_dim * expand_v)
        if self.V < 1 or not math.isclose(head_dim * expand_v, self.V, rel_tol=1e-5):
            raise ValueError(f"expand_v: expected head_dim * expand_v to be a whole number, got {head_dim * expand_v}")
        if self.HV < 1 or self.HV % self.H:
            raise ValueError(f"num_v_heads: expected a positive multiple of num_heads = {self.H}, got {self.HV}")
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        self.chunk_size, self.backend = chunk_size, backend
        key_dim, value_dim, gate_dim = self.H * self.K, self.HV * self.V, self.HV * self.K

        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias) if use_short_conv else None
        self.k_conv1d = ShortConvolution(key_dim, conv_size, conv_bias) if use_short_conv else None
        self.v_conv1d = ShortConvolution(value_dim, conv_size, conv_bias) if use_short_conv else None
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, self.V, bias=False), nn.Linear(self.V, gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, self.HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.HV))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim))
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, self.V, bias=False), nn.Linear(self.V, value_dim, bias=True))
        self.o_norm = GatedRMSNorm(self.V, norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)
        self.reset_gate_parameters()

    def reset_gate_parameters(self) -> None:
        """A_log: log of U(1, 16), or 0 with safe_gate. dt_bias: softplus(dt_bias) log-uniform from 1e-3 to 1e-1.

        Both are marked ``_no_weight_decay``, which optimizers of the field look for.
        """
        with torch.no_grad():
            if self.safe_gate:
                self.A_log.zero_()
            else:
                self.A_log.uniform_(1, 16).log_()
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clone()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        state: KdaState | None = None,
        *,
        keep_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, KdaState | None]:
        """(outputs, state after the last token where ``keep_state``, else None).

        ``state`` continues each sequence where an earlier call left it: B sequences, or those of ``cu_seqlens`` [N+1],
        which packs them into B = 1 (tokens at or beyond its end give what a zero of ``chunk_kda`` gives).
        """
        x = hidden_states
        q, conv_q = self._mix(self.q_proj(x), self.q_conv1d, None if state is None else state.q, cu_seqlens)
        k, conv_k = self._mix(self.k_proj(x), self.k_conv1d, None if state is None else state.k, cu_seqlens)
        v, conv_v = self._mix(self.v_proj(x), self.v_conv1d, None if state is None else state.v, cu_seqlens)
        parameters = wide(q.dtype)
        tensors = {
            "q": q.unflatten(2, (self.H, self.K)),
            "k": k.unflatten(2, (self.H, self.K)),
            "v": v.unflatten(2, (self.HV, self.V)),
            "g": self.f_proj(x).unflatten(2, (self.HV, self.K)),
            "beta": self.b_proj(x),
            "A_log": self.A_log.to(parameters),
            "dt_bias": self.dt_bias.to(parameters),
            "initial_state": None if state is None else state.memory,
            "cu_seqlens": cu_seqlens,
        }
        options: dict[str, object] = {
            "output_final_state": keep_state,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
        }
        if x.shape[1] <= STEP_TOKENS and not torch.is_grad_enabled():
            o, memory = api.fused_recurrent_kda(**tensors, **options)  # type: ignore[arg-type]
        else:
            options |= {"safe_gate": self.safe_gate, "chunk_size": self.chunk_size, "backend": self.backend}
            o, memory = api.chunk_kda(**tensors, **options)  # type: ignore[arg-type]
        o = self.o_norm(o, self.g_proj(x).unflatten(2, (self.HV, self.V)))
        y: Tensor = self.o_proj(o.flatten(2))
        return y, None if memory is None else KdaState(conv_q, conv_k, conv_v, memory)

    @staticmethod
    def _mix(
        x: Tensor, convolution: ShortConvolution | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if convolution is None:
            return F.silu(x), None
        y: Tensor
        y, after = convolution(x, state, cu_seqlens)
        return y, after

    def extra_repr(self) -> str:
        return f"H={self.H}, HV={self.HV}, K={self.K}, V={self.V}, backend={self.backend!r}"
