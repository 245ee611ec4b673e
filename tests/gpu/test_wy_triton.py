"""The six stages on stock Triton and an NVIDIA GPU, against float64: bfloat16, sizes, packed calls, large tensors."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.wy_check import assert_right

pytestmark = pytest.mark.gpu

HEADS = (60, 64, 100, 128, 256)
AXES = {
    "T": (1, 15, 17, 63, 64, 65, 127, 300),
    "K": HEADS,
    "V": HEADS,
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (2, 4)),
    "state": ("float32", "main"),
    "state_v_first": (False, True),
    "beta": ("float32", "main"),
    "lengths": (None, [0, 65, 1, 63, 300]),
    "index": (torch.int32, torch.int64),
}
CASES = pairwise(AXES)
MAIN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SPARE = 4
"""Tokens after the last packed sequence."""


def label(case):
    return f"T{case['T']}," + ",".join(str(v).removeprefix("torch.").replace(" ", "") for v in list(case.values())[1:])


def run(kwargs):
    return op(**kwargs, backend="triton")


def inputs_of(case):
    H, HV = case["heads"]
    main, lengths = case["dtype"], case["lengths"]
    return wy_inputs(
        B=2 if lengths is None else 1, T=case["T"] if lengths is None else sum(lengths) + SPARE, H=H, HV=HV,
        K=case["K"], V=case["V"], BT=case["BT"], dtype=main,
        state_dtype=main if case["state"] == "main" else torch.float32,
        beta_dtype=main if case["beta"] == "main" else torch.float32,
        state_v_first=case["state_v_first"], lengths=lengths, cu_dtype=case["index"], device="cuda", seed=case["T"],
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=label)
def test_against_float64(case):
    kwargs = inputs_of(case)
    if case["lengths"] is not None:
        for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
            kwargs[name][:, -SPARE:] = float("nan")
    assert_right(run(kwargs), kwargs)


def test_the_covering_set_is_within_its_bound():
    assert len(CASES) <= 150


@MAIN
def test_training_shape(dtype):
    """The shape of the op's page: B1 T2048 H32 K=V=128, chunk 64, fp32 state."""
    kwargs = wy_inputs(B=1, T=2048, H=32, K=128, V=128, BT=64, dtype=dtype, state_dtype=torch.float32, device="cuda")
    assert_right(run(kwargs), kwargs)


@MAIN
@pytest.mark.parametrize("decay", [-5.0, -10.0])
def test_strong_decay(dtype, decay):
    kwargs = wy_inputs(T=300, H=2, K=128, V=128, BT=64, dtype=dtype, decay=decay, device="cuda")
    assert_right(run(kwargs), kwargs)


@MAIN
def test_repeats_bit_for_bit(dtype):
    kwargs = wy_inputs(T=700, H=4, HV=8, K=128, V=128, BT=64, dtype=dtype, device="cuda")
    first = run(kwargs)
    for _ in range(49):
        for a, b in zip(run(kwargs), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_strides_and_alignment_do_not_matter():
    kwargs = wy_inputs(T=130, H=2, HV=4, K=64, V=100, BT=64, dtype=torch.bfloat16, device="cuda")
    want = run(kwargs)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in kwargs.items() if torch.is_tensor(t)}
    shifted = {}
    for name, t in kwargs.items():
        if torch.is_tensor(t):
            buffer = torch.full((t.numel() + 7,), float("nan"), dtype=t.dtype, device=t.device)
            buffer[3:-4] = t.reshape(-1)
            shifted[name] = buffer[3:-4].view(t.shape)
    for a, b in zip(run(kwargs | turned), want, strict=True):
        assert torch.equal(a, b)
    # Not bitwise: without alignment the compiler lays tiles out otherwise, and sums run in another order.
    assert_right(run(kwargs | shifted), kwargs)


@pytest.mark.whole_gpu
def test_more_elements_than_int32_counts():
    """g, dq, dk and dg of over 2^31 elements: the call equals its samples one by one."""
    torch.cuda.empty_cache()
    B, T, HV, K, V = 2, 65600, 64, 256, 16
    assert B * T * HV * K > 2**31
    gen = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=gen, device="cuda", dtype=dtype)

    NT = T // 64
    kwargs = {
        "q": randn(B, T, 1, K), "k": randn(B, T, 1, K), "g": -randn(B, T, HV, K, dtype=torch.float32).abs_(),
        **{name: randn(B, T, HV, V) for name in ("v", "v_new", "do", "dv")},
        "beta": randn(B, T, HV), "A": randn(B, T, HV, 64), "h": randn(B, NT, HV, K, V), "dh": randn(B, NT, HV, K, V),
    }  # fmt: skip
    whole = run(kwargs)
    for i in range(B):
        one = run({name: t[i : i + 1] for name, t in kwargs.items()})
        for a, b in zip(whole, one, strict=True):
            assert torch.equal(a[i : i + 1], b)


def test_on_a_side_stream():
    kwargs = wy_inputs(T=130, H=2, K=64, V=64, BT=64, dtype=torch.bfloat16, device="cuda")
    want = run(kwargs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(kwargs)
    stream.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
