"""``flash_attention`` on an NVIDIA GPU: the definition and PyTorch's kernels, by the bar of ``testing.attention``, and
which backend takes a call. The Triton kernels are in test_attention_acceptance.py."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import flash_attention
from mindspeed_kda.backends import library_backend
from mindspeed_kda.contracts import flash_attention as contract
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.attention import eager, misses, results, truth

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(dtype, T, H, HK, D, DV=None, B=2):
    """q, k, v, do."""
    g, DV = torch.Generator("cuda").manual_seed(T), DV or D
    shapes = ((B, T, H, D), (B, T, HK, D), (B, T, HK, DV), (B, T, H, DV))
    return [torch.randn(s, generator=g, device="cuda").to(dtype) for s in shapes]


def by(backend, **fixed):
    return lambda q, k, v, **options: flash_attention(q, k, v, return_lse=True, backend=backend, **fixed, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (100, None), "softcap": 3.0}], ids=["full", "all"])
def test_definition(dtype, options, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x = inputs(dtype, 1000, 8, 2, 64)
    got = results(by("torch"), *x, **options)
    assert not misses(got, results(eager, *x, **options), truth(*x, **options))


@pytest.fixture(params=["cudnn", "flash"])
def kernel(request):
    """Which of PyTorch's kernels may run."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param == "cudnn")
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("HK", [8, 2, 1])
@pytest.mark.parametrize("T", [1, 17, 129, 1000])
def test_library(dtype, causal, D, HK, T, kernel):
    x = inputs(dtype, T, 8, HK, D)
    call = contract.check(*x[:3], causal=causal, deterministic=False)
    hopper = torch.cuda.get_device_capability()[0] >= library_backend.CUDNN_MAJOR
    assert library_backend.takes_cudnn(call) == (kernel == "cudnn" and T > 1 and hopper)
    got = results(by("library", deterministic=False), *x, causal=causal)
    assert not misses(got, results(eager, *x, causal=causal), truth(*x, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_library_with_another_value_size(causal, kernel):
    x = inputs(torch.bfloat16, 300, 8, 8, 192, 128)
    if kernel == "flash" or torch.cuda.get_device_capability()[0] < library_backend.CUDNN_MAJOR:
        with pytest.raises(RuntimeError, match="v: expected DV = D = 192 from this kernel, got 128"):
            results(by("library", deterministic=False), *x, causal=causal)
        return
    got = results(by("library", deterministic=False), *x, causal=causal)
    assert not misses(got, results(eager, *x, causal=causal), truth(*x, causal=causal))


def test_repeatable_gradients_are_asked_of_torch():
    """PyTorch's backward repeats only where its own switch says so, and then it is the flash kernel's."""
    x = inputs(torch.bfloat16, 1000, 8, 8, 128)
    with pytest.raises(RuntimeError, match="deterministic: expected False unless"):
        results(by("library"), *x)
    torch.use_deterministic_algorithms(True)
    try:
        assert not library_backend.takes_cudnn(contract.check(*x[:3]))
        first = results(by("library"), *x)
        for _ in range(49):
            again = results(by("library"), *x)
            assert all(torch.equal(first[name], again[name]) for name in first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("options", "dtype", "chosen"),
    [
        ({}, torch.bfloat16, "triton"),
        ({"deterministic": False}, torch.bfloat16, "library"),
        ({"deterministic": False, "softcap": 2.0}, torch.bfloat16, "triton"),
        ({"deterministic": False, "window": (5, None)}, torch.float16, "triton"),
        ({}, torch.float32, "triton"),
        ({}, torch.float64, "torch"),
    ],
)
def test_who_takes_a_call_that_names_nobody(options, dtype, chosen):
    call = contract.check(*inputs(dtype, 17, 8, 2, 64)[:3], **options)
    assert REGISTRY.choose(contract.OP, call, "cuda").name == chosen


@pytest.mark.parametrize("backend", ["torch", "library"])
def test_memory_grows_with_the_length_alone(backend):
    """At T = 32768 a T x T mask of one byte would be 1 GiB; scores of one head 4 GiB."""
    x = inputs(torch.bfloat16, 32768, 1, 1, 64, B=1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(by(backend, deterministic=False), *x, causal=True)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 512 * 2**20, f"{peak / 2**20:.0f} MiB"
