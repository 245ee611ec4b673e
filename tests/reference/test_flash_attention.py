"""``flash_attention`` against the textbook formula in float64, which holds the whole matrix and is differentiated by
autograd; its mask is written from the words of the contract, pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_kda import flash_attention, flash_attention_bwd
from mindspeed_kda.backends import library_backend
from mindspeed_kda.contracts import flash_attention as contract
from mindspeed_kda.reference import flash_attention as reference
from mindspeed_kda.testing import attention as judge


def sees(i, j, tq, tk, causal, window):
    at = i + tk - tq
    left, right = window
    return (
        not (causal and j > at)
        and not (left is not None and j < at - left)
        and not (right is not None and j > at + right)
    )


def textbook(q, k, v, causal=False, window=(None, None), softcap=0.0, scale=None):
    """One batch of whole sequences: (o, lse)."""
    tq, tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    pairs = [[sees(i, j, tq, tk, causal, window) for j in range(tk)] for i in range(tq)]
    mask = torch.tensor(pairs, dtype=torch.bool).reshape(tq, tk)
    e = torch.where(mask, torch.exp(torch.where(mask, s, 0)), 0)
    total = e.sum(-1, keepdim=True)
    p = e / torch.where(total == 0, 1, total)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.log(total[..., 0])


def inputs(tq, tk=None, B=2, H=2, HK=None, D=16, DV=None, dtype=torch.float64, seed=0):
    """q, k, v, do."""
    g = torch.Generator().manual_seed(seed)
    tk, HK, DV = tq if tk is None else tk, HK or H, DV or D
    shapes = ((B, tq, H, D), (B, tk, HK, D), (B, tk, HK, DV), (B, tq, H, DV))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)


def results(fn, q, k, v, do):
    """o, lse, dq, dk, dv."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o, lse = fn(q, k, v)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do)


def rms(x):
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def agree(got, want, limit):
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, name
        assert torch.equal(torch.isinf(a), torch.isinf(b)), name
        assert not a.isnan().any(), name
        finite = ~torch.isinf(b)
        assert rms((a.double() - b)[finite]) <= limit * max(rms(b[finite]), 0.1), name


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "left-of-causal": {"causal": True, "window": (7, None)},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "all": {"causal": True, "window": (9, None), "softcap": 1.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (17, 17), (129, 129), (17, 130), (130, 17), (3, 0), (0, 3)])
def test_float64_is_the_textbooks(options, tq, tk):
    x = inputs(tq, tk)
    got = results(lambda q, k, v: flash_attention(q, k, v, return_lse=True, backend="torch", **options), *x)
    agree(got, results(lambda q, k, v: textbook(q, k, v, **options), *x), 1e-12)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("D", "DV"), [(64, 64), (192, 128), (5, 7)])
