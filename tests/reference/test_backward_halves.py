"""K2 and K1 on their own: chained they are the backward, and each holds the identities that need no reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_kda import chunk_kda
from mindspeed_kda.ops import chunk_kda_bwd_inputs, chunk_kda_bwd_recurrence
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "raw, softplus": {"gate": "softplus", "HV": 4},
    "lower bound, V first": {"gate": "lower_bound", "state_v_first": True},
    "packed": {"lengths": [0, 33, 1, 41], "T": 78},
    "no states": {"states": False, "B": 2},
    "kept": {"disable_recompute": True},
}


def halves(inputs: KdaInputs) -> tuple[Any, Any]:
    r = chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **inputs.arguments)
    return r, chunk_kda_bwd_inputs(inputs.do, r, **inputs.arguments)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_k1_after_k2_is_the_backward(options: dict[str, Any]) -> None:
    inputs = kda_inputs(**{"T": 75, "H": 2, "K": 8, "V": 6, "BT": 32, "dtype": torch.float64, **options})
    expected = gradients(chunk_kda, inputs.arguments, inputs.do, inputs.dht)
    _, grads = halves(inputs)
    for name, got in grads._asdict().items():
        name = "dinitial_state" if name == "dh0" else name
        assert (got is None) == (name not in expected)
        if got is not None:
            assert_accurate(name, got, expected[name], torch.float64)


@pytest.mark.parametrize("decay", [None, -5.0])
def test_the_suffix_sum_ends_at_the_state_of_the_chunk(decay: float | None) -> None:
    """Identity 1 of docs/kda_math.md through the suffix sum: dg at a chunk's first row is sum_v h * dh_start."""
    inputs = kda_inputs(B=2, T=75, H=2, K=8, V=6, BT=32, decay=decay, dtype=torch.float64)
    r, grads = halves(inputs)
    dh_start = torch.cat((r.dh0.unsqueeze(1), r.dh[:, :-1]), dim=1)
    assert_accurate("dg", grads.dg[:, ::32], (r.h * dh_start).sum(-1), torch.float64)


def test_a_backend_without_halves_says_so() -> None:
    inputs = kda_inputs(T=16, H=1, K=16, V=16, BT=16)
    with pytest.raises(RuntimeError, match="triton"):
        chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **inputs.arguments, backend="triton")
