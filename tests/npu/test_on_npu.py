"""The six stages on an Ascend NPU, against float64 on the host. Run by ci/npu.sh; no author had one to run it on."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.wy_check import assert_right

pytestmark = pytest.mark.npu

AXES = {
    "T": (1, 15, 17, 63, 64, 65, 127, 300),
    "K": (60, 64, 100, 128, 256),
    "V": (60, 64, 100, 128, 256),
    "dtype": (torch.float16, torch.bfloat16, torch.float32),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (2, 4)),
    "main_state": (False, True),
    "state_v_first": (False, True),
    "lengths": (None, [0, 65, 1, 63, 300]),
}
MAIN = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def on_npu(kwargs):
    """The call on the device; its outputs on the host."""
    moved = {n: t.to("npu") if torch.is_tensor(t) else t for n, t in kwargs.items()}
    return tuple(t.cpu() for t in op(**moved, backend="triton"))


@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda c: "-".join(map(str, c.values())))
def test_against_float64(case):
    (H, HV), lengths, main = case["heads"], case["lengths"], case["dtype"]
    kwargs = wy_inputs(
        T=case["T"] if lengths is None else sum(lengths) + 4, H=H, HV=HV, K=case["K"], V=case["V"], BT=case["BT"],
        dtype=main, state_dtype=main if case["main_state"] else torch.float32, state_v_first=case["state_v_first"],
        lengths=lengths, seed=case["T"],
    )  # fmt: skip
    assert_right(on_npu(kwargs), kwargs)


@MAIN
def test_training_shape(dtype):
    """The shape of the op's page: B1 T2048 H32 K=V=128, chunk 64, fp32 state."""
    kwargs = wy_inputs(B=1, T=2048, H=32, K=128, V=128, BT=64, dtype=dtype, state_dtype=torch.float32)
    assert_right(on_npu(kwargs), kwargs)


@MAIN
@pytest.mark.parametrize("decay", [-5.0, -10.0])
def test_strong_decay(dtype, decay):
    kwargs = wy_inputs(T=300, H=2, K=128, V=128, BT=64, dtype=dtype, decay=decay)
    assert_right(on_npu(kwargs), kwargs)


@MAIN
def test_repeats_bit_for_bit(dtype):
    kwargs = wy_inputs(T=700, H=4, HV=8, K=128, V=128, BT=64, dtype=dtype)
    first = on_npu(kwargs)
    for _ in range(49):
        for a, b in zip(on_npu(kwargs), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_automatic_choice_is_triton():
    kwargs = {n: t.to("npu") if torch.is_tensor(t) else t for n, t in wy_inputs(T=64, dtype=torch.bfloat16).items()}
    call = wy_dqkg.check(**kwargs)
    assert REGISTRY.choose(wy_dqkg.OP, call, call.device.type).name == "triton"