def test_grouped_heads_and_value_size(group, D, DV):
    x = inputs(19, 23, B=1, H=8, HK=8 // group, D=D, DV=DV)
    got = results(lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True, backend="torch"), *x)
    agree(got, results(lambda q, k, v: textbook(q, k, v, causal=True), *x), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("T", [1, 17, 127, 129])
def test_no_worse_than_twice_eager(dtype, options, T):
    """The bar of ``testing.attention``."""
    x = inputs(T, H=4, HK=1, dtype=dtype)
    got = judge.results(flash_attention, *x, return_lse=True, backend="torch", **options)
    assert not judge.misses(got, judge.results(judge.eager, *x, **options), judge.truth(*x, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (17, 17), (17, 30), (30, 17), (3, 0)])
def test_the_judges_truth_is_the_textbooks(options, tq, tk):
    x = inputs(tq, tk, HK=1)
    want = results(lambda q, k, v: textbook(q, k, v, **options), *x)
    agree(tuple(judge.truth(*x, **options).results.values()), want, 1e-12)


def test_the_judge_sees_an_error_of_three_roundings():
    x = inputs(33, dtype=torch.float32)
    want = judge.truth(*x)
    right = {name: t.float() for name, t in want.results.items()}
    assert not judge.misses(right, right, want)
    for name in judge.NAMES:
        u = (want.main[name] + want.wide[name]) * 2.0**-24
        [miss] = judge.misses({**right, name: right[name] + 3 * u}, right, want)
        assert miss.startswith(f"{name}: error")
        [miss] = judge.misses({**right, name: right[name].half()}, right, want)
        assert miss.startswith(f"{name}: torch.float16")
        [miss] = judge.misses({**right, name: right[name] * torch.nan}, right, want)
        assert miss.startswith(f"{name}: not finite")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options):
    q, k, v, _ = (x.requires_grad_() for x in inputs(5, 6, B=1, H=2, HK=1, D=3, DV=2))
    assert torch.autograd.gradcheck(lambda q, k, v: flash_attention(q, k, v, backend="torch", **options), (q, k, v))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_is_each_sequence_alone(options, index):
    """Empty on either side or both, and rows that belong to no sequence."""
    lengths_q, lengths_k = [0, 17, 4, 0, 0, 130, 2], [3, 17, 0, 0, 5, 20, 9]
    cu_q = torch.tensor([0, *itertools.accumulate(lengths_q)], dtype=index)
    cu_k = torch.tensor([0, *itertools.accumulate(lengths_k)], dtype=index)
    x = inputs(int(cu_q[-1]) + 3, int(cu_k[-1]) + 2, B=1, H=2, HK=1)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    got = results(lambda q, k, v: flash_attention(q, k, v, return_lse=True, **packed, **options), *x)
    o, lse, dq, dk, dv = (torch.zeros_like(t) for t in got)
    lse.fill_(-torch.inf)
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        q, k, v, do = x[0][:, a:b], x[1][:, c:d], x[2][:, c:d], x[3][:, a:b]
        part = results(lambda q, k, v: textbook(q, k, v, **options), q, k, v, do)
        o[:, a:b], lse[:, :, a:b], dq[:, a:b], dk[:, c:d], dv[:, c:d] = part
    agree(got, (o, lse, dq, dk, dv), 1e-12)


def test_a_row_without_keys_gives_zeros():
    """Causal with more queries than keys: the first rows stand before the first key."""
    q, k, v, do = inputs(9, 4)
    o, lse, dq, _, _ = results(lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True), q, k, v, do)
    assert (o[:, :5] == 0).all()
    assert (dq[:, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()


def test_scores_far_outside_the_mask_do_no_harm():
    """exp of a masked score would overflow, and inf * 0 is NaN."""
    q, k, v, do = inputs(8, dtype=torch.float32)
    k[:, 4:] *= 1e4
    for t in results(lambda q, k, v: flash_attention(q, k, v, window=(None, 0), return_lse=True), q, k, v, do):
        assert t.isfinite().all()


def test_backward_alone_is_the_one_of_autograd_and_inputs_stay():
    q, k, v, do = inputs(33, 40, HK=1, dtype=torch.float32)
    kept = [x.clone() for x in (q, k, v, do)]
    o, lse, *grads = results(lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True), q, k, v, do)
    alone = flash_attention_bwd(do, q, k, v, o, lse, causal=True)
    assert alone._fields == ("dq", "dk", "dv")
    assert all(torch.equal(a, b) for a, b in zip(alone, grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v, do), strict=True))


def test_strides_do_not_matter():
    q, k, v, do = inputs(20)
    strided = tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, do))
    fn = lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    agree(results(fn, *strided), results(fn, q, k, v, do), 1e-13)


def test_no_block_holds_all_pairs(monkeypatch):
    """The mask is the largest tensor of pairs: at most ROWS rows, and with a window only the keys of it."""
    call = contract.check(*inputs(1000, B=1, H=1, D=2)[:3], causal=True, window=(64, None))
    sizes = [seen.shape for _, _, seen in reference._blocks(call)]
    assert max(s[0] for s in sizes) == reference.ROWS
    assert max(s[1] for s in sizes) <= reference.ROWS + 64


