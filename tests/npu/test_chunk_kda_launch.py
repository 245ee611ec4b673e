"""How the stages of chunk_kda are launched on an NPU: number, grids, and the list that the compile gate shares."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from launch_specs import recorded_on, same

from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.npu_kernels.ascend_check.spec import Config
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.testing.kda_inputs import kda_inputs

pytest.importorskip("triton")

from mindspeed_kda.npu_kernels.chunk_kda import gate, plan, specs

TARGET = TARGETS["Ascend910B3"]
FORWARD = ["prepare", "intra", "scan"]
BACKWARD = ["prepare", "scan", "scan_bwd", "values", "states", "grads", "grads", "betas", "heads", "gate_sums"]


@pytest.fixture
def recorded(monkeypatch):
    return recorded_on(TARGET, plan, monkeypatch)


def run_both(**options):
    inputs = kda_inputs(**options)
    call = contract.check(**inputs.arguments)
    saved = plan.forward(call)[2]
    plan.backward(call, saved, inputs.do, inputs.dht)
    return call


def test_a_training_step_is_thirteen_launches_on_grids_of_the_cores(recorded):
    """B * HV * NT over 65535, which is as far as an Ascend grid goes."""
    call = run_both(T=16 * 1100, H=32, HV=64, K=1, V=1, BT=16, gate="softplus", dtype=torch.float16)
    assert call.B * call.HV * call.NT > 65535
    assert [name for name, _, _ in recorded] == FORWARD + BACKWARD
    for name, (programs,), _ in recorded:
        assert 0 < programs <= (TARGET.vector_cores if name in specs.VECTOR else TARGET.cube_cores), name


def test_packed_calls_also_zero_the_rows_of_no_sequence(recorded):
    run_both(T=40, H=1, K=16, V=16, BT=16, lengths=[20, 0, 5], gate="softplus")
    assert Counter(name for name, _, _ in recorded)["zero_tail"] == 2


def test_keeping_all_saves_two_launches(recorded):
    run_both(T=40, H=1, K=16, V=16, BT=16, disable_recompute=True)
    names = [name for name, _, _ in recorded]
    assert names.count("prepare") == names.count("scan") == 1


def test_values_of_packed_metadata_are_never_read(recorded, monkeypatch):
    """No synchronisation: nothing asks a tensor for its values."""
    inputs = kda_inputs(T=40, H=1, K=16, V=16, BT=16, lengths=[20, 0, 5], gate="softplus")
    call = contract.check(**inputs.arguments)
    for reader in ("item", "tolist", "__bool__", "__int__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, reader, lambda *a, reader=reader: pytest.fail(f"Tensor.{reader}"))
    plan.backward(call, plan.forward(call)[2], inputs.do, inputs.dht)
    assert recorded


@pytest.mark.parametrize(("dtype", "lengths"), [(torch.float16, None), (torch.float32, [9, 3])])
def test_the_gate_compiles_what_is_launched(dtype, lengths, recorded, monkeypatch):
    monkeypatch.setattr(gate, "H", 2)
    monkeypatch.setattr(gate, "HV", 4)
    run_both(
        T=20, H=2, HV=4, K=60, V=33, BT=32, dtype=dtype, lengths=lengths, cu_dtype=torch.int64, gate="softplus",
        wide_beta_and_g=False,
    )  # fmt: skip
    config = Config(str(dtype).removeprefix("torch."), 60, 33, 32, lengths is not None, "float32", False)
    listed = [(s.kernel.rpartition(":")[2], s) for s in gate.specs(config, TARGET)]
    for name, _, given in recorded:
        assert any(same(spec, given) for kernel, spec in listed if kernel == name), name


@pytest.mark.parametrize("main", ["fp16", "bf16", "fp32"])
def test_products_are_ieee_on_an_npu_and_for_fp32_everywhere(main):
    call = SimpleNamespace(dtype="float32", K=64, V=64, BT=64, packed=False, state_v_first=False)
    for target in ("npu", "cuda", "cpu"):
        sizes = dataclasses.replace(gate.raw(call), main=main, target=target)
        if target != "cuda" or main == "fp32":
            assert (sizes.pair_precision, sizes.inverse_precision) == ("ieee", "ieee")
        elif main == "fp16":
            assert sizes.pair_precision == "tf32"
