"""Section 8 of docs/kda_math.md: the chunk-space backward is exact in every grouping, and one grouping is stable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda.reference.chunk_space import GROUPINGS, chunk_space_backward
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate, measure
from mindspeed_kda.testing.oracle import judge

NAMES = {"dq": "dq", "dk": "dk", "dv": "dv", "da": "dg", "db": "dbeta", "dh0": "dinitial_state"}


def one_head(
    T: int, K: int, decay: float | None, dtype: torch.dtype = torch.float64
) -> tuple[list[Any], dict[str, Any]]:
    inputs = kda_inputs(T=T, H=1, K=K, V=K, BT=16, decay=decay, raw=False, dtype=dtype)
    x = inputs.arguments
    assert inputs.dht is not None
    rows = [x[n][0, :, 0] for n in ("q", "k", "v", "g")] + [x["beta"][0]]
    args = [*rows, x["initial_state"][0, 0], inputs.do[0, :, 0], inputs.dht[0, 0], K**-0.5]
    return args, judge(*inputs)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("decay", [None, -0.05, -5.0])
@pytest.mark.parametrize("T", [16, 75])
def test_every_grouping_is_exact_in_float64(grouping: str, decay: float | None, T: int) -> None:
    args, expected = one_head(T, 8, decay)
    for name, t in chunk_space_backward(*args, grouping=grouping)._asdict().items():
        reference = expected[NAMES[name]]
        assert_accurate(name, t.reshape(reference.shape), reference, torch.float64)


def test_one_grouping_is_stable_where_operands_are_kept_in_16_bits() -> None:
    """At -5 a token the form with recomputed factors loses the gate's gradient; the stable one keeps it."""
    args, expected = one_head(64, 32, -5.0, torch.float32)

    def store(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    error = {}
    for grouping in GROUPINGS:
        da = chunk_space_backward(*args, grouping=grouping, store=store).da
        error[grouping] = measure(da.view(expected["dg"].shape), expected["dg"], torch.bfloat16).rms_ratio
    assert error["recomputed"] > 0.1
    assert error["prefix"] > 5e-3
    assert error["stable"] < 4e-3
