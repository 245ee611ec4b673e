"""Memory: strides, poison, guards, repeatability. Every test runs on NaN-filled allocations (testing/memory.py)."""

from __future__ import annotations

import interpreted
import pytest
import torch

from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.wy_check import assert_right

pytestmark = pytest.mark.interpreter

CASES = {
    "dense": {"B": 2, "T": 37, "H": 1, "HV": 2, "K": 20, "V": 33, "BT": 16},
    "half": {"B": 1, "T": 70, "H": 2, "K": 64, "V": 100, "BT": 64, "dtype": torch.float16, "state_v_first": True},
    "packed": {"T": 50, "H": 1, "HV": 2, "K": 16, "V": 40, "BT": 32, "lengths": [0, 33, 1, 12]},
}


def strided(t):
    """The same values behind a transposition, a slice of every axis and an offset; NaN in between."""
    big = torch.full([2 * s + 1 for s in reversed(t.shape)], float("nan") if t.is_floating_point() else -7).to(t)
    view = big.permute(*reversed(range(t.dim())))[tuple(slice(1, 2 * s + 1, 2) for s in t.shape)]
    view.copy_(t)
    return view


def guarded(t):
    """A contiguous copy between NaN guards, off any alignment."""
    guard = 129
    big = torch.full((t.numel() + 2 * guard,), float("nan") if t.is_floating_point() else 2**30).to(t)
    big[guard : guard + t.numel()] = t.reshape(-1)
    return big[guard : guard + t.numel()].view(t.shape)


def moved(kwargs, how):
    return {name: how(t) if isinstance(t, torch.Tensor) else t for name, t in kwargs.items()}


@pytest.mark.parametrize("how", [strided, guarded])
@pytest.mark.parametrize("case", CASES)
def test_strides_and_guards_do_not_matter(case, how, interpreter):
    kwargs = wy_inputs(**CASES[case])
    want = interpreter(interpreted.run, kwargs)
    assert_right(want, kwargs)
    for a, b in zip(interpreter(interpreted.run, moved(kwargs, how)), want, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()


@pytest.mark.parametrize("name", ["q", "g", "beta", "A", "h", "do"])
def test_expanded_inputs(name, interpreter):
    kwargs = wy_inputs(**CASES["dense"])
    one = kwargs[name].narrow(1, 0, 1).expand_as(kwargs[name])
    kept = one.clone()
    out = interpreter(interpreted.run, kwargs | {name: one})
    for a, b in zip(out, interpreter(interpreted.run, kwargs | {name: one.contiguous()}), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one, kept)


@pytest.mark.parametrize("case", CASES)
def test_no_access_leaves_its_tensor(case, interpreter):
    """Inputs, outputs and each workspace region: no unmasked lane, and no tile's origin, lies outside."""
    _, faults = interpreter(interpreted.run_with_address_check, wy_inputs(**CASES[case]))
    assert faults == []


def test_the_address_check_bites(interpreter):
    assert interpreter(interpreted.address_check_of_a_bad_kernel) == [
        "load: the tile starts outside its tensor",
        "load: unmasked lanes outside their tensor",
    ]


def test_inputs_are_not_written(interpreter):
    kwargs = wy_inputs(**CASES["packed"])
    assert interpreter(interpreted.inputs_stay, kwargs)


@pytest.mark.parametrize("case", CASES)
def test_repeats_bit_for_bit(case, interpreter):
    assert interpreter(interpreted.repeats, wy_inputs(**CASES[case]), 3)
