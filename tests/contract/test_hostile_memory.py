"""The autouse fixture bites: memory that nobody wrote is poison, and a plan that leaves a row out is caught."""

import pytest
import torch

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.reference.wy_dqkg import wy_dqkg as reference
from mindspeed_kda.testing.inputs import to_float64, wy_inputs
from mindspeed_kda.testing.metrics import assert_accurate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uninitialised_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(64, dtype=dtype)
    for t in (
        torch.empty(64, dtype=dtype),
        torch.empty_like(like),
        like.new_empty(64),
        torch.empty_strided((8, 8), (8, 1), dtype=dtype),
    ):
        assert t.isnan().all()


def test_uninitialised_integers_are_the_largest_value() -> None:
    assert (torch.empty(64, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_a_row_left_out_of_an_output_is_caught() -> None:
    kwargs = wy_inputs(T=20, K=8, V=8, BT=16)
    call = wy_dqkg.check(**kwargs)
    complete, outputs = reference(call), wy_dqkg.empty_outputs(call)
    for out, result in zip(outputs, complete, strict=True):
        out[:, :-1] = result[:, :-1]
    judge = reference(wy_dqkg.check(**to_float64(kwargs)))
    for name in ("dq", "dk", "dv", "db", "dg", "dA"):
        assert_accurate(name, getattr(complete, name), getattr(judge, name), torch.float32)
        with pytest.raises(AssertionError, match="non-finite"):
            assert_accurate(name, getattr(outputs, name), getattr(judge, name), torch.float32)
