"""Packed sequences to chunks, against a plain loop over sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_kda import chunks
from mindspeed_kda.testing.inputs import cu_seqlens_of

LENGTHS = st.lists(st.integers(0, 200), max_size=12)
BT = st.sampled_from([16, 32, 64])
DTYPE = st.sampled_from([torch.int32, torch.int64])


def by_hand(lengths, chunk_size):
    """(sequence, chunk, first token, rows) of every chunk."""
    out, begin = [], 0
    for n, length in enumerate(lengths):
        for c in range(0, length, chunk_size):
            out.append((n, c // chunk_size, begin + c, min(chunk_size, length - c)))
        begin += length
    return out


@settings(deadline=None)
@example([], 16, torch.int32)
@example([0, 0, 0], 64, torch.int64)
@example([1, 0, 64, 65, 0], 64, torch.int32)
@given(LENGTHS, BT, DTYPE)
def test_indices_and_spans(lengths, chunk_size, dtype):
    cu = cu_seqlens_of(lengths, dtype=dtype)
    want = by_hand(lengths, chunk_size)
    NT = chunks.count_chunks(cu.tolist(), chunk_size)
    assert len(want) == NT
    indices = chunks.chunk_indices(cu, chunk_size, NT)
    assert indices.dtype == dtype
    assert indices.shape == (NT, 2)
    assert [tuple(r) for r in indices.tolist()] == [w[:2] for w in want]
    start, rows = chunks.chunk_spans(cu, indices, chunk_size)
    assert start.dtype == rows.dtype == torch.int64
    assert list(zip(start.tolist(), rows.tolist(), strict=True)) == [w[2:] for w in want]


@settings(deadline=None)
@given(LENGTHS, BT, DTYPE, st.integers(1, 9))
def test_surplus_chunks_hold_no_row_and_leave_the_others_alone(lengths, chunk_size, dtype, surplus):
    """NT may come from a tensor's shape, larger than the sequences need: the values are not read to find out."""
    cu = cu_seqlens_of(lengths, dtype=dtype)
    NT = chunks.count_chunks(cu.tolist(), chunk_size)
    indices = chunks.chunk_indices(cu, chunk_size, NT + surplus)
    assert torch.equal(indices[:NT], chunks.chunk_indices(cu, chunk_size, NT))
    start, rows = chunks.chunk_spans(cu, indices, chunk_size)
    assert rows[NT:].tolist() == [0] * surplus
    assert (start >= 0).all()


@settings(deadline=None)
@given(LENGTHS, BT, st.integers(0, 30))
def test_no_bounds_have_more_chunks_than_the_most(lengths, chunk_size, unused):
    bounds = cu_seqlens_of(lengths).tolist()
    assert chunks.count_chunks(bounds, chunk_size) <= chunks.max_chunks(bounds[-1] + unused, len(lengths), chunk_size)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 8), BT)
def test_the_most_is_reached(tokens, sequences, chunk_size):
    """All sequences but one hold a single token: one chunk each. Where there is no token or no sequence, none."""
    nonempty = min(tokens, sequences)
    most = chunks.max_chunks(tokens, sequences, chunk_size)
    if nonempty == 0:
        assert most == 0
        return
    lengths = [1] * (nonempty - 1) + [tokens - nonempty + 1]
    assert chunks.count_chunks(cu_seqlens_of(lengths).tolist(), chunk_size) == most


def test_offsets_beyond_int32_positions():
    """Bounds in int32, positions in int64: nothing here multiplies in 32 bits."""
    cu = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    start, rows = chunks.chunk_spans(cu, torch.tensor([[0, (2**31 - 1) // 64]], dtype=torch.int32), 64)
    assert start.tolist() == [(2**31 - 1) // 64 * 64]
    assert rows.tolist() == [63]


def test_lengths_near_int32s_end_do_not_overflow():
    cu = torch.tensor([0, 2**31 - 1, 2**31 - 1], dtype=torch.int32)
    assert chunks.chunk_indices(cu, 64, 3).tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize(("a", "b", "c"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_cdiv(a, b, c):
    assert chunks.cdiv(a, b) == c
