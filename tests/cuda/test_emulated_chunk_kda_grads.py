"""The end of the native training step's backward: kda_grads and kda_reduce, run on this processor.

What the stages before would have left (A, h, dh, v_new, dv_new) comes from the reference in float64, rounded once to
the main dtype; every gradient is held to the float64 reference's, which tests/reference holds to the token recurrence.
"""

from __future__ import annotations

import pytest
import torch
from sources import build, emulated

from mindspeed_kda.contracts import chunk_kda
from mindspeed_kda.cuda_kernels.chunk_kda import layout
from mindspeed_kda.reference import chunk_kda as reference
from mindspeed_kda.testing.inputs import to_float64
from mindspeed_kda.testing.kda_cases import GATE_PARAMETERS, LIMIT
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate

SOURCES = ("chunk_kda/plan.cu", "chunk_kda/grads.cu", "chunk_kda/reduce.cu")
STAGES = ["plan", "grads", "reduce"]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    try:
        out = build.build_emulator(tmp_path_factory.mktemp("emulated") / "grads.so", sources=SOURCES)
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")
    return emulated.Emulated(out)


def prepared(dtype, change=None, **options):
    """The call, what grads is given, and the gradients expected."""
    inputs = kda_inputs(**{"H": 1, "dtype": dtype, **options})
    if change is not None:
        change(inputs.arguments)
    call = chunk_kda.check(**inputs.arguments)
    exact = chunk_kda.check(**to_float64(inputs.arguments))
    do, dht = inputs.do.double(), None if inputs.dht is None else inputs.dht.double()
    x = reference.before_wy(exact, (), do, dht)
    given = {
        "do": inputs.do,
        "A": x.layout.scatter(x.states.A, call.T).to(dtype),
        "h": layout.state_images(call, x.states.h),
        "dh": layout.state_images(call, x.dh),
        "v_new": layout.tiles(call, x.layout.scatter(x.states.v_new, call.T)),
        "dv_new": layout.tiles(call, x.layout.scatter(x.dv, call.T)),
    }
    return call, given, reference.backward(exact, (), do, dht)


def tokens_of(call):
    """Tokens of a sequence."""
    n = call.T if call.cu_seqlens is None else int(call.cu_seqlens[-1])
    return torch.arange(call.T) < n


def assert_right(kernels, call, given, expected):
    found = [kernels.chunk_kda(STAGES, call, given, schedule) for schedule in (emulated.FORWARD, emulated.REVERSE)]
    inside, errors = tokens_of(call), {}
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        got, other = (f[name] for f in found)
        assert torch.equal(got.view(torch.uint8), other.view(torch.uint8)), f"{name} depends on the schedule"
        assert got[:, ~inside].isnan().all(), f"{name}: written past the last sequence"
        errors[name] = assert_accurate(
            name, got[:, inside], getattr(expected, name)[:, inside], call.dtype, rms_limit=LIMIT[call.dtype]
        )
    for name in ("dA_log", "ddt_bias"):
        want = getattr(expected, name)
        if want is None:
            assert name not in found[0] or found[0][name].isnan().all()
            continue
        assert torch.equal(found[0][name], found[1][name])
        got = found[0][name].view(want.shape)
        errors[name] = assert_accurate(name, got, want, call.dtype, rms_limit=GATE_PARAMETERS[call.dtype])
    return errors


def zero_beta(arguments):
    arguments["beta"][:, ::3] = 0.0
    arguments["beta"][:, 1::6] = 1e-3


def forget(arguments):
    arguments["g"][:, 3::7] = -1000.0


CASES = {
    "whole chunks": {"T": 128},
    "tail": {"T": 75, "H": 4, "gate": "softplus"},
    "one token": {"T": 1, "H": 4, "HV": 8, "gate": "lower_bound"},
    "packed": {"T": 203, "lengths": [0, 65, 0, 63, 1, 64, 0], "gate": "softplus", "HV": 2},
    "batch, heads of a group": {"T": 66, "B": 2, "H": 2, "HV": 4, "gate": "lower_bound"},
    "as given": {"T": 70, "raw": False, "states": False},
    "narrow, no bias": {"T": 64, "wide_beta_and_g": False, "gate": "softplus", "dt_bias": False, "neg_eigval": True},
    "narrow, bias": {"T": 40, "wide_beta_and_g": False, "gate": "lower_bound", "neg_eigval": True, "HV": 2},
    "narrow, given decays": {"T": 64, "wide_beta_and_g": False, "raw": False, "neg_eigval": True},
    "strength 0": {"T": 64, "raw": False, "change": zero_beta},
    "forgets": {"T": 64, "change": forget},
    "A_log 20": {"T": 64, "gate": "softplus", "A_log": 20.0},
}
WIDE = {
    **{f"{decay} a token": {"T": 128, "decay": decay} for decay in (-0.05, -1.0, -5.0, -10.0)},
    "softplus, tail": {"T": 100, "gate": "softplus"},
    "lower bound at its end": {"T": 128, "HV": 4, "gate": "lower_bound", "decay": -5.0},
    "packed, heads of a group": {
        "T": 132,
        "lengths": [65, 0, 64],
        "gate": "softplus",
        "HV": 4,
        "cu_dtype": torch.int64,
    },
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.mark.parametrize("name", CASES)
@DTYPES
def test_size_64(kernels, name, dtype):
    assert_right(kernels, *prepared(dtype, K=64, V=64, **CASES[name]))


@pytest.mark.parametrize("name", WIDE)
@DTYPES
def test_size_128(kernels, name, dtype):
    assert_right(kernels, *prepared(dtype, K=128, V=128, **WIDE[name]))
