"""The attention kernels in the interpreter against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from interpreted_attention import run

from mindspeed_kda import flash_attention

pytestmark = pytest.mark.interpreter
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "narrow": {"window": (2, None), "causal": True},
    "all": {"causal": True, "window": (33, None), "softcap": 1.5, "scale": 0.4},
}


def inputs(tq, tk, dtype=torch.float32, B=1, H=2, HK=1, D=16, DV=16):
    g = torch.Generator().manual_seed(tq * 1000 + tk)
    shapes = ((B, tq, H, D), (B, tk, HK, D), (B, tk, HK, DV), (B, tq, H, DV))
    return tuple(torch.randn(s, generator=g).to(dtype) for s in shapes)


def agree(got, x, dtype, **options):
    q, k, v, do = (t.double() for t in x)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o, lse = flash_attention(q, k, v, return_lse=True, backend="torch", **options)
    want = (o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do))
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(torch.isinf(a), torch.isinf(b)), name
        seen = ~torch.isinf(b)
        error, size = ((t[seen].square().mean().sqrt() if seen.any() else 0.0) for t in (a.double() - b, b))
        assert error <= LIMIT[dtype] * max(size, 0.1), f"{name}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (17, 17), (129, 129), (127, 40), (17, 129)])
def test_right(interpreter, dtype, options, tq, tk):
    x = inputs(tq, tk, dtype)
    agree(interpreter(run, x, **options), x, dtype, **options)


@pytest.mark.parametrize(("H", "HK", "D", "DV"), [(8, 2, 24, 16), (8, 1, 16, 40), (2, 2, 64, 64), (1, 1, 192, 128)])
def test_heads_and_sizes(interpreter, H, HK, D, DV):
    x = inputs(50, 50, H=H, HK=HK, D=D, DV=DV, B=2)
    agree(interpreter(run, x, causal=True), x, torch.float32, causal=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed(interpreter, options):
    packed = {
        "cu_seqlens_q": torch.tensor([0, 0, 17, 21, 21, 90]),
        "cu_seqlens_k": torch.tensor([0, 3, 20, 20, 25, 70]),
    }
    x = inputs(93, 72)
    agree(interpreter(run, x, **packed, **options), x, torch.float32, **packed, **options)


def test_repeats(interpreter):
    x = inputs(129, 129, torch.float16)
    first, second = (interpreter(run, x, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
