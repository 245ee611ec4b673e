"""The ten identities of docs/kda_math.md, section 10, each named by its number. None needs another reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import chunk_kda, chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.reference.chunk_kda import before_wy, intra_backward
from mindspeed_kda.testing.capture import RecordedCall, op_inputs
from mindspeed_kda.testing.inputs import chunk_cumsum, cu_seqlens_of
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

F64: dict[str, Any] = {"H": 2, "K": 8, "V": 6, "BT": 32, "dtype": torch.float64}
DECAYS = pytest.mark.parametrize("decay", [None, -5.0], ids=["moderate", "strong"])


def equal(name: str, got: Tensor, expected: Tensor) -> None:
    assert_accurate(name, got, expected, torch.float64)


def step(inputs: KdaInputs) -> dict[str, Tensor]:
    return gradients(chunk_kda, *inputs)


def op(inputs: KdaInputs) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The op's inputs in this training step and its outputs."""
    x = op_inputs(RecordedCall(*inputs))
    return x, chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch")._asdict()


def chunk_sums(x: Tensor, BT: int) -> Tensor:
    """[B, T, HV, ...] -> [B, NT, HV, ...], the sum of each chunk's rows."""
    return torch.stack([rows.sum(1) for rows in x.split(BT, dim=1)], dim=1)


@DECAYS
def test_1_dg_of_the_op_sums_to_h_times_dh_at_the_start(decay: float | None) -> None:
    inputs = kda_inputs(B=2, T=75, decay=decay, **F64)
    x, out = op(inputs)
    dh0 = step(inputs)["dinitial_state"].unsqueeze(1)
    dh_start = torch.cat((dh0, x["dh"][:, :-1]), dim=1)
    equal("sum of dg", chunk_sums(out["dg"], 32), (x["h"] * dh_start).sum(-1))


@DECAYS
def test_2_dg_of_the_pairs_inside_a_chunk_sums_to_zero(decay: float | None) -> None:
    inputs = kda_inputs(B=2, T=75, decay=decay, **F64)
    call = contract.check(**inputs.arguments)
    before = before_wy(call, (), inputs.do, inputs.dht)
    gen = torch.Generator().manual_seed(2)
    dAqk, dA = (torch.randn(before.states.A.shape, generator=gen, dtype=torch.float64) for _ in range(2))
    dg = intra_backward(before.rows, dAqk, dA).dg
    assert dg.abs().max() > 1e-3
    assert dg.sum(-2).abs().max() < 1e-12 * dg.abs().sum(-2).max()


@DECAYS
def test_3_q_dot_dq_is_do_dot_o(decay: float | None) -> None:
    inputs = kda_inputs(B=2, T=75, decay=decay, raw=False, **F64)
    out = step(inputs)
    equal("q . dq", (inputs.arguments["q"] * out["dq"]).sum(-1), (inputs.do * out["o"]).sum(-1))


@DECAYS
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_4_k_dot_dk_plus_v_dot_dv_is_twice_b_db(decay: float | None, neg_eigval: bool) -> None:
    inputs = kda_inputs(B=2, T=75, decay=decay, raw=False, neg_eigval=neg_eigval, **F64)
    x, out = inputs.arguments, step(inputs)
    left = (x["k"] * out["dk"]).sum(-1) + (x["v"] * out["dv"]).sum(-1)
    equal("k . dk + v . dv", left, 2 * x["beta"] * out["dbeta"])


@pytest.mark.parametrize("gate", ["pregated", "softplus", "lower_bound"])
def test_5_outputs_are_linear_in_v_and_the_initial_state(gate: str) -> None:
    inputs = kda_inputs(B=2, T=75, gate=gate, **F64)
    assert inputs.dht is not None
    x, out = inputs.arguments, step(inputs)
    left = (inputs.do * out["o"]).sum() + (inputs.dht * out["final_state"]).sum()
    equal("<do, o>", left, (x["v"] * out["dv"]).sum() + (x["initial_state"] * out["dinitial_state"]).sum())


