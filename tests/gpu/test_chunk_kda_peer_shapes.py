"""chunk_kda of the Triton backend on an NVIDIA GPU: shapes and tolerances of flash-linear-attention's test_kda.py.

What is particular there: entries of q, k and v all positive, so that keys point the same way; a share of the gates at
exactly 0; fp16 throughout. Ours are held to its RMS ratios, none of them relaxed, against float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import measure
from mindspeed_kda.testing.oracle import gradients

pytestmark = pytest.mark.gpu

DENSE = {
    "o": 5e-3, "final_state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dg": 2e-2, "dbeta": 2e-2, "dA_log": 1e-3,
    "ddt_bias": 1e-3, "dinitial_state": 8e-3,
}  # fmt: skip
PACKED = DENSE | {"dq": 7e-3, "dv": 7e-3, "dg": 1.5e-2, "dbeta": 1.5e-2, "dinitial_state": 7e-3}


def assert_within(inputs: KdaInputs, limits: dict[str, float]) -> None:
    got = gradients(chunk_kda, inputs.arguments | {"backend": "triton"}, inputs.do, inputs.dht)
    assert inputs.dht is not None
    double = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.arguments.items()}
    expected = gradients(chunk_kda, double | {"backend": "torch"}, inputs.do.double(), inputs.dht.double())
    assert got.keys() == expected.keys()
    errors = {name: measure(got[name], t, torch.float16) for name, t in expected.items()}
    wrong = {n: f"{e.rms_ratio:.2e} > {limits[n]}" for n, e in errors.items() if not e.rms_ratio <= limits[n]}
    assert not wrong
    assert all(e.finite for e in errors.values())


def close_some_gates(inputs: KdaInputs, share: float) -> None:
    """That share of the decays becomes exactly 0: nothing is forgotten there."""
    g = inputs.arguments["g"]
    gen = torch.Generator(g.device).manual_seed(1)
    g *= torch.rand(g.shape, generator=gen, device=g.device) > share


@pytest.mark.parametrize(
    ("B", "T", "H", "D", "scale", "divisor", "closed", "norm", "gate"),
    [
        (1, 63, 1, 64, 1.0, 1.0, 0.0, False, False),
        (2, 500, 3, 60, 1.0, 1.0, 0.0, False, False),
        (2, 1000, 3, 64, 0.1, 1.0, 0.5, False, False),
        (3, 1024, 4, 100, 1.0, 0.1, 0.0, False, False),
        (4, 1024, 4, 128, 0.1, 1.0, 0.0, False, False),
        (4, 1024, 4, 128, 0.1, 1.0, 0.0, True, False),
        (2, 1500, 4, 128, 0.1, 10.0, 0.0, False, True),
        (4, 2048, 8, 64, 0.1, 1.0, 0.0, False, True),
    ],
)
def test_dense(
    B: int, T: int, H: int, D: int, scale: float, divisor: float, closed: float, norm: bool, gate: bool
) -> None:
    options: dict[str, Any] = {"gate": "softplus"} if gate else {"gate_divisor": divisor}
    inputs = kda_inputs(B, T, H, D, D, raw=False, scale=scale, dtype=torch.float16, device="cuda", **options)
    gen = torch.Generator("cuda").manual_seed(2)
    for name in ("q", "k", "v"):
        t = torch.rand(inputs.arguments[name].shape, generator=gen, device="cuda")
        inputs.arguments[name] = (t if norm or name == "v" else F.normalize(t, dim=-1)).half()
    inputs.arguments["use_qk_l2norm_in_kernel"] = norm
    if not gate:
        close_some_gates(inputs, closed)
    assert_within(inputs, DENSE)


@pytest.mark.parametrize(
    ("D", "closed", "bounds"),
    [
        (60, 0.0, [0, 15]),
        (64, 0.0, [0, 256, 500, 1000]),
        (128, 0.5, [0, 256, 500, 1000]),
        (100, 0.0, [0, 15, 100, 300, 1200, 2000]),
        (256, 0.0, [0, 100, 300, 1200, 3000, 4096]),
    ],
    ids=str,
)
def test_packed(D: int, closed: float, bounds: list[int]) -> None:
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    inputs = kda_inputs(
        1, bounds[-1], 4, D, D, raw=False, lengths=lengths, cu_dtype=torch.int64, dtype=torch.float16, device="cuda"
    )
    inputs.arguments["q"] = torch.randn_like(inputs.arguments["q"])
    close_some_gates(inputs, closed)
    assert_within(inputs, PACKED)
