"""The attention kernels in the interpreter against float64, by the bar of ``testing.attention``."""

from __future__ import annotations

import pytest
import torch
from interpreted_attention import run

from mindspeed_kda.testing.attention import eager, misses, results, truth
from mindspeed_kda.testing.covering import pairwise

pytestmark = pytest.mark.interpreter
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "narrow": {"window": (2, None), "causal": True},
    "all": {"causal": True, "window": (33, None), "softcap": 1.5, "scale": 0.4},
}
CASES = pairwise(
    {
        "options": tuple(OPTIONS),
        "lengths": ((1, 1), (17, 17), (127, 40), (129, 129), (17, 129)),
        "dtype": ("float32", "float16"),
    }
)


def inputs(tq, tk, dtype=torch.float32, B=1, H=2, HK=1, D=16, DV=16):
    g = torch.Generator().manual_seed(tq * 1000 + tk)
    shapes = ((B, tq, H, D), (B, tk, HK, D), (B, tk, HK, DV), (B, tq, H, DV))
    return tuple(torch.randn(s, generator=g).to(dtype) for s in shapes)


def check(got, x, **options):
    found = misses(got, results(eager, *x, **options), truth(*x, **options))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['options']}-{c['lengths']}-{c['dtype']}")
def test_no_worse_than_twice_eager(interpreter, case):
    options, dtype = OPTIONS[case["options"]], getattr(torch, case["dtype"])
    x = inputs(*case["lengths"], dtype)
    check(interpreter(run, x, **options), x, **options)


@pytest.mark.parametrize(("H", "HK", "D", "DV"), [(8, 2, 24, 16), (8, 1, 16, 40), (2, 2, 64, 64), (1, 1, 192, 128)])
def test_heads_and_sizes(interpreter, H, HK, D, DV):
    x = inputs(50, 50, H=H, HK=HK, D=D, DV=DV, B=2)
    check(interpreter(run, x, causal=True), x, causal=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed(interpreter, options):
    """Sequences empty on either side or both, and rows that belong to none."""
    packed = {
        "cu_seqlens_q": torch.tensor([0, 0, 17, 21, 21, 90]),
        "cu_seqlens_k": torch.tensor([0, 3, 20, 20, 25, 70]),
    }
    x = inputs(93, 72)
    check(interpreter(run, x, **packed, **options), x, **packed, **options)


def test_a_large_softcap_costs_no_accuracy(interpreter):
    """tanh of small scores: right to a share of itself, not of 1."""
    x = inputs(65, 65)
    check(interpreter(run, x, softcap=50.0), x, softcap=50.0)


def test_scores_far_outside_the_mask_do_no_harm(interpreter):
    """exp2 of a masked score would overflow, and inf * 0 is NaN."""
    q, k, v, do = inputs(40, 40)
    k[:, 20:] *= 1e4
    for name, t in interpreter(run, (q, k, v, do), window=(None, 0)).items():
        assert t[..., :20].isfinite().all() if name == "lse" else t[:, :20].isfinite().all(), name


def test_repeats(interpreter):
    x = inputs(129, 129, torch.float16)
    first, second = (interpreter(run, x, causal=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
