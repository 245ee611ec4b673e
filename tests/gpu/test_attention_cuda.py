"""``flash_attention`` on an NVIDIA GPU: the definition and PyTorch's kernel, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import flash_attention

pytestmark = pytest.mark.gpu
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def results(dtype, x, backend, **options):
    """o, lse, dq, dk, dv."""
    q, k, v, do = (t.detach().to(dtype) for t in x)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o, lse = flash_attention(q, k, v, return_lse=True, backend=backend, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do)


def inputs(dtype, T, H, HK, D):
    g = torch.Generator("cuda").manual_seed(T)
    shapes = ((2, T, H, D), (2, T, HK, D), (2, T, HK, D), (2, T, H, D))
    return [torch.randn(s, generator=g, device="cuda").to(dtype) for s in shapes]


def check(got, want, limit):
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, name
        error, size = (a.double() - b).square().mean().sqrt(), b.square().mean().sqrt()
        assert error <= limit * size.clamp(min=1e-2), f"{name}: {error / size:.2e}"


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (100, None), "softcap": 3.0}], ids=["full", "all"])
def test_definition(dtype, options, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x = inputs(dtype, 1000, 8, 2, 64)
    want = results(torch.float64, x, "torch", **options)
    check(results(dtype, x, "torch", **options), want, LIMIT[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("HK", [8, 2, 1])
@pytest.mark.parametrize("T", [1, 17, 129, 1000])
def test_library(dtype, causal, D, HK, T):
    x = inputs(dtype, T, 8, HK, D)
    want = results(torch.float64, x, "torch", causal=causal)
    got = results(dtype, x, "library", causal=causal, deterministic=False)
    check(got, want, LIMIT[dtype])


def test_repeatable_gradients_are_asked_of_torch():
    """PyTorch's backward repeats only where its own switch says so; the choice passes to the definition otherwise."""
    x = inputs(torch.bfloat16, 1000, 8, 8, 128)
    with pytest.raises(RuntimeError, match="deterministic: expected False unless"):
        results(torch.bfloat16, x, "library")
    torch.use_deterministic_algorithms(True)
    try:
        first = results(torch.bfloat16, x, "library")
        for _ in range(49):
            assert all(torch.equal(a, b) for a, b in zip(first, results(torch.bfloat16, x, "library"), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["torch", "library", "triton"])
def test_memory_grows_with_the_length_alone(backend):
    """At T = 32768 a T x T mask of one byte would be 1 GiB; scores of one head 4 GiB."""
    x = inputs(torch.bfloat16, 32768, 1, 1, 64)[:4]
    x = [t[:1] for t in x]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(torch.bfloat16, x, backend, causal=True, deterministic=False)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 512 * 2**20, f"{peak / 2**20:.0f} MiB"


TRITON_OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "all": {"causal": True, "window": (100, None), "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("options", TRITON_OPTIONS.values(), ids=TRITON_OPTIONS)
@pytest.mark.parametrize(("T", "D", "HK"), [(1, 64, 8), (129, 128, 1), (1000, 64, 2), (1000, 256, 8)])
def test_triton(dtype, options, T, D, HK):
    x = inputs(dtype, T, 8, HK, D)
    want = results(torch.float64, x, "torch", **options)
    check(results(dtype, x, "triton", **options), want, LIMIT[dtype])


def test_triton_repeats():
    x = inputs(torch.bfloat16, 1000, 8, 2, 128)
    first = results(torch.bfloat16, x, "triton", causal=True)
    for _ in range(49):
        assert all(
            torch.equal(a, b) for a, b in zip(first, results(torch.bfloat16, x, "triton", causal=True), strict=True)
        )
