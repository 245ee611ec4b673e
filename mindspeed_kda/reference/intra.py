"""Pairs of rows inside a chunk, by halving (docs/kda_math.md, sections 3, 6 and 9).

The strict lower triangle of a BT x BT matrix is a tree of square blocks: the queries of the second half of a run of 2s
rows against the keys of its first half, for s = BT/2, BT/4, ..., 1. Each block has its own anchor, the boundary n
between the halves, so that for i behind it and j before it

    E_ij = 2^(g_i - g_j) = 2^(sum of a over n..i) * 2^(sum of a over j+1..n-1)

with both exponents at most 0, and both taken as sums of the per-token decays, never as differences of a running sum
(whose rounding grows with everything the chunk has decayed before). All chunks and blocks of a level are one product.

Shapes: x, k, a [..., BT, K], a the log2 decay of each token; matrices [..., BT, BT].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_kda.reference.products import matmul


def sum_before(x: Tensor) -> Tensor:
    """Row i: sum of the rows in front of i (the first row is 0), along the second last axis."""
    return torch.cat((torch.zeros_like(x[..., :1, :]), x[..., :-1, :].cumsum(-2)), -2)


def sum_after(x: Tensor) -> Tensor:
    """Row i: sum of the rows behind i (the last row is 0), along the second last axis."""
    return sum_before(x.flip(-2)).flip(-2)


def _halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """First and second halves of each run of 2s rows: two views [..., BT / 2s, s, K]."""
    runs = x.unflatten(-2, (x.shape[-2] // (2 * s), 2, s))
    return runs[..., 0, :, :], runs[..., 1, :, :]


def _runs(m: Tensor, s: int) -> Tensor:
    """View [..., BT / 2s, 2s, 2s] of the diagonal blocks of m."""
    n = m.shape[-1] // (2 * s)
    blocks = m.unflatten(-1, (n, 2 * s)).unflatten(-3, (n, 2 * s))  # [..., n, 2s, n, 2s]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _corner(m: Tensor, s: int) -> Tensor:
    """View [..., BT / 2s, s, s]: second-half rows by first-half columns of each run."""
    return _runs(m, s)[..., s:, :s]


def _levels(size: int) -> Iterator[int]:
    s = size // 2
    while s >= 1:
        yield s
        s //= 2


def _decays(a: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """2^ of the decay from the boundary to a second-half row (itself included), and from a first-half row to it."""
    first, second = _halves(a, s)
    return torch.exp2(second.cumsum(-2)), torch.exp2(sum_after(first))


def decayed_products(xs: Sequence[Tensor], k: Tensor, a: Tensor) -> list[Tensor]:
    """For each x: the strictly lower matrix sum_d x_i k_j E_ij."""
    size = k.shape[-2]
    out = [x.new_zeros((*x.shape[:-1], size)) for x in xs]
    for s in _levels(size):
        to_row, to_boundary = _decays(a, s)
        keys = (_halves(k, s)[0] * to_boundary).mT
        for x, m in zip(xs, out, strict=True):
            _corner(m, s).copy_(matmul(_halves(x, s)[1] * to_row, keys))
    return out


def decayed_products_backward(
    dP: Tensor, D: Tensor, R: Tensor, q: Tensor, k: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Section 6's three sums over strictly lower pairs j < i; the matrices' other entries are not read.

    rows of q: sum_j dP_ij k_j E_ij;  rows of k: sum_j D_ij k_j E_ij;  columns: sum_i (dP_ij q_i + R_ij k_i) E_ij.
    """
    q_rows, k_rows, columns = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
    for s in _levels(k.shape[-2]):
        to_row, to_boundary = _decays(a, s)
        k_first, k_second = _halves(k, s)
        keys = k_first * to_boundary
        p, d, r = (_corner(m, s) for m in (dP, D, R))
        _halves(q_rows, s)[1].add_(to_row * matmul(p, keys))
        _halves(k_rows, s)[1].add_(to_row * matmul(d, keys))
        pulled = matmul(p.mT, _halves(q, s)[1] * to_row) + matmul(r.mT, k_second * to_row)
        _halves(columns, s)[0].add_(to_boundary * pulled)
    return q_rows, k_rows, columns


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower L, by doubling: inverses of runs of s rows combine to those of 2s rows."""
    size = L.shape[-1]
    out = torch.eye(size, dtype=L.dtype, device=L.device).expand(L.shape).clone()
    for s in reversed(list(_levels(size))):
        runs = _runs(out, s)
        first, second = runs[..., :s, :s], runs[..., s:, s:]
        _corner(out, s).copy_(-matmul(matmul(second, _corner(L, s)), first))
    return out
