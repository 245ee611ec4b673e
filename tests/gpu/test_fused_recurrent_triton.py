"""fused_recurrent_kda on the Triton backend against the float64 recurrence, on a GPU."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import fused_recurrent_kda
from mindspeed_kda.testing.inputs import kda_inputs, to_float64
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import recurrence

pytestmark = pytest.mark.gpu
RAW = {"gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True}
CASES = {
    "one token, many sequences": {"B": 64, "T": 1, "H": 4, "HV": 8, "K": 128, "V": 128, **RAW},
    "plain": {"B": 2, "T": 33, "H": 2, "K": 60, "V": 100},
    "lower bound, V-first": {"T": 9, "K": 256, "V": 256, "gate": "lower_bound", "state_v_first": True},
    "packed": {"T": 40, "H": 2, "HV": 4, "K": 64, "V": 64, "lengths": [0, 7, 1, 0, 25], **RAW},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_against_float64(options, dtype):
    x, _, _ = kda_inputs(**options, dtype=dtype, initial_state=True, output_final_state=True, BT=16, seed=3)
    x.pop("chunk_size")
    on_gpu = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    o, final = fused_recurrent_kda(**on_gpu, backend="triton")
    again, _ = fused_recurrent_kda(**on_gpu, backend="triton")
    ref_o, ref_final = recurrence(**to_float64(x))
    assert torch.equal(o, again)
    assert_accurate("o", o.cpu(), ref_o, dtype)
    assert_accurate("final_state", final.cpu(), ref_final, dtype)