def test_flops_count_the_pairs_inside_the_mask():
    call = contract.check(*inputs(5, 7, B=2, H=4, HK=2, D=8, DV=6)[:3], causal=True, window=(2, None))
    pairs = sum(sees(i, j, 5, 7, True, (2, None)) for i in range(5) for j in range(7))
    assert contract.flops(call) == (8 * pairs * 2 * (8 + 6), 8 * pairs * 2 * (24 + 12))


class TestLibrary:
    """PyTorch's kernel on CPU, by name."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("T", [1, 17, 129])
    def test_agrees(self, causal, T):
        x = inputs(T, dtype=torch.float32)
        run = lambda q, k, v: flash_attention(q, k, v, causal=causal, return_lse=True, backend="library")  # noqa: E731
        want = results(lambda q, k, v: textbook(q, k, v, causal=causal), *(t.double() for t in x))
        agree(results(run, *x), want, 1e-5)

    @pytest.mark.parametrize(
        ("options", "sizes", "words"),
        [
            ({"softcap": 2.0}, {}, "softcap: expected 0.*got 2.0"),
            ({"window": (3, None)}, {}, r"window: expected no bound.*got \(3, None\)"),
            ({"causal": True}, {"tk": 9}, "causal: expected Tq = Tk.*got 4 and 9"),
            ({}, {"DV": 8}, "v: expected DV = D = 16.*got 8"),
            ({}, {"HK": 1}, "k: expected HK = H = 2 on cpu, got 1"),
            ({}, {"dtype": torch.float64}, "got float64"),
        ],
    )
    def test_declines_with_the_reason(self, options, sizes, words):
        q, k, v, _ = inputs(4, **{"dtype": torch.float32, **sizes})
        with pytest.raises(RuntimeError, match=words):
            flash_attention(q, k, v, backend="library", **options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": [1]}, TypeError, "q: expected a torch.Tensor, got list"),
        ({"k": torch.ones(2, 4, 3, 16)}, ValueError, "k: expected HK to divide H = 2, got HK = 3"),
        ({"v": torch.ones(2, 5, 2, 16)}, ValueError, r"v: expected shape .*, got \[2, 5, 2, 16\]"),
        ({"v": torch.ones(2, 4, 2, 16).half()}, TypeError, "v: expected dtype float32, got float16"),
        ({"window": 3}, TypeError, r"window: expected a pair \(left, right\), got 3"),
        ({"window": (-1, 0)}, ValueError, "window: expected left of 0 or more.*got -1"),
        ({"window": (0, 1.5)}, TypeError, "window: expected right to be an int or None, got 1.5"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a finite number of 0 .*got -1.0"),
        ({"softcap": "a"}, TypeError, "softcap: expected a float, got str"),
        ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, ValueError, "cu_seqlens_k: expected a tensor beside cu_seqlens_q"),
        (
            {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 4])},
            ValueError,
            "cu_seqlens_q: expected B = 1 with packed sequences, got B = 2",
        ),
    ],
)
def test_errors_name_the_argument(change, error, words):
    q, k, v, _ = inputs(4, dtype=torch.float32)
    with pytest.raises(error, match=words):
        flash_attention(**{"q": q, "k": k, "v": v, **change})


def test_backward_alone_checks_what_it_takes():
    q, k, v, do = inputs(4, dtype=torch.float32)
    o, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"lse: expected shape \[B, H, Tq\] = \[2, 2, 4\], got \[2, 2, 3\]"):
        flash_attention_bwd(do, q, k, v, o, lse[..., :3])
    with pytest.raises(TypeError, match="do: expected dtype float32, got float64"):
        flash_attention_bwd(do.double(), q, k, v, o, lse)


@pytest.mark.parametrize(
    ("on", "warn_only", "repeats"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_a_warning_alone_does_not_make_the_library_repeat(on, warn_only, repeats):
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        assert library_backend._repeats() is (on and not warn_only)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
