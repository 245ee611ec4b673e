"""The op's reference against autograd of an independently written forward, and against a plain transcription."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.testing.inputs import chunk_cumsum, cu_seqlens_of, to_float64, wy_inputs
from mindspeed_kda.testing.metrics import assert_accurate

LN2 = 0.6931471805599453
NAMES = ("dq", "dk", "dv", "db", "dg", "dA")


def spans(T: int, BT: int, lengths: list[int] | None) -> Iterator[tuple[int, int]]:
    """First and end token of each chunk, by counting."""
    bounds = [0, T] if lengths is None else [0, *itertools.accumulate(lengths)]
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end, BT):
            yield start, min(start + BT, end)


def unrelated(B: int, T: int, H: int, HV: int, K: int, V: int, BT: int, lengths: list[int] | None) -> dict[str, Tensor]:
    """Random q, k, v, g (natural-log chunk cumsum), b, strictly lower L, h, do, dh and a direct gradient of v_new."""
    gen = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    NT = len(list(spans(T, BT, lengths)))
    cu = None if lengths is None else cu_seqlens_of(lengths)
    decay = torch.nn.functional.logsigmoid(randn(B, T, HV, K))
    return {
        "q": randn(B, T, H, K),
        "k": randn(B, T, H, K),
        "v": randn(B, T, HV, V),
        "g": chunk_cumsum(decay, BT, cu),
        "b": randn(B, T, HV).sigmoid(),
        "L": randn(B, T, HV, BT) * BT**-0.5,
        "h": randn(B, NT, HV, K, V),
        "do": randn(B, T, HV, V),
        "dh": randn(B, NT, HV, K, V),
        "dv_direct": randn(B, T, HV, V),
    }


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("BT", [16, 32, 64])
@pytest.mark.parametrize(
    ("B", "T", "HV", "lengths"),
    [(2, 75, 1, None), (1, 75, 2, None), (1, 133, 2, [0, 65, 1, 0, 63]), (1, 1, 1, None)],
    ids=["batch", "value heads", "packed", "one token"],
)
def test_is_the_gradient_of_the_wy_stage(
    B: int, T: int, HV: int, lengths: list[int] | None, BT: int, state_v_first: bool
) -> None:
    """The stage, one chunk and head at a time: A = (I + L)^-1, v_new = A (b (v - (k e^g) h)), and its three readers
    o = scale (q e^g) h, the next state e^(g_L) h + (k e^(g_L - g))^T v_new, and whoever else reads v_new."""
    K, V, H, scale = 6, 5, 1, 0.7
    x = unrelated(B, T, H, HV, K, V, BT, lengths)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items() if n in ("v", "g", "b", "L", "h")}
    leaves |= {n: x[n].repeat_interleave(HV // H, 2).requires_grad_() for n in ("q", "k")}
    A, v_new, dv = torch.zeros(B, T, HV, BT, dtype=torch.float64), torch.zeros_like(x["v"]), torch.zeros_like(x["v"])
    loss = torch.zeros((), dtype=torch.float64)
    for i_b, i_h in itertools.product(range(B), range(HV)):
        for i_t, (s, e) in enumerate(spans(T, BT, lengths)):
            q, k, v, g, L = (leaves[n][i_b, s:e, i_h] for n in ("q", "k", "v", "g", "L"))
            b, h = leaves["b"][i_b, s:e, i_h, None], leaves["h"][i_b, i_t, i_h]
            a = torch.linalg.inv(torch.eye(e - s, dtype=torch.float64) + L[:, : e - s].tril(-1))
            new = a @ (b * (v - (k * g.exp()) @ h))
            k_end = k * (g[-1] - g).exp()
            o, h_next = scale * (q * g.exp()) @ h, g[-1].exp()[:, None] * h + k_end.T @ new
            do, dh, direct = x["do"][i_b, s:e, i_h], x["dh"][i_b, i_t, i_h], x["dv_direct"][i_b, s:e, i_h]
            loss = loss + (o * do).sum() + (h_next * dh).sum() + (new * direct).sum()
            with torch.no_grad():
                A[i_b, s:e, i_h, : e - s], v_new[i_b, s:e, i_h] = a, new
                dv[i_b, s:e, i_h] = direct + k_end @ dh
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def state(t: Tensor) -> Tensor:
        return t.mT.contiguous() if state_v_first else t

    got = chunk_kda_bwd_wy_dqkg_fused(
        x["q"], x["k"], x["v"], v_new, x["g"] / LN2, x["b"], A, state(x["h"]), x["do"], state(x["dh"]), dv,
        scale, None if lengths is None else cu_seqlens_of(lengths), BT, state_v_first=state_v_first, backend="torch",
    )  # fmt: skip
    for name, t in zip(NAMES, got, strict=True):
        of = {"dA": "L"}.get(name, name[1:])
        assert_accurate(name, t, expected[of], torch.float64)


def transcription(x: dict[str, Any], lengths: list[int] | None) -> dict[str, Tensor]:
    """Section 5 row by row for one chunk and head at a time, with Python loops over the rows of dA."""
    B, T, H, K = x["q"].shape
    HV, V, BT = x["v"].shape[2], x["v"].shape[3], x["chunk_size"]
    scale = x.get("scale") or K**-0.5
    out = {n: torch.zeros(B, T, HV, d, dtype=torch.float64) for n, d in zip(NAMES, (K, K, V, 1, K, BT), strict=True)}
    for i_b, i_h in itertools.product(range(B), range(HV)):
        for i_t, (s, e) in enumerate(spans(T, BT, lengths)):
            C, last = e - s, e - s - 1
            q, k = (x[n][i_b, s:e, i_h // (HV // H)] for n in ("q", "k"))
            v, v_new, g, b, do, dv = (x[n][i_b, s:e, i_h] for n in ("v", "v_new", "g", "beta", "do", "dv"))
            A = x["A"][i_b, s:e, i_h, :C]
            h, dh = x["h"][i_b, i_t, i_h], x["dh"][i_b, i_t, i_h]
            if x["state_v_first"]:
                h, dh = h.T, dh.T
            dw = torch.stack([-(h @ dv[i]) for i in range(C)])
            kg = k * torch.exp2(g)
            X = torch.stack([sum(A[j, i] * dw[j] for j in range(C)) for i in range(C)])
            Y = torch.stack([sum(A[j, i] * dv[j] for j in range(C)) for i in range(C)])
            tail = torch.zeros(K, dtype=torch.float64)
            for i in range(C):
                dq = scale * torch.exp2(g[i]) * (h @ do[i])
                dk1 = torch.exp2(g[last] - g[i]) * (dh @ v_new[i])
                tail += k[i] * dk1
                out["dq"][i_b, s + i, i_h] = dq
                out["dk"][i_b, s + i, i_h] = dk1 + b[i] * torch.exp2(g[i]) * X[i]
                out["dv"][i_b, s + i, i_h] = b[i] * Y[i]
                out["db"][i_b, s + i, i_h] = Y[i] @ v[i] + X[i] @ kg[i]
                out["dg"][i_b, s + i, i_h] = q[i] * dq - k[i] * dk1 + b[i] * kg[i] * X[i]
            out["dg"][i_b, e - 1, i_h] += torch.exp2(g[last]) * (h * dh).sum(1) + tail
            M = torch.zeros(C, C, dtype=torch.float64)
            for i, j in itertools.product(range(C), range(C)):
                if i > j:
                    M[i, j] = (dv[i] @ v[j] + dw[i] @ kg[j]) * b[j]
            for i in range(C):
                for j in range(i):
                    out["dA"][i_b, s + i, i_h, j] = -(A[:, i] @ M @ A[j, :])
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"T": 37, "BT": 16},
        {"T": 37, "BT": 16, "cumsum": False, "state_v_first": True},
        {"T": 40, "BT": 32, "HV": 4, "beta_dtype": torch.float64, "decay": -10.0},
        {"T": 70, "BT": 64, "lengths": [0, 65, 1, 0], "cu_dtype": torch.int64},
    ],
    ids=["dense", "g not a cumsum", "value heads", "packed"],
)
def test_random_a_is_used_as_given(options: dict[str, Any]) -> None:
    """A is neither triangular nor an inverse, v_new, dv and h are unrelated to it, and g need not fall along rows."""
    x = wy_inputs(H=2, K=5, V=4, dtype=torch.float64, **options)
    assert x["A"].triu(1).abs().max() > 0.1
    got, expected = chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch"), transcription(x, options.get("lengths"))
    for name, t in zip(NAMES, got, strict=True):
        assert_accurate(name, t, expected[name].view(t.shape), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"decay": -5.0}, {"state_dtype": "main", "beta_dtype": torch.float32}], ids=str
)
def test_low_precision_inputs_cost_no_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = {n: dtype if d == "main" else d for n, d in options.items()}
    x = wy_inputs(T=100, H=1, HV=2, K=16, V=24, dtype=dtype, **options)
    got = chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch")
    judge = chunk_kda_bwd_wy_dqkg_fused(**to_float64(x), backend="torch")
    for name, t, reference in zip(NAMES, got, judge, strict=True):
        assert t.dtype == (dtype if name == "dv" else torch.float32)
        # A float32 g near -461 (64 rows at -5) carries exponents to 2e-5 at worst: 2e-6 of a whole output.
        rounded = {torch.float16: 3e-4, torch.bfloat16: 2.5e-3}.get(dtype, 3e-6) if name == "dv" else 3e-6
        assert_accurate(name, t, reference, dtype, rms_limit=rounded)


def test_agrees_when_called_without_chunk_indices_or_with_them_in_any_order() -> None:
    x = wy_inputs(T=133, H=1, K=8, V=8, lengths=[0, 65, 1, 0, 63], dtype=torch.float64)
    expected = chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch")
    order = [2, 0, 3, 1]
    indices = torch.tensor([[1, 0], [1, 1], [2, 0], [4, 0]])[order]
    shuffled = {n: x[n][:, order] for n in ("h", "dh")}
    got = chunk_kda_bwd_wy_dqkg_fused(**{**x, **shuffled}, chunk_indices=indices, backend="torch")
    for name, t, reference in zip(NAMES, got, expected, strict=True):
        assert_accurate(name, t, reference, torch.float64)
