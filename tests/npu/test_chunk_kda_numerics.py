"""chunk_kda on the Triton backend against the float64 recurrence, in Triton's interpreter."""

from __future__ import annotations

import interpreted_kda
import pytest
import torch

from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import judge

pytestmark = pytest.mark.interpreter

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3}
SMALL = {"K": 16, "V": 16, "H": 1, "BT": 16}


def assert_right(got: dict, inputs: KdaInputs, dtype: torch.dtype = torch.float32) -> None:
    expected = judge(*inputs)
    assert got.keys() == {n for n in expected if n != "final_state" or inputs.arguments["output_final_state"]}
    for name in got:
        reference = expected[name]
        assert_accurate(name, got[name], reference, dtype, rms_limit=LIMIT[dtype])


CASES = {
    "one token": {"T": 1},
    "tail of 15": {"T": 31},
    "chunk 32, grouped heads, two batches": {"T": 34, "BT": 32, "HV": 2, "B": 2, "gate": "softplus"},
    "chunk 64, odd sizes": {"T": 70, "BT": 64, "K": 20, "V": 33, "gate": "lower_bound"},
    "packed": {"T": 45, "lengths": [0, 5, 16, 0, 1, 17], "gate": "softplus", "cu_dtype": torch.int64},
    "packed, V-first, plain": {"T": 40, "lengths": [20, 3, 17], "raw": False, "state_v_first": True},
    "no states, no bias": {"T": 20, "states": False, "gate": "softplus", "dt_bias": False},
    "negative eigenvalues, wide K": {"T": 17, "K": 40, "neg_eigval": True},
    "everything kept": {"T": 20, "disable_recompute": True, "gate": "lower_bound"},
    "fp16": {"T": 40, "BT": 32, "dtype": torch.float16, "wide_beta_and_g": False, "gate": "softplus"},
    "fp16 at -10 per token": {"T": 40, "BT": 32, "dtype": torch.float16, "decay": -10.0},
    "-0.05 per token": {"T": 64, "BT": 64, "decay": -0.05},
    "-5 per token": {"T": 64, "BT": 64, "decay": -5.0},
    "-10 per token": {"T": 64, "BT": 64, "decay": -10.0},
    "logsigmoid / 0.1": {"T": 64, "BT": 64, "gate_divisor": 0.1},
    "logsigmoid / 10": {"T": 64, "BT": 64, "gate_divisor": 10.0},
    "softplus with A_log 20": {"T": 32, "gate": "softplus", "A_log": 20.0},
    "lower bound with A_log 20": {"T": 32, "gate": "lower_bound", "A_log": 20.0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_against_float64(options, interpreter):
    inputs = kda_inputs(**{**SMALL, **options})
    assert_right(interpreter(interpreted_kda.step, inputs), inputs, options.get("dtype", torch.float32))


def test_tokens_that_forget_everything(interpreter):
    """-1000 and -inf for some tokens: what comes after them keeps its digits, and nothing is NaN."""
    inputs = kda_inputs(**SMALL, T=40)
    g = inputs.arguments["g"]
    g[0, 3::7] = -1000.0
    finite = interpreter(interpreted_kda.step, inputs)
    assert_right(finite, inputs)
    g[0, 3::7] = -torch.inf
    infinite = interpreter(interpreted_kda.step, inputs)
    for name, t in finite.items():
        assert torch.equal(t, infinite[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_beta_of_zero(dtype, interpreter):
    """Tokens that write nothing, or next to nothing, have a right dbeta all the same."""
    inputs = kda_inputs(**SMALL, T=40, raw=False, dtype=dtype)
    beta = inputs.arguments["beta"]
    beta[:, ::3] = 0.0
    beta[:, 1::6] = 1e-3
    assert_right(interpreter(interpreted_kda.step, inputs), inputs, dtype)


def test_fp32_keeps_what_the_last_rows_of_a_chunk_decay(interpreter):
    """With differences of cumsums final_state is 2.8e-7 off here, dv 2.8e-7, dk 1.6e-7, dg 8.9e-7."""
    inputs = kda_inputs(**SMALL | {"BT": 64}, T=63)
    got, expected = interpreter(interpreted_kda.step, inputs), judge(*inputs)
    for name, limit in {"final_state": 1.5e-7, "dv": 2e-7, "dk": 1.3e-7, "dg": 7e-7}.items():
        assert_accurate(name, got[name], expected[name], torch.float32, rms_limit=limit)


def test_a_gate_of_its_own_for_each_head(interpreter):
    inputs = kda_inputs(**{**SMALL, "H": 2}, T=20, states=False)
    inputs.arguments["g"][:, :, 0] = 0.0
    inputs.arguments["g"][:, :, 1] = -10.0
    assert_right(interpreter(interpreted_kda.step, inputs), inputs)


@pytest.mark.parametrize(
    "options",
    [{}, {"HV": 2, "gate": "softplus"}, {"lengths": [7, 0, 13]}, {"T": 70, "BT": 64, "K": 20, "gate": "lower_bound"}],
    ids=str,
)
def test_the_choices_of_a_gpu_give_the_same(options, interpreter):
    inputs = kda_inputs(**{**SMALL, "T": 20, **options})
    assert_right(interpreter(interpreted_kda.as_on_cuda, inputs), inputs)


def test_packed_equals_one_call_per_sequence(interpreter):
    lengths = [5, 0, 17, 16]
    inputs = kda_inputs(**SMALL, T=40, lengths=lengths)
    packed = interpreter(interpreted_kda.step, inputs)
    begin = 0
    for n, length in enumerate(lengths):
        span = slice(begin, begin + length)
        begin += length
        if length == 0:
            assert torch.equal(packed["final_state"][n], inputs.arguments["initial_state"][n])
            assert torch.equal(packed["dinitial_state"][n], inputs.dht[n])
            continue
        one = {**inputs.arguments, "cu_seqlens": None, "initial_state": inputs.arguments["initial_state"][n : n + 1]}
        one |= {name: inputs.arguments[name][:, span] for name in ("q", "k", "v", "g", "beta")}
        alone = interpreter(interpreted_kda.step, KdaInputs(one, inputs.do[:, span], inputs.dht[n : n + 1]))
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(packed[name][:, span], alone[name]), name
        assert torch.equal(packed["final_state"][n : n + 1], alone["final_state"])
        assert torch.equal(packed["dinitial_state"][n : n + 1], alone["dinitial_state"])


def test_rows_of_no_sequence_are_zero_whatever_they_hold(interpreter):
    inputs = kda_inputs(**SMALL, T=40, lengths=[5, 17])
    poisoned = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in inputs.arguments.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][:, 22:] = torch.nan
    do = inputs.do.clone()
    do[:, 22:] = torch.nan
    got = interpreter(interpreted_kda.step, KdaInputs(poisoned, do, inputs.dht))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, 22:] == 0).all(), name
        assert torch.isfinite(got[name]).all(), name


def test_outputs_do_not_depend_on_later_gates(interpreter):
    inputs = kda_inputs(**SMALL, T=40)
    first, _ = interpreter(interpreted_kda.forward_only, inputs)
    inputs.arguments["g"][:, 21:] = -7.0
    second, _ = interpreter(interpreted_kda.forward_only, inputs)
    assert torch.equal(first[:, :21], second[:, :21])
    assert not torch.equal(first[:, 21:], second[:, 21:])


def test_chunk_sizes_agree(interpreter):
    results = [interpreter(interpreted_kda.step, kda_inputs(T=50, H=1, K=16, V=16, BT=BT)) for BT in (16, 64)]
    for name, t in results[0].items():
        assert_accurate(name, t, results[1][name], torch.float32, rms_limit=4e-6)


def test_strides_do_not_matter_and_runs_repeat(interpreter):
    inputs = kda_inputs(**SMALL, T=20, HV=2, gate="softplus")
    expected = interpreter(interpreted_kda.step, inputs)
    strided = {
        n: t.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(t, torch.Tensor) and t.dim() > 1 else t
        for n, t in inputs.arguments.items()
    }
    got = interpreter(interpreted_kda.step, KdaInputs(strided, inputs.do.mT.contiguous().mT, inputs.dht))
    for name, t in expected.items():
        assert torch.equal(t, got[name]), name


def test_no_tokens(interpreter):
    """T = 0: states pass through, gradients are empty or zero."""
    for lengths in (None, [0, 0]):
        inputs = kda_inputs(**SMALL, T=0, lengths=lengths, gate="softplus")
        got = interpreter(interpreted_kda.step, inputs)
        assert got["o"].shape == inputs.do.shape
        assert torch.equal(got["final_state"], inputs.arguments["initial_state"])
        assert torch.equal(got["dinitial_state"], inputs.dht)
        assert (got["dA_log"] == 0).all()
        assert (got["ddt_bias"] == 0).all()


def test_saves_the_pair_matrices_and_norms_alone(interpreter):
    size = {"T": 40, "H": 1, "K": 32, "V": 32, "BT": 16, "dtype": torch.float16}
    nbytes, found, announced = interpreter(interpreted_kda.saved_bytes, kda_inputs(**size))
    assert found == announced
    assert nbytes == 40 * (2 * 16 * 2 + 2 * 4)
    more, found, announced = interpreter(interpreted_kda.saved_bytes, kda_inputs(**size, disable_recompute=True))
    assert found == announced
    assert more > nbytes
