"""Random inputs of ``chunk_kda`` for tests and benchmarks of every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND, PREGATED, SOFTPLUS
from mindspeed_kda.testing.inputs import cu_seqlens_of, drawing


class KdaInputs(NamedTuple):
    """Keyword arguments of ``chunk_kda``, and gradients of o and of the final state (None where none arrives)."""

    arguments: dict[str, Any]
    do: Tensor
    dht: Tensor | None


def kda_inputs(
    B: int = 1,
    T: int = 128,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    BT: int = 64,
    *,
    HV: int | None = None,
    gate: str = PREGATED,
    decay: float | None = None,
    gate_divisor: float = 1.0,
    A_log: float | None = None,
    dt_bias: bool = True,
    lower_bound: float = -5.0,
    raw: bool = True,
    neg_eigval: bool = False,
    states: bool = True,
    lengths: list[int] | None = None,
    cu_dtype: torch.dtype = torch.int32,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float32,
    wide_beta_and_g: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_device: bool = False,
    **options: Any,
) -> KdaInputs:
    """Drawn on the CPU in float64, or with ``on_device`` in float32 on ``device``, then rounded to each dtype.

    gate: "pregated" (g is logsigmoid of a normal draw over ``gate_divisor``, or within 10% of ``decay`` a token where
    that is given), "softplus" or "lower_bound" (raw g; ``A_log`` fixes that parameter; any ``decay`` drives raw g to
    the strong end of the gate). raw: q/k norm and beta's sigmoid in the op; otherwise unit q and k and beta in (0, 1),
    or (0, 2) with neg_eigval. states: initial state, final state and its gradient. options: passed on.
    """
    HV = H if HV is None else HV
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    source = drawing(seed, device if on_device else None)
    randn = source.randn
    cu = None if lengths is None else cu_seqlens_of(lengths, source.device, cu_dtype)
    N = B if lengths is None else len(lengths)
    q, k, v, x, beta = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V), randn(B, T, HV, K), randn(B, T, HV)
    state, do = (N, HV, V, K) if state_v_first else (N, HV, K, V), randn(B, T, HV, V)
    h0, dht = randn(*state), randn(*state)
    log_rate, bias = torch.full((HV,), A_log or 0.0, device=source.device, dtype=source.dtype), randn(HV, K) * 0.5
    if A_log is None:
        log_rate = source.rand(HV).mul(4).add(0.2).log()
    if gate == PREGATED:
        jitter = 1 - 0.1 * source.rand(*x.shape)
        g = F.logsigmoid(x) / gate_divisor if decay is None else decay * jitter
    else:
        g = x if decay is None else x.abs() + 4.0
    main_or_wide = wide if wide_beta_and_g else dtype
    out: dict[str, Any] = {
        "q": (q if raw else F.normalize(q, dim=-1)).to(dtype),
        "k": (k if raw else F.normalize(k, dim=-1)).to(dtype),
        "v": v.to(dtype),
        "g": g.to(main_or_wide),
        "beta": (beta if raw else beta.sigmoid() * (2.0 if neg_eigval else 1.0)).to(main_or_wide),
    }
    if gate != PREGATED:
        out["A_log"] = log_rate.to(wide)
        if dt_bias:
            out["dt_bias"] = bias.to(wide)
    if states:
        out["initial_state"] = h0.to(wide)
    if cu is not None:
        out["cu_seqlens"] = cu
    out = {name: t.to(device) for name, t in out.items()}
    out.update(
        output_final_state=states,
        use_qk_l2norm_in_kernel=raw,
        use_beta_sigmoid_in_kernel=raw,
        use_gate_in_kernel=gate in (SOFTPLUS, LOWER_BOUND),
        allow_neg_eigval=neg_eigval,
        lower_bound=lower_bound if gate == LOWER_BOUND else None,
        state_v_first=state_v_first,
        chunk_size=BT,
        **options,
    )
    return KdaInputs(out, do.to(dtype).to(device), dht.to(wide).to(device) if states else None)
