"""Packed sequences to chunks: the only place that turns ``cu_seqlens`` into chunk indices, spans and counts.

A sequence of length n has ceil(n / BT) chunks, the last one may be short, an empty sequence has none; chunks never
cross a sequence. Everything here stays on the device of ``cu_seqlens`` and never synchronises.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def count_chunks(bounds: list[int], chunk_size: int) -> int:
    """NT of packed sequences with these host-side bounds."""
    return sum(cdiv(b - a, chunk_size) for a, b in itertools.pairwise(bounds))


def max_chunks(tokens: int, num_seqs: int, chunk_size: int) -> int:
    """The most chunks that ``num_seqs`` packed sequences in ``tokens`` tokens can have: known without their lengths."""
    seqs = min(num_seqs, tokens)  # the others are empty
    return (tokens + seqs * (chunk_size - 1)) // chunk_size if seqs else 0


def chunk_indices(cu_seqlens: Tensor, chunk_size: int, num_chunks: int) -> Tensor:
    """[NT, 2] of (sequence, chunk in sequence), in cu_seqlens' dtype.

    ``num_chunks`` comes from the caller (a state tensor's shape), so no value leaves the device. Where it is larger
    than the sequences need, the surplus rows name chunks past the end of the last sequence, which hold no row.
    """
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    counts = torch.div(lengths - 1, chunk_size, rounding_mode="floor") + 1  # ceil that cannot pass int32's end
    ends = counts.cumsum(0)
    i_chunk = torch.arange(num_chunks, device=cu_seqlens.device, dtype=ends.dtype)
    last = max(cu_seqlens.shape[0] - 2, 0)
    i_n = torch.searchsorted(ends, i_chunk, right=True).clamp(max=last)
    if counts.shape[0] == 0:
        return torch.stack((i_n, i_chunk), dim=1).to(cu_seqlens.dtype)
    return torch.stack((i_n, i_chunk - (ends - counts)[i_n]), dim=1).to(cu_seqlens.dtype)


def chunk_spans(cu_seqlens: Tensor, indices: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """First token and number of rows of each chunk, int64 [NT] each; rows is 0 for a chunk past its sequence."""
    if cu_seqlens.shape[0] < 2:
        zero = torch.zeros(indices.shape[0], dtype=torch.int64, device=cu_seqlens.device)
        return zero, zero.clone()
    i_n, i_t = indices[:, 0].long(), indices[:, 1].long()
    bounds = cu_seqlens.long()
    start = bounds[i_n] + i_t * chunk_size
    rows = (bounds[i_n + 1] - start).clamp(min=0, max=chunk_size)
    return start, rows
