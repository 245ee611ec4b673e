"""Steps of K1, the way back to the raw inputs, on numbers that can be followed by hand, and how far apart its
factors lie."""

from __future__ import annotations

import math

import torch

from mindspeed_kda.reference import chunk_space, transforms
from mindspeed_kda.reference.chunk_space import chunk_space_backward
from mindspeed_kda.reference.intra import sum_after, sum_before
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import measure
from mindspeed_kda.testing.oracle import judge


def test_the_norm_in_two_dimensions() -> None:
    """x = (3, 4): y = (0.6, 0.8); dy = (1, 0) leaves 0.2 (0.64, -0.48), at a right angle to x but for eps."""
    x, dy = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    r = transforms.inverse_norm(x)
    y = x * r
    torch.testing.assert_close(y, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-7, atol=0)
    dx = transforms.l2norm_backward(dy, y, r)
    torch.testing.assert_close(dx, torch.tensor([0.128, -0.096], dtype=torch.float64), rtol=1e-6, atol=0)
    radial, expected = float(x @ dx), 1e-6 * float(r) ** 2 * float(y @ dy)
    assert abs(radial - expected) < 1e-15
    assert 2.3e-8 < expected < 2.5e-8


def test_the_gradient_of_a_running_sum_is_the_suffix_sum() -> None:
    """(2, 5, 1, 3) gives (11, 9, 4, 3), and the chunk's whole decay adds its own gradient to every row."""
    dg, of_all = torch.tensor([[2.0], [5.0], [1.0], [3.0]]), 10.0
    suffix = dg + sum_after(dg)
    assert suffix.flatten().tolist() == [11.0, 9.0, 4.0, 3.0]
    a = torch.zeros(4, 1, requires_grad=True)
    g = a.cumsum(0)
    (da,) = torch.autograd.grad((dg * g).sum() + of_all * g[-1].sum(), a)
    assert torch.equal(da, suffix + of_all)


def test_what_leaves_through_the_last_row_comes_back_as_a_prefix() -> None:
    """k dk1 enters dg with - at its row and the last row with +: summed, each row keeps the rows before it."""
    x = torch.tensor([[2.0], [5.0], [1.0], [3.0]])
    at_last = torch.zeros(4, 1)
    at_last[-1] = x.sum()
    rows = at_last - x
    assert torch.equal(rows + sum_after(rows), sum_before(x))
    assert sum_before(x).flatten().tolist() == [0.0, 2.0, 7.0, 8.0]


def test_ln_2_appears_once() -> None:
    """d 2^g by the natural decay carries no ln 2: that of 2^x and that of x = a / ln 2 cancel."""
    a = torch.tensor([-0.3, -1.1, -0.2], dtype=torch.float64, requires_grad=True)
    c = torch.tensor([0.7, -2.0, 1.5], dtype=torch.float64)
    g = a.cumsum(0) / math.log(2.0)
    (da,) = torch.autograd.grad((c * torch.exp2(g)).sum(), a)
    dg = (c * torch.exp2(g)).detach().unsqueeze(-1)
    torch.testing.assert_close(da, (dg + sum_after(dg)).squeeze(-1))


def test_factors_1e20_apart_do_not_spoil_a_sum_of_their_products() -> None:
    """k 2^g and k 2^-g differ by more than 1e20, and yet k 2^g * dkd - k 2^-g * dki is as right in fp32 as the form
    with the factors drawn out: each product is of the size of the result. What spoils it is rounding the two
    sides differently (test_chunk_space.py)."""
    inputs = kda_inputs(T=16, H=1, K=32, V=32, BT=16, decay=-3.0, raw=False)
    x = inputs.arguments
    assert inputs.dht is not None
    rows = [x[n][0, :, 0] for n in ("q", "k", "v", "g")] + [x["beta"][0]]
    g = (rows[3] * chunk_space.LOG2E).cumsum(0)
    assert float(torch.exp2(-2 * g).max()) > 1e20
    expected = judge(*inputs)["dg"]
    for grouping in ("stored", "recomputed", "stable"):
        da = chunk_space_backward(
            *rows, x["initial_state"][0, 0], inputs.do[0, :, 0], inputs.dht[0, 0], 32**-0.5, grouping=grouping
        ).da
        assert measure(da.view(expected.shape), expected, torch.float32).rms_ratio < 1e-5, grouping
