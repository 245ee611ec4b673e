"""The reference on an NVIDIA GPU: float32 products stay float32 with TF32 allowed, no synchronisation, same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_kda import chunk_kda, chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.testing.inputs import to_float64, wy_inputs
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients, judge

pytestmark = pytest.mark.gpu

CASES: list[dict[str, Any]] = [
    {"gate": "softplus"},
    {"gate": "lower_bound", "lengths": [0, 65, 1, 0, 63], "T": 133},
    {"decay": -5.0},
]


@pytest.fixture(params=[False, True], ids=["", "tf32"])
def allow_tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param else "highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_chunk_kda_in_float32(options: dict[str, Any], allow_tf32: bool) -> None:
    shape: dict[str, Any] = {"T": 100, "H": 1, "HV": 2, "K": 64, "V": 64, **options}
    expected = judge(*kda_inputs(**shape))
    got = gradients(chunk_kda, *kda_inputs(**shape, device="cuda", backend="torch"))
    for name, reference in expected.items():
        assert_accurate(name, got[name].cpu(), reference, torch.float32, rms_limit=2e-5)


@pytest.mark.parametrize("lengths", [None, [0, 65, 1, 63]])
def test_the_op_in_float32(lengths: list[int] | None, allow_tf32: bool) -> None:
    x = wy_inputs(T=133, H=1, HV=2, K=64, V=64, lengths=lengths)
    expected = chunk_kda_bwd_wy_dqkg_fused(**to_float64(x), backend="torch")
    on_gpu = wy_inputs(T=133, H=1, HV=2, K=64, V=64, lengths=lengths, device="cuda")
    got = chunk_kda_bwd_wy_dqkg_fused(**on_gpu, backend="torch")
    for name, reference in expected._asdict().items():
        assert_accurate(name, getattr(got, name).cpu(), reference, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_training_step_never_synchronises_and_repeats(dtype: torch.dtype) -> None:
    inputs = kda_inputs(
        T=133, H=1, HV=2, K=64, V=64, gate="softplus", lengths=[0, 65, 1, 0, 63], dtype=dtype, device="cuda",
        backend="torch",
    )  # fmt: skip
    first = gradients(chunk_kda, *inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = gradients(chunk_kda, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def test_autocast_does_not_reach_into_the_reference() -> None:
    inputs = kda_inputs(T=100, H=1, K=64, V=64, device="cuda", backend="torch")
    expected = gradients(chunk_kda, *inputs)
    with torch.autocast("cuda", torch.bfloat16):
        got = gradients(chunk_kda, *inputs)
    for name, t in expected.items():
        assert torch.equal(t, got[name]), name
