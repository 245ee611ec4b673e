"""Random inputs of the public functions, for tests and benchmarks; ones of a real training step are in ``capture``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND, PREGATED
from mindspeed_kda.reference.layout import chunk_layout

LOG2E = 1.4426950408889634


def cu_seqlens_of(lengths: list[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """[0, l0, l0 + l1, ...] of sequence lengths."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device)


def chunk_cumsum(x: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Inclusive cumsum of [B, T, H, ...] along T within each chunk; tokens of no sequence are 0."""
    T = x.shape[1]
    NT = chunks.cdiv(T, chunk_size) if cu_seqlens is None else chunks.count_chunks(cu_seqlens.tolist(), chunk_size)
    layout = chunk_layout(T, chunk_size, NT, x.device, cu_seqlens, None)
    return layout.scatter(layout.gather(x).cumsum(3), T)


class Drawing(NamedTuple):
    """A seeded source of random numbers, and the device and dtype that it draws in."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device, dtype=self.dtype)


def drawing(seed: int, device: torch.device | str | None = None) -> Drawing:
    """In float64 on the CPU, or in float32 on the device that is given."""
    on, dtype = (torch.device("cpu"), torch.float64) if device is None else (torch.device(device), torch.float32)
    return Drawing(torch.Generator(on).manual_seed(seed), on, dtype)


def wy_inputs(
    B: int = 1,
    T: int = 128,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    BT: int = 64,
    *,
    HV: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    cu_dtype: torch.dtype = torch.int32,
    state_v_first: bool = False,
    decay: float | None = None,
    cumsum: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_device: bool = False,
) -> dict[str, object]:
    """Keyword arguments of one call on unrelated random tensors, drawn on the CPU in float64 and rounded to each dtype.

    With ``on_device`` they are drawn on ``device`` in float32 instead: a large call costs little there, and its values
    are the same on every run of that kind of device, not on every device.

    ``decay`` is the natural-log decay per token (None: logsigmoid of a normal draw); ``cumsum=False`` passes the per
    token values as g, as the op's page does. With ``lengths`` the sequences are packed, B is 1 and T may leave tokens
    past the last one. A is random, not triangular, scaled so that products keep their size.
    """
    HV = H if HV is None else HV
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    source = drawing(seed, device if on_device else None)
    randn = source.randn
    cu = None if lengths is None else cu_seqlens_of(lengths, source.device, cu_dtype)
    NT = chunks.cdiv(T, BT) if cu is None else chunks.count_chunks(cu.tolist(), BT)
    log_decay = (
        F.logsigmoid(randn(B, T, HV, K))
        if decay is None
        else decay * (1 - 0.1 * torch.rand(B, T, HV, K, generator=source.generator, device=source.device))
    )
    g = chunk_cumsum(log_decay * LOG2E, BT, cu) if cumsum else log_decay
    state = (B, NT, HV, V, K) if state_v_first else (B, NT, HV, K, V)
    state_dtype = state_dtype or wide
    main = {
        "q": F.normalize(randn(B, T, H, K), dim=-1),
        "k": F.normalize(randn(B, T, H, K), dim=-1),
        "v": randn(B, T, HV, V),
        "v_new": randn(B, T, HV, V),
        "A": randn(B, T, HV, BT) * BT**-0.5,
        "do": randn(B, T, HV, V),
        "dv": randn(B, T, HV, V),
    }
    out: dict[str, object] = {name: t.to(dtype).to(device) for name, t in main.items()}
    out["g"] = g.to(wide).to(device)
    out["beta"] = randn(B, T, HV).sigmoid().to(beta_dtype or dtype).to(device)
    out["h"] = (randn(*state) * 0.1).to(state_dtype).to(device)
    out["dh"] = (randn(*state) * 0.1).to(state_dtype).to(device)
    out["chunk_size"] = BT
    out["state_v_first"] = state_v_first
    if cu is not None:
        out["cu_seqlens"] = cu.to(device)
    return out


def kda_inputs(
    B: int = 1,
    T: int = 128,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    BT: int = 64,
    *,
    HV: int | None = None,
    dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    cu_dtype: torch.dtype = torch.int32,
    state_v_first: bool = False,
    decay: float | None = None,
    gate: str = PREGATED,
    lower_bound: float = -5.0,
    dt_bias: bool = True,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    initial_state: bool = False,
    output_final_state: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[dict[str, object], Tensor, Tensor | None]:
    """Keyword arguments of one ``chunk_kda`` call, do, and dht (None without output_final_state).

    Drawn on the CPU in float64 and rounded to each dtype. ``gate`` is a value of ``contracts.chunk_kda``; with PREGATED
    ``decay`` is the natural-log decay per token (None: logsigmoid of a normal draw), else it is not used. ``g_dtype``
    and ``beta_dtype`` are the main dtype unless given.
    """
    HV = H if HV is None else HV
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    cu = None if lengths is None else cu_seqlens_of(lengths, dtype=cu_dtype)
    N = B if cu is None else cu.shape[0] - 1
    state = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    q, k = randn(B, T, H, K), randn(B, T, H, K)
    if not qk_l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g, beta = randn(B, T, HV, K), randn(B, T, HV)
    if gate == PREGATED:
        g = F.logsigmoid(g) if decay is None else decay * (1 - 0.1 * g.sigmoid())
    if not beta_sigmoid:
        beta = beta.sigmoid()
    out: dict[str, object] = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": g.to(g_dtype or dtype),
        "beta": beta.to(beta_dtype or dtype),
    }
    do, dht = randn(B, T, HV, V).to(dtype), randn(*state).to(wide) if output_final_state else None
    if gate != PREGATED:
        out["A_log"] = torch.empty(HV, dtype=torch.float64).uniform_(1, 16, generator=gen).log().to(wide)
        if dt_bias:
            out["dt_bias"] = (randn(HV, K) * 0.5 - 2).to(wide)
    if initial_state:
        out["initial_state"] = (randn(*state) * 0.3).to(wide)
    if cu is not None:
        out["cu_seqlens"] = cu
    out = {name: t.to(device) for name, t in out.items() if isinstance(t, Tensor)}
    out |= {
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": qk_l2norm,
        "use_gate_in_kernel": gate != PREGATED,
        "use_beta_sigmoid_in_kernel": beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "lower_bound": lower_bound if gate == LOWER_BOUND else None,
        "state_v_first": state_v_first,
        "chunk_size": BT,
    }
    return out, do.to(device), None if dht is None else dht.to(device)


def to_float64(kwargs: dict[str, object]) -> dict[str, object]:
    """The same call with every floating tensor upcast: what the float64 judge is given."""
    return {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in kwargs.items()}


def valid_elements(name: str, ref: Tensor, kwargs: dict[str, object]) -> Tensor:
    """Mask of the elements of output ``name`` that are not structural zeros (padding tokens, dA's upper triangle)."""
    cu, BT = kwargs.get("cu_seqlens"), kwargs["chunk_size"]
    assert isinstance(BT, int)
    T = ref.shape[1]
    NT = chunks.cdiv(T, BT) if cu is None else chunks.count_chunks(cu.tolist(), BT)  # type: ignore[attr-defined]
    layout = chunk_layout(T, BT, NT, ref.device, cu, None)  # type: ignore[arg-type]
    ones = torch.ones(1, T, 1, 1, dtype=torch.bool, device=ref.device)
    token = layout.scatter(layout.gather(ones.float()), T).bool()
    if name == "dA":
        strict = torch.ones(BT, BT, device=ref.device).tril(-1).view(1, 1, 1, BT, BT).expand(1, NT, 1, BT, BT)
        return (layout.scatter(strict, T) > 0) & token
    return token.view(1, T, *([1] * (ref.dim() - 2)))
