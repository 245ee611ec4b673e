"""The reference's ``chunk_kda`` against the token-by-token recurrence in float64: o, final state, every gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients, judge

PACKED = {"lengths": [0, 65, 1, 0, 63, 0], "T": 133}  # the last four tokens belong to no sequence
SMALL: dict[str, Any] = {"T": 75, "H": 1, "K": 8, "V": 12, "dtype": torch.float64}
CASES: dict[str, dict[str, Any]] = {
    "batch": {"B": 2},
    "pregated, nothing in the op": {"raw": False},
    "neg eigval": {"neg_eigval": True},
    "neg eigval, beta given": {"neg_eigval": True, "raw": False},
    "no states": {"states": False},
    "scale": {"scale": 0.3},
    "keep everything": {"disable_recompute": True, "gate": "softplus"},
    "v first": {"state_v_first": True, "K": 5, "V": 3},
    "softplus": {"gate": "softplus"},
    "softplus, no bias": {"gate": "softplus", "dt_bias": False},
    "lower bound": {"gate": "lower_bound"},
    "value heads": {"H": 2, "HV": 4, "gate": "softplus", "B": 2},
    "value heads, packed": {"H": 2, "HV": 6, "gate": "lower_bound", **PACKED, "K": 4, "V": 4},
    "packed": PACKED,
    "packed, v first, keep everything": {**PACKED, "state_v_first": True, "disable_recompute": True},
    "packed, softplus": {**PACKED, "gate": "softplus", "neg_eigval": True, "cu_dtype": torch.int64},
    "packed, last sequence not empty": {"lengths": [17, 0, 70], "T": 87},
    "decay -5": {"decay": -5.0},
    "decay -10": {"decay": -10.0},
    "decay -10, packed": {"decay": -10.0, **PACKED},
    "lower bound at -5": {"decay": -5.0, "gate": "lower_bound"},
    "softplus, A_log 2.5": {"A_log": 2.5, "gate": "softplus"},
    "weak decay": {"gate_divisor": 100.0},
    **{f"T {T}": {"T": T, "gate": "softplus"} for T in (1, 15, 16, 17, 63, 64, 65, 127)},
}


@cache
def case(name: str) -> tuple[KdaInputs, dict[str, Tensor]]:
    inputs = kda_inputs(**{**SMALL, **CASES[name]})
    return inputs, judge(*inputs)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence(name: str, chunk_size: int) -> None:
    inputs, expected = case(name)
    got = gradients(chunk_kda, {**inputs.arguments, "chunk_size": chunk_size}, inputs.do, inputs.dht)
    if not inputs.arguments["output_final_state"]:
        assert "final_state" not in got
        expected = {n: t for n, t in expected.items() if n != "final_state"}
    assert got.keys() == expected.keys()
    for output, reference in expected.items():
        assert_accurate(output, got[output], reference, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"gate_divisor": 10.0},
        {},
        {"decay": -1.0},
        {"decay": -5.0},
        {"decay": -10.0},
        {"gate": "softplus"},
        {"gate": "lower_bound"},
        {"gate": "lower_bound", "decay": -5.0},
    ],
    ids=str,
)
def test_low_precision_inputs_cost_one_rounding_of_the_results(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The judge gets the same rounded inputs. float32 holds 2e-5 on every gradient, at every strength of decay; with
    16-bit inputs the arithmetic is still float32, so that what is left is the rounding of each result."""
    inputs = kda_inputs(T=130, H=1, HV=2, K=16, V=16, dtype=dtype, **options)
    expected, got = judge(*inputs), gradients(chunk_kda, *inputs)
    limit = {torch.float32: 2e-5, torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4}[dtype]
    for name, reference in expected.items():
        assert_accurate(name, got[name], reference, dtype, rms_limit=limit)


def test_gradcheck() -> None:
    inputs = kda_inputs(T=5, H=1, HV=2, K=3, V=2, BT=16, gate="softplus", dtype=torch.float64).arguments
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

    def fn(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, final_state = chunk_kda(**{**inputs, **dict(zip(names, tensors, strict=True))})
        assert final_state is not None
        return o, final_state

    leaves = tuple(inputs[n].requires_grad_() for n in names)
    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)


def test_outputs_do_not_depend_on_later_tokens() -> None:
    inputs = kda_inputs(T=100, H=1, K=8, V=8, gate="softplus", states=False, dtype=torch.float64).arguments
    o, _ = chunk_kda(**inputs)
    later = {n: torch.cat((inputs[n][:, :37], inputs[n][:, 37:] * 3 + 1), 1) for n in ("q", "k", "v", "g", "beta")}
    changed, _ = chunk_kda(**{**inputs, **later})
    assert torch.equal(changed[:, :37], o[:, :37])
    assert not torch.equal(changed[:, 37:], o[:, 37:])
