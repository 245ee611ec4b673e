"""Faults that users of comparable libraries reported, as behaviours of ``chunk_kda`` and of the op on ``torch``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import chunk_kda, chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients, judge

PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")


def step(inputs: KdaInputs) -> dict[str, Tensor]:
    return gradients(chunk_kda, *inputs)


@pytest.mark.parametrize("value", [-10.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strong_gates_are_finite_and_right(value: float, dtype: torch.dtype) -> None:
    inputs = kda_inputs(T=70, H=1, K=8, V=8, dtype=dtype)
    inputs.arguments["g"][:, ::3] = value
    expected, got = judge(*inputs), step(inputs)
    limit = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    for name, reference in expected.items():
        assert_accurate(name, got[name], reference, dtype, rms_limit=limit)


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("at_zero", [False, True])
def test_a_large_a_log_stays_finite(gate: str, dtype: torch.dtype, at_zero: bool) -> None:
    """exp(20) = 4.9e8 saturates either gate; at_zero puts some raw inputs where the lower-bounded one does not."""
    inputs = kda_inputs(T=40, H=1, K=8, V=8, gate=gate, A_log=20.0, dt_bias=False, dtype=dtype)
    if at_zero:
        inputs.arguments["g"][:, ::2] *= 1e-9
    expected, got = judge(*inputs), step(inputs)
    limit = 1e-10 if dtype == torch.float64 else 2e-5
    for name, reference in expected.items():
        assert torch.isfinite(reference).all()
        assert_accurate(name, got[name], reference, dtype, rms_limit=limit)


def test_each_head_uses_its_own_gate() -> None:
    inputs = kda_inputs(T=40, H=3, K=8, V=8, dtype=torch.float64)
    inputs.arguments["g"] = torch.zeros_like(inputs.arguments["g"])
    inputs.arguments["g"][:, :, 1:] = -10.0
    expected, got = judge(*inputs), step(inputs)
    for name, reference in expected.items():
        assert_accurate(name, got[name], reference, torch.float64)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_tokens_of_no_sequence_are_zero_and_reach_nothing(poison: float) -> None:
    clean = kda_inputs(T=90, H=1, HV=2, K=8, V=8, lengths=[20, 0, 50], gate="softplus")
    expected = step(clean)
    dirty = {n: t.clone() if isinstance(t, Tensor) else t for n, t in clean.arguments.items()}
    do = clean.do.clone()
    for t in (*(dirty[n] for n in ("q", "k", "v", "g", "beta")), do):
        t[:, 70:] = poison
    got = gradients(chunk_kda, dirty, do, clean.dht)
    for name in PER_TOKEN:
        assert not got[name][:, 70:].any(), name
    for name, reference in expected.items():
        assert torch.equal(got[name], reference), name


def test_int32_and_int64_cu_seqlens_agree() -> None:
    first, second = (
        step(kda_inputs(T=90, H=1, K=8, V=8, lengths=[20, 0, 50], cu_dtype=d)) for d in (torch.int32, torch.int64)
    )
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def strided(t: Tensor, how: str) -> Tensor:
    """The same values as a slice of a wider tensor, or with two axes stored the other way round."""
    if how == "sliced":
        return torch.stack((t, torch.full_like(t, float("nan"))), -1)[..., 0]
    return t.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("how", ["sliced", "transposed"])
def test_strided_inputs_equal_their_copies(how: str) -> None:
    inputs = kda_inputs(B=2, T=70, H=1, HV=2, K=8, V=6, gate="softplus")
    views = {n: strided(t, how) if isinstance(t, Tensor) else t for n, t in inputs.arguments.items()}
    assert inputs.dht is not None
    do, dht = strided(inputs.do, how), strided(inputs.dht, how)
    assert not views["q"].is_contiguous()
    assert not do.is_contiguous()
    leaves = {n: views[n].detach().requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log", "initial_state")}
    o, final_state = chunk_kda(**{**views, **leaves})
    grads = torch.autograd.grad([o, final_state], list(leaves.values()), [do, dht])
    expected = step(inputs)
    assert torch.equal(o, expected["o"])
    for name, t in zip(leaves, grads, strict=True):
        assert torch.equal(t, expected[f"d{name}"]), name


def test_expanded_inputs_and_gradients_equal_their_copies() -> None:
    inputs = kda_inputs(B=1, T=70, H=1, K=8, V=6, states=False).arguments
    wide = {n: t.expand(3, *t.shape[1:]) if isinstance(t, Tensor) else t for n, t in inputs.items()}
    assert wide["q"].stride(0) == 0
    q = inputs["q"].clone().requires_grad_()
    o, _ = chunk_kda(**{**wide, "q": q.expand(3, -1, -1, -1)})
    o.sum().backward()  # this do has stride 0 everywhere
    alone = inputs["q"].clone().requires_grad_()
    o_alone, _ = chunk_kda(**{**inputs, "q": alone})
    o_alone.backward(torch.ones_like(o_alone))
    assert torch.equal(o, o_alone.expand_as(o))
    assert alone.grad is not None
    assert q.grad is not None
    assert_accurate("dq", q.grad, 3 * alone.grad, torch.float32, rms_limit=1e-6)


def test_strided_op_inputs_equal_their_copies() -> None:
    x = wy_inputs(T=70, H=1, HV=2, K=8, V=6)
    expected = chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch")
    for how in ("sliced", "transposed"):
        views: dict[str, Any] = {n: strided(t, how) if isinstance(t, Tensor) else t for n, t in x.items()}
        for t, reference in zip(chunk_kda_bwd_wy_dqkg_fused(**views, backend="torch"), expected, strict=True):
            assert torch.equal(t, reference)


@pytest.mark.parametrize("lengths", [None, [20, 0, 50]])
def test_inputs_are_never_written_and_outputs_are_no_views(lengths: list[int] | None) -> None:
    inputs = kda_inputs(T=70, H=1, K=8, V=6, gate="softplus", lengths=lengths, disable_recompute=True)
    x = inputs.arguments
    before = {n: t.clone() for n, t in x.items() if isinstance(t, Tensor)}
    out = step(inputs)
    for n, t in before.items():
        assert torch.equal(t, x[n]), n
    owners = {x[n].untyped_storage().data_ptr() for n in before}
    for name, t in out.items():
        assert t.untyped_storage().data_ptr() not in owners, name


@pytest.mark.parametrize("lengths", [None, [0, 0]])
def test_no_tokens(lengths: list[int] | None) -> None:
    inputs = kda_inputs(T=0, H=1, HV=2, K=8, V=6, gate="softplus", lengths=lengths)
    out = step(inputs)
    assert out["o"].shape == (1, 0, 2, 6)
    assert torch.equal(out["final_state"], inputs.arguments["initial_state"])
    assert inputs.dht is not None
    assert torch.equal(out["dinitial_state"], inputs.dht)
    for name in ("dA_log", "ddt_bias"):
        assert not out[name].any()


def test_no_sequences() -> None:
    inputs = kda_inputs(T=5, H=1, K=8, V=6, lengths=[])
    out = step(inputs)
    assert out["final_state"].shape == (0, 1, 8, 6)
    for name in PER_TOKEN:
        assert not out[name].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = kda_inputs(T=90, H=1, HV=2, K=16, V=16, lengths=[20, 0, 65], gate="lower_bound", dtype=dtype)
    first = step(inputs)
    for _ in range(4):
        for name, t in step(inputs).items():
            assert torch.equal(t, first[name]), name
