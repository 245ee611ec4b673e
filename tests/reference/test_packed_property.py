"""Any packing of any sequences equals one call per sequence: outputs, states and gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.inputs import cu_seqlens_of
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
PER_SEQUENCE = ("final_state", "dinitial_state")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=5),
    unused=st.integers(0, 20),
    BT=st.sampled_from([16, 32, 64]),
    state_v_first=st.booleans(),
)
def test_packed_equals_one_call_per_sequence(lengths: list[int], unused: int, BT: int, state_v_first: bool) -> None:
    inputs = kda_inputs(
        T=sum(lengths) + unused, H=1, K=3, V=2, BT=BT, lengths=lengths, state_v_first=state_v_first, dtype=torch.float64
    )
    x, do, dht = inputs
    assert dht is not None
    packed = gradients(chunk_kda, x, do, dht)
    bounds = cu_seqlens_of(lengths).tolist()
    for n in range(len(lengths)):
        rows = slice(bounds[n], bounds[n + 1])
        own = {name: x[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        own |= {"initial_state": x["initial_state"][n : n + 1], "cu_seqlens": None}
        alone = gradients(chunk_kda, {**x, **own}, do[:, rows], dht[n : n + 1])
        for name in PER_TOKEN:
            assert_accurate(name, packed[name][:, rows], alone[name], torch.float64)
        for name in PER_SEQUENCE:
            assert_accurate(name, packed[name][n : n + 1], alone[name], torch.float64)
    for name in PER_TOKEN:
        assert not packed[name][:, bounds[-1] :].any()
