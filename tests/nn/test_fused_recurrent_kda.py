"""``fused_recurrent_kda`` against ``chunk_kda`` and the token recurrence in float64; in pieces; its errors."""

from __future__ import annotations

import inspect

import pytest
import torch

from mindspeed_kda import chunk_kda, fused_recurrent_kda
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.contracts import fused_recurrent_kda as own
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import kda_inputs, to_float64
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import recurrence

CASES = {
    "plain": {"B": 2, "T": 19, "H": 2, "K": 8, "V": 12},
    "gva_softplus": {"T": 9, "H": 1, "HV": 3, "K": 16, "V": 8, "gate": "softplus", "qk_l2norm": True},
    "bound_v_first": {
        "B": 2,
        "T": 5,
        "K": 8,
        "V": 6,
        "gate": "lower_bound",
        "state_v_first": True,
        "beta_sigmoid": True,
    },
    "negative": {"T": 7, "K": 4, "V": 4, "beta_sigmoid": True, "allow_neg_eigval": True, "decay": -5.0},
    "packed": {"T": 24, "H": 2, "HV": 4, "K": 8, "V": 8, "lengths": [0, 7, 1, 0, 12], "gate": "softplus"},
    "one_token": {"B": 3, "T": 1, "K": 8, "V": 8, "gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True},
}


def call(case, dtype=torch.float64, **more):
    x, _, _ = kda_inputs(**CASES[case], dtype=dtype, initial_state=True, output_final_state=True, BT=16, seed=3, **more)
    x.pop("chunk_size")
    return x


@pytest.mark.parametrize("backend", REGISTRY.of(own.OP))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_against_the_token_recurrence(case, dtype, backend):
    x = call(case, dtype)
    if REGISTRY.of(own.OP)[backend].why_not(own.check(**x, needs_grad=False)) is not None:
        with pytest.raises(RuntimeError, match="cannot run this call"):
            fused_recurrent_kda(**x, backend=backend)
        return
    o, final = fused_recurrent_kda(**x, backend=backend)
    ref_o, ref_final = recurrence(**to_float64(x))
    assert_accurate("o", o, ref_o, dtype)
    assert_accurate("final_state", final, ref_final, dtype)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_it_is_chunk_kda(case):
    x = call(case)
    o, final = fused_recurrent_kda(**x)
    ref_o, ref_final = chunk_kda(**x, chunk_size=16)
    torch.testing.assert_close(o, ref_o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(final, ref_final, rtol=1e-10, atol=1e-12)


def test_in_pieces():
    x = call("gva_softplus")
    whole, final = fused_recurrent_kda(**x)
    state, pieces = x.pop("initial_state"), []
    for begin, end in ((0, 1), (1, 5), (5, 5), (5, 9)):
        part = {n: t[:, begin:end] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()}
        o, state = fused_recurrent_kda(**part, initial_state=state)
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=0)
    torch.testing.assert_close(state, final, rtol=0, atol=0)


def test_inputs_stay_and_outputs_are_new():
    x = call("packed")
    before = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor)}
    o, final = fused_recurrent_kda(**x)
    assert all(torch.equal(x[n], t) for n, t in before.items())
    storages = {t.untyped_storage().data_ptr() for t in x.values() if isinstance(t, torch.Tensor)}
    assert not {o.untyped_storage().data_ptr(), final.untyped_storage().data_ptr()} & storages
    assert (o[:, 20:] == 0).all()
    empty = {n: t[:, :0] if n in ("q", "k", "v", "g", "beta") else t for n, t in call("plain").items()}
    o, final = fused_recurrent_kda(**empty)
    assert o.shape == (2, 0, 2, 12)
    assert torch.equal(final, empty["initial_state"])
    assert final.data_ptr() != empty["initial_state"].data_ptr()


def test_no_final_state_unless_asked():
    assert fused_recurrent_kda(**(call("plain") | {"output_final_state": False}))[1] is None


def test_a_wanted_gradient_is_an_error():
    x = call("plain")
    x["v"].requires_grad_()
    with pytest.raises(RuntimeError, match="expected no tensor that requires a gradient"):
        fused_recurrent_kda(**x)
    with torch.no_grad():
        fused_recurrent_kda(**x)


def test_errors_are_chunk_kdas():
    x = call("plain")
    with pytest.raises(ValueError, match=r"k: expected shape \[B, T, H, K\]"):
        fused_recurrent_kda(**(x | {"k": x["k"][:, :3]}))
    with pytest.raises(TypeError, match="unexpected keyword"):
        fused_recurrent_kda(**x, head_first=True)
    with pytest.raises(ValueError, match="backend: expected one of"):
        fused_recurrent_kda(**x, backend="abacus")


def test_order_of_arguments_is_the_fields():
    names = list(inspect.signature(fused_recurrent_kda).parameters)
    assert names[:10] == [
        "q",
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "dt_bias",
        "scale",
        "initial_state",
        "output_final_state",
    ]
    assert own.OP == "fused_recurrent_kda"
    assert set(names) - {"backend"} <= set(inspect.signature(contract.check).parameters)
