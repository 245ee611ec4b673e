"""chunk_kda of the Triton backend on stock Triton and an NVIDIA GPU, against float64.

The judge is the reference in float64, which tests/reference holds to the token recurrence within 1e-10.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GATE_PARAMETERS = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}
"""Limit of dA_log and ddt_bias: sums over all tokens, which cancel."""

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])


def assert_right(inputs: KdaInputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    got = gradients(chunk_kda, inputs.arguments | {"backend": "triton"}, inputs.do, inputs.dht)
    double = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.arguments.items()}
    dht = None if inputs.dht is None else inputs.dht.double()
    expected = gradients(chunk_kda, double | {"backend": "torch"}, inputs.do.double(), dht)
    assert got.keys() == expected.keys()
    limits, wrong = (LIMIT, GATE_PARAMETERS), []
    for name, reference in expected.items():
        limit = limits[name in ("dA_log", "ddt_bias")][dtype]
        try:
            assert_accurate(name, got[name], reference, dtype, rms_limit=limit)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    return got


def on_gpu(dtype: torch.dtype, **options: Any) -> KdaInputs:
    return kda_inputs(**{"H": 2, "dtype": dtype, "device": "cuda", **options})


@dtypes
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 500, 2048, 8192])
def test_lengths(T: int, dtype: torch.dtype) -> None:
    assert_right(on_gpu(dtype, T=T, gate="softplus"), dtype)


GATES: dict[str, dict[str, Any]] = {
    "logsigmoid / 0.1": {"gate_divisor": 0.1},
    "logsigmoid": {},
    "logsigmoid / 10": {"gate_divisor": 10.0},
    "-0.05": {"decay": -0.05},
    "-1": {"decay": -1.0},
    "-5": {"decay": -5.0},
    "-10": {"decay": -10.0},
    "lower bound": {"gate": "lower_bound"},
    "lower bound at its end": {"gate": "lower_bound", "decay": -5.0},
    "lower bound, A_log 20": {"gate": "lower_bound", "A_log": 20.0},
    "softplus": {"gate": "softplus"},
    "softplus, A_log 20": {"gate": "softplus", "A_log": 20.0},
}


@dtypes
@pytest.mark.parametrize("options", GATES.values(), ids=GATES)
def test_gates(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_right(on_gpu(dtype, T=500, H=2, HV=4, K=128, V=128, **options), dtype)


@dtypes
def test_tokens_that_forget_everything(dtype: torch.dtype) -> None:
    inputs = on_gpu(dtype, T=500, H=1, HV=2, K=128, V=128)
    inputs.arguments["g"][:, 3::7] = -1000.0
    assert_right(inputs, dtype)


@dtypes
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_beta_of_zero(neg_eigval: bool, dtype: torch.dtype) -> None:
    """Tokens that write nothing, or next to nothing, have a right dbeta all the same."""
    inputs = on_gpu(dtype, T=500, raw=False, neg_eigval=neg_eigval)
    beta = inputs.arguments["beta"]
    beta[:, ::3] = 0.0
    beta[:, 1::6] = 1e-3
    assert_right(inputs, dtype)


@dtypes
@pytest.mark.parametrize("size", [60, 64, 100, 128, 256])
def test_sizes(size: int, dtype: torch.dtype) -> None:
    assert_right(on_gpu(dtype, T=200, K=size, V=size, gate="lower_bound"), dtype)


@dtypes
@pytest.mark.parametrize(
    "bounds", [[0, 15, 100, 300, 1200, 2000], [0, 65, 65, 128]], ids=lambda b: "-".join(map(str, b))
)
def test_packed(bounds: list[int], dtype: torch.dtype) -> None:
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    inputs = on_gpu(dtype, T=bounds[-1] + 3, HV=4, lengths=lengths, gate="softplus", state_v_first=True)
    got = assert_right(inputs, dtype)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, bounds[-1] :] == 0).all(), name


@dtypes
@pytest.mark.parametrize("BT", [16, 32])
def test_chunk_sizes(BT: int, dtype: torch.dtype) -> None:
    assert_right(on_gpu(dtype, T=200, BT=BT, gate="softplus", disable_recompute=True), dtype)


@dtypes
def test_many_heads_ready_made_inputs(dtype: torch.dtype) -> None:
    inputs = on_gpu(dtype, T=200, H=32, raw=False, neg_eigval=True, states=False, wide_beta_and_g=False)
    assert_right(inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bfloat16"])
@pytest.mark.parametrize("lengths", [None, [500, 0, 1, 999]], ids=["dense", "packed"])
def test_repeats_bit_for_bit_and_never_synchronises(lengths: list[int] | None, dtype: torch.dtype) -> None:
    inputs = on_gpu(dtype, T=1500, gate="softplus", lengths=lengths)
    arguments = inputs.arguments | {"backend": "triton"}
    first = gradients(chunk_kda, arguments, inputs.do, inputs.dht)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [gradients(chunk_kda, arguments, inputs.do, inputs.dht) for _ in range(19)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        for name, t in first.items():
            assert torch.equal(t, run[name]), name


@pytest.mark.parametrize(("K", "V"), [(16, 128), (128, 16)], ids=["wide V", "wide K"])
def test_more_elements_than_int32_counts(K: int, V: int) -> None:
    """Tensors of over 2^31 elements: the last sequence of such a pack equals the call on it alone."""
    T, H, last = 525_000, 32, 200
    assert T * H * max(K, V) > 2**31
    gen = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device="cuda", dtype=dtype)

    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    fixed = flags | {"A_log": torch.zeros(H, device="cuda"), "lower_bound": -5.0, "backend": "triton"}
    tokens = {"q": randn(1, T, H, K), "k": randn(1, T, H, K), "v": randn(1, T, H, V), "g": randn(1, T, H, K)}
    tokens["beta"], do = randn(1, T, H), randn(1, T, H, V)
    cu = torch.tensor([0, T - last, T], device="cuda", dtype=torch.int32)
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    whole = gradients(chunk_kda, fixed | tokens | {"cu_seqlens": cu}, do, None)
    ends = {name: whole.pop(name)[:, -last:].clone() for name in names}
    del whole
    short = {name: t[:, -last:].clone() for name, t in tokens.items()}
    alone = gradients(chunk_kda, fixed | short, do[:, -last:].clone(), None)
    for name in names:
        assert torch.equal(ends[name], alone[name]), name
