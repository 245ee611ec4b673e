"""The reference's float32 is float32, whatever the process has switched on; and its settings stay as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import chunk_kda, chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.reference import products
from mindspeed_kda.testing.capture import RecordedCall, op_inputs
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients, judge

CPU = torch.device("cpu")


def test_products_run_in_float64_where_float32_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 40, 500), torch.randn(3, 500, 30)
    exact = a.double() @ b.double()
    assert not torch.equal(products.matmul(a, b), exact.float())
    monkeypatch.setattr(products, "float32_is_exact", lambda device: False)
    assert torch.equal(products.matmul(a, b), exact.float())
    assert torch.equal(products.matmul(a.double(), b.double()), exact)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_matmul_precision_changes_nothing(precision: str) -> None:
    inputs = kda_inputs(T=40, H=1, K=16, V=16)
    expected = judge(*inputs)
    assert products.float32_is_exact(CPU)
    torch.set_float32_matmul_precision(precision)
    try:
        assert not products.float32_is_exact(CPU)
        assert not products.float32_is_exact(torch.device("cuda"))
        got = gradients(chunk_kda, *inputs)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    for name, reference in expected.items():
        assert_accurate(name, got[name], reference, torch.float32, rms_limit=1e-5)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one setting for all backends")
@pytest.mark.parametrize(("of_all", "of_cuda"), [("tf32", "none"), ("ieee", "tf32"), ("none", "tf32")])
def test_the_settings_of_each_backend_are_seen(of_all: str, of_cuda: str) -> None:
    cuda, modules = torch.device("cuda"), (torch.backends, torch.backends.cuda.matmul)
    before = [module.fp32_precision for module in modules]
    try:
        for module, value in zip(modules, (of_all, of_cuda), strict=True):
            module.fp32_precision = value
        assert not products.float32_is_exact(cuda)
    finally:
        for module, value in zip(modules, before, strict=True):
            module.fp32_precision = value
    assert products.float32_is_exact(cuda)


def test_autocast_does_not_reach_into_the_reference() -> None:
    inputs, x = kda_inputs(T=40, H=1, K=16, V=16), wy_inputs(T=40, K=16, V=16)
    expected, op = gradients(chunk_kda, *inputs), chunk_kda_bwd_wy_dqkg_fused(**x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        got = gradients(chunk_kda, *inputs)
        for t, reference in zip(chunk_kda_bwd_wy_dqkg_fused(**x), op, strict=True):
            assert torch.equal(t, reference)
    for name, reference in expected.items():
        assert torch.equal(got[name], reference), name


def test_a_few_decays_of_minus_1000_leave_the_rest_exact() -> None:
    """A running sum would carry 1443 per such token in float32, and cost its neighbours four digits."""
    inputs = kda_inputs(T=130, H=1, K=16, V=16, raw=False, gate_divisor=4.0)
    inputs.arguments["g"][:, 5::9] = -1000.0
    expected, got = judge(*inputs), gradients(chunk_kda, *inputs)
    for name, reference in expected.items():
        assert_accurate(name, got[name], reference, torch.float32, rms_limit=2e-6)


@pytest.mark.parametrize("options", [{"decay": -10.0}, {"gate": "softplus"}, {"lengths": [0, 65, 1, 0, 63], "T": 133}])
def test_no_exponent_is_ever_above_zero(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 2^ of forward and backward, over all chunk sizes, with padded rows and poisoned unused tokens."""
    largest = []

    def watched(x: Tensor) -> Tensor:
        largest.append(float(x.max()))
        return exp2(x)

    exp2 = torch.exp2
    monkeypatch.setattr(torch, "exp2", watched)
    for BT in (16, 32, 64):
        inputs = kda_inputs(**{"T": 75, "H": 1, "K": 8, "V": 8, "BT": BT, **options})
        gradients(chunk_kda, *inputs)
        x = op_inputs(RecordedCall(*inputs))
        x["g"][:, 129:] = float("nan")
        chunk_kda_bwd_wy_dqkg_fused(**x, backend="torch")
    assert len(largest) > 30
    assert max(largest) <= 0.0