def test_6_the_gradient_through_the_norm_is_almost_radial_free() -> None:
    """x . dx = 1e-6 r^2 (y . dy): small, and not exactly 0."""
    inputs = kda_inputs(B=2, T=40, **F64)
    normed = dict(inputs.arguments)
    r = {}
    for n in ("q", "k"):
        r[n] = (normed[n].square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        normed[n] = normed[n] * r[n]
    through = step(inputs)
    direct = gradients(chunk_kda, {**normed, "use_qk_l2norm_in_kernel": False}, inputs.do, inputs.dht)
    for n in ("q", "k"):
        left = (inputs.arguments[n] * through[f"d{n}"]).sum(-1)
        right = 1e-6 * r[n].squeeze(-1) ** 2 * (normed[n] * direct[f"d{n}"]).sum(-1)
        # x . dx is what is left of terms a million times larger, so that float64 leaves it nine digits.
        assert_accurate(n, left, right, torch.float64, rms_limit=1e-8)
        assert right.abs().max() > 1e-9


@DECAYS
def test_7_da_has_a_short_form_for_self_consistent_inputs(decay: float | None) -> None:
    x, out = op(kda_inputs(B=2, T=75, decay=decay, **F64))
    for i_t in range(3):
        rows = slice(32 * i_t, min(32 * i_t + 32, 75))
        C = rows.stop - rows.start
        A, dv, v_new, dA = (t[:, rows].transpose(1, 2) for t in (x["A"], x["dv"], x["v_new"], out["dA"]))
        equal("dA", dA[..., :C], -(A[..., :C].mT @ dv @ v_new.mT).tril(-1))
        assert not dA[..., C:].any()


def test_7_fails_for_unrelated_inputs() -> None:
    """Why the op keeps the long form: with a v_new that is not A (b (v - kg h)) the short one is another matrix."""
    x, _ = op(kda_inputs(T=32, **F64))
    x["v_new"] = x["v_new"].flip(1)
    dA = chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch").dA.transpose(1, 2)
    A, dv, v_new = (x[n].transpose(1, 2) for n in ("A", "dv", "v_new"))
    assert ((A.mT @ dv @ v_new.mT).tril(-1) + dA).abs().max() > 0.1


def test_8_a_packed_call_equals_one_call_per_sequence() -> None:
    lengths = [0, 65, 1, 0, 63, 0]
    inputs = kda_inputs(T=133, HV=4, gate="softplus", lengths=lengths, **F64)
    assert inputs.dht is not None
    packed, total = step(inputs), {n: torch.zeros_like(inputs.arguments[n]) for n in ("A_log", "dt_bias")}
    bounds = cu_seqlens_of(lengths).tolist()
    for n, length in enumerate(lengths):
        tokens = slice(bounds[n], bounds[n + 1])
        dht = inputs.dht[n : n + 1]
        if length == 0:
            equal("final state", packed["final_state"][n], inputs.arguments["initial_state"][n])
            equal("dh0", packed["dinitial_state"][n], dht[0])
            continue
        one = {x: inputs.arguments[x][:, tokens] for x in ("q", "k", "v", "g", "beta")}
        one["initial_state"] = inputs.arguments["initial_state"][n : n + 1]
        out = gradients(chunk_kda, {**inputs.arguments, **one, "cu_seqlens": None}, inputs.do[:, tokens], dht)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            equal(name, packed[name][:, tokens], out[name])
        for name in ("final_state", "dinitial_state"):
            equal(name, packed[name][n : n + 1], out[name])
        for name, t in total.items():
            t += out[f"d{name}"]
    for name, t in total.items():
        equal(name, packed[f"d{name}"], t)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not packed[name][:, bounds[-1] :].any()


@DECAYS
@pytest.mark.parametrize("gate", ["pregated", "softplus"])
def test_9_chunk_sizes_agree(decay: float | None, gate: str) -> None:
    inputs = kda_inputs(B=2, T=140, decay=decay, gate=gate, **F64)
    by_size = [gradients(chunk_kda, {**inputs.arguments, "chunk_size": BT}, *inputs[1:]) for BT in (16, 32, 64)]
    for name, expected in by_size[0].items():
        for other in by_size[1:]:
            equal(name, other[name], expected)


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_10_the_bias_is_a_shift_of_the_gate_input(gate: str) -> None:
    inputs = kda_inputs(B=2, T=75, gate=gate, **F64)
    x, out = inputs.arguments, step(inputs)
    shifted = {**x, "g": x["g"] + 0.75, "dt_bias": x["dt_bias"] - 0.75}
    for name, t in gradients(chunk_kda, shifted, inputs.do, inputs.dht).items():
        equal(name, t, out[name])
    equal("ddt_bias", out["ddt_bias"], out["dg"].sum((0, 1)))


def test_chunk_cumsum_starts_again_in_every_chunk_and_sequence() -> None:
    """The test inputs' own cumsum, on which the op's tests stand."""
    ones = torch.ones(1, 45, 1, 1)
    got = chunk_cumsum(ones, 16, cu_seqlens_of([20, 0, 3, 18])).flatten()
    expected = [*range(1, 17), *range(1, 5), 1, 2, 3, *range(1, 17), 1, 2, 0, 0, 0, 0]
    assert got.tolist() == expected
