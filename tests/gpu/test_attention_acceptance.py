"""``flash_attention`` in Triton on an NVIDIA GPU against float64, by the bar of ``testing.attention``: gradients no
worse than twice eager's, over masks, softcap, grouped heads, head sizes, lengths and packed sequences; repeats; memory.

Lengths are no part of a kernel's compilation, so that each test compiles one set of kernels and walks them all.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_kda import flash_attention
from mindspeed_kda.testing.attention import eager, misses, results, truth
from mindspeed_kda.testing.covering import pairwise

pytestmark = pytest.mark.gpu
H = 8
LENGTHS = (
    *((t, t) for t in (1, 17, 127, 128, 129, 1000, 4096)),
    *((17, 129), (129, 17), (1, 1000), (1000, 127), (128, 4096)),
)
PACKED = (
    ([1, 17, 0, 127, 128, 129, 1000], [1, 17, 5, 127, 128, 129, 1000]),
    ([0, 17, 129, 3, 0, 300], [129, 17, 0, 70, 0, 1000]),
)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
    "left": {"causal": True, "window": (130, None)},
}
CASES = pairwise(
    {
        "mask": tuple(MASKS),
        "sizes": ((64, 64), (128, 128), (192, 128), (256, 256)),
        "dtype": ("bfloat16", "float16", "float32"),
        "HK": (8, 2, 1),
        "softcap": (0.0, 5.0),
        "packed": (False, True),
    }
)


def label(case):
    return "-".join(str(x).replace(" ", "") for x in case.values())


def inputs(dtype, tq, tk, HK, D, DV, B=1):
    g = torch.Generator("cuda").manual_seed(tq * 7 + tk)
    shapes = ((B, tq, H, D), (B, tk, HK, D), (B, tk, HK, DV), (B, tq, H, DV))
    return tuple(torch.randn(s, generator=g, device="cuda").to(dtype) for s in shapes)


def lengths_of(packed):
    """Tq, Tk and the arguments of packed sequences; some rows at the end belong to none."""
    if not packed:
        return [(tq, tk, {}) for tq, tk in LENGTHS]
    found = []
    for q, k in PACKED:
        cu = [torch.tensor([0, *itertools.accumulate(x)], device="cuda") for x in (q, k)]
        found.append((sum(q) + 3, sum(k) + 2, {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}))
    return found


def own(q, k, v, **options):
    return flash_attention(q, k, v, return_lse=True, backend="triton", **options)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_no_worse_than_twice_eager(case):
    dtype, (D, DV) = getattr(torch, case["dtype"]), case["sizes"]
    found = []
    for tq, tk, packed in lengths_of(case["packed"]):
        # an RMS wants more than the eight rows of one batch with one query
        x = inputs(dtype, tq, tk, case["HK"], D, DV, B=4 if tq <= 129 and not packed else 1)
        options = {**MASKS[case["mask"]], "softcap": case["softcap"], **packed}
        want, beside = truth(*x, **options), results(eager, *x, **options)
        for deterministic in (True, False):
            got = results(own, *x, deterministic=deterministic, **options)
            found += [f"{tq} x {tk} deterministic={deterministic} {m}" for m in misses(got, beside, want)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_fifty_runs_are_equal(dtype, packed):
    """On memory that was poisoned first (tests/conftest.py)."""
    tq, tk, lengths = (1000, 1000, {}) if not packed else lengths_of(True)[0]
    x = inputs(dtype, tq, tk, 2, 128, 128)
    first = results(own, *x, causal=True, **lengths)
    for _ in range(49):
        again = results(own, *x, causal=True, **lengths)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_is_each_sequence_alone(mask):
    for (lengths_q, lengths_k), (tq, tk, packed) in zip(PACKED, lengths_of(True), strict=True):
        q, k, v, do = inputs(torch.bfloat16, tq, tk, 2, 64, 64)
        got = results(own, q, k, v, do, **MASKS[mask], **packed)
        bounds = (itertools.pairwise(cu.tolist()) for cu in packed.values())
        for (a, b), (c, d) in zip(*bounds, strict=True):
            alone = results(own, q[:, a:b], k[:, c:d], v[:, c:d], do[:, a:b], **MASKS[mask])
            part = {"o": got["o"][:, a:b], "lse": got["lse"][:, :, a:b], "dq": got["dq"][:, a:b],
                    "dk": got["dk"][:, c:d], "dv": got["dv"][:, c:d]}  # fmt: skip
            for name, x in part.items():
                assert torch.equal(x, alone[name]), f"{name} of queries {a} to {b}"
        for name, used in (
            ("o", sum(lengths_q)),
            ("dq", sum(lengths_q)),
            ("dk", sum(lengths_k)),
            ("dv", sum(lengths_k)),
        ):
            assert (got[name][:, used:] == 0).all(), name


@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_grows_with_the_length_alone(deterministic):
    """At T = 32768 the scores of one head would be 2 GiB in bfloat16, a mask of one byte 1 GiB."""
    peaks = []
    for T in (16384, 32768):
        x = [t[:, :, :1] for t in inputs(torch.bfloat16, T, T, 1, 128, 128)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results(own, *x, causal=True, deterministic=deterministic)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[1] < 128 * 2**20
