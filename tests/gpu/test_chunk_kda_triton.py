"""chunk_kda of the Triton backend on stock Triton and an NVIDIA GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda.testing.kda_cases import CASES, assert_large_offsets, assert_repeats, assert_right
from mindspeed_kda.testing.kda_inputs import kda_inputs

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AT_RUN_TIME = ("T", "B", "decay", "gate_divisor", "A_log", "lower_bound", "neg_eigval", "scale", "lengths")
"""Options that no kernel is compiled for."""


def compiled_alike(name: str, dtype: torch.dtype) -> str:
    """The same for cases that share their kernels: one process compiles and runs them (``--dist loadgroup``)."""
    options = {n: v for n, v in CASES[name].options.items() if n not in AT_RUN_TIME}
    return f"{dtype} {'packed' * ('lengths' in CASES[name].options)} {sorted(options.items(), key=str)}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(n, d, id=f"{n}-{str(d)[6:]}", marks=pytest.mark.xdist_group(compiled_alike(n, d)))
        for n in CASES
        for d in DTYPES
    ],
)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    assert_right(CASES[name].inputs(dtype, "cuda"), "triton")


@pytest.mark.parametrize("lengths", [None, [500, 0, 1, 999]], ids=["dense", "packed"])
def test_repeats_bit_for_bit_and_never_synchronises(lengths: list[int] | None) -> None:
    inputs = kda_inputs(T=1500, gate="softplus", lengths=lengths, dtype=torch.bfloat16, device="cuda")
    assert_repeats(inputs, "triton", 19)


@pytest.mark.whole_gpu
@pytest.mark.parametrize(("K", "V"), [(16, 128), (128, 16)], ids=["wide V", "wide K"])
def test_more_elements_than_int32_counts(K: int, V: int) -> None:
    assert_large_offsets("triton", K, V)
