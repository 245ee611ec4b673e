"""fused_recurrent_kda on Triton: in the interpreter against the float64 recurrence, and how it is launched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from launch_specs import recorded_on, same

from mindspeed_kda import fused_recurrent_kda
from mindspeed_kda.contracts import fused_recurrent_kda as contract
from mindspeed_kda.npu_kernels.ascend_check.spec import Config
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.testing.inputs import kda_inputs, to_float64
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import recurrence

pytest.importorskip("triton")

from mindspeed_kda.npu_kernels.fused_recurrent_kda import gate, plan

TARGET = TARGETS["Ascend910B3"]
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3}
RAW = {"gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True}
CASES = {
    "one token": {"B": 3, "T": 1, "H": 2, "K": 16, "V": 16, **RAW},
    "no token": {"T": 0, "K": 16, "V": 16},
    "plain, masked tails": {"B": 2, "T": 9, "H": 2, "K": 20, "V": 70},
    "grouped heads": {"T": 7, "H": 1, "HV": 3, "K": 33, "V": 17, **RAW},
    "lower bound, V-first": {"B": 2, "T": 6, "K": 24, "V": 40, "gate": "lower_bound", "state_v_first": True},
    "negative eigenvalues, -5 per token": {"T": 7, "K": 5, "V": 3, **RAW, "allow_neg_eigval": True, "decay": -5.0},
    "packed": {"T": 24, "H": 2, "HV": 4, "K": 8, "V": 8, "lengths": [0, 7, 1, 0, 12], **RAW},
}


def made(options, dtype):
    x, _, _ = kda_inputs(**options, dtype=dtype, initial_state=True, output_final_state=True, BT=16, seed=3)
    x.pop("chunk_size")
    return x


def on_triton(x):
    return fused_recurrent_kda(**x, backend="triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_against_float64(options, dtype, interpreter):
    x = made(options, dtype)
    o, final = interpreter(on_triton, x)
    expected = recurrence(**to_float64(x))
    for name, got, reference in zip(("o", "final_state"), (o, final), expected, strict=True):
        assert_accurate(name, got, reference, dtype, rms_limit=LIMIT[dtype])


@pytest.mark.interpreter
def test_states_are_optional(interpreter):
    x = made(CASES["grouped heads"], torch.float32) | {"initial_state": None, "output_final_state": False}
    o, final = interpreter(on_triton, x)
    assert final is None
    assert_accurate("o", o, recurrence(**to_float64(x))[0], torch.float32, rms_limit=1e-5)


@pytest.fixture
def recorded(monkeypatch):
    return recorded_on(TARGET, plan, monkeypatch)


@pytest.mark.parametrize("lengths", [None, [9, 3]], ids=str)
def test_one_launch_that_the_gate_compiles(lengths, recorded, monkeypatch):
    monkeypatch.setattr(gate, "raw", _with_heads(gate.raw))
    x = made({"T": 20, "H": 2, "HV": 64, "K": 60, "V": 33, "lengths": lengths, **RAW}, torch.float16)
    if lengths is not None:
        x["cu_seqlens"] = x["cu_seqlens"].long()
    x["g"], x["beta"] = x["g"].half(), x["beta"].half()
    plan.run(contract.check(**x, needs_grad=False))
    [(name, grid, given)] = recorded
    assert (name, grid) == ("fused_recurrent", (TARGET.vector_cores,))
    config = Config("float16", 60, 33, 16, lengths is not None, "float32", False)
    assert any(same(spec, given) for spec in gate.specs(config, TARGET))


def _with_heads(raw):
    return lambda config: dataclasses.replace(raw(config), H=2, HV=64)
