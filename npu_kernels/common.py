"""Jit helpers of two stages or more: chunk decode, tile loads and stores, products.

Rules that every helper keeps, and with them every kernel: plain pointers whose offsets are affine in ``tl.arange``;
prefix masks (``arange < n``), never a clamped element index, since a clamp makes the access discrete on Ascend; only
the scalar origin of a tile is clamped, so that no lane points outside its tensor, masked or not; a base offset is
widened with ``tl.cast(x, tl.int64)`` before it is multiplied.
"""

import triton
import triton.language as tl


@triton.jit
def decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT: tl.constexpr, PACKED: tl.constexpr):
    """First row (int64, over the B * T rows of all batches) and number of rows of chunk i_c of the B * NT chunks.

    A chunk past the end of its sequence has 0 rows, and its first row is moved back into the tensor.
    """
    if PACKED:
        i_n = tl.cast(tl.load(chunk_indices + 2 * i_c), tl.int64)
        i_t = tl.cast(tl.load(chunk_indices + 2 * i_c + 1), tl.int64)
        bos = tl.cast(tl.load(cu_seqlens + i_n), tl.int64)
        eos = tl.cast(tl.load(cu_seqlens + i_n + 1), tl.int64)
        row = bos + i_t * BT
        n_rows = tl.cast(tl.minimum(tl.maximum(eos - row, 0), BT), tl.int32)
        row = tl.minimum(row, tl.cast(T, tl.int64) - 1)
    else:
        i_b = i_c // NT
        i_t = i_c - i_b * NT
        row = tl.cast(i_b, tl.int64) * T + i_t * BT
        n_rows = tl.minimum(T - i_t * BT, BT)
    return row, n_rows


@triton.jit
def load_tile(p, stride: tl.constexpr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] tile with its first element at p; rows from n_rows and columns from n_cols on read as 0."""
    o_r = tl.arange(0, ROWS)
    o_c = tl.arange(0, COLS)
    m = (o_r < n_rows)[:, None] & (o_c < n_cols)[None, :]
    return tl.load(p + o_r[:, None] * stride + o_c[None, :], mask=m, other=0.0)


@triton.jit
def store_tile(p, b_x, stride: tl.constexpr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Stores the first n_rows x n_cols of b_x, [ROWS, COLS], in the tensor's type, with the first element at p."""
    o_r = tl.arange(0, ROWS)
    o_c = tl.arange(0, COLS)
    m = (o_r < n_rows)[:, None] & (o_c < n_cols)[None, :]
    tl.store(p + o_r[:, None] * stride + o_c[None, :], b_x.to(p.dtype.element_ty), mask=m)


@triton.jit
def load_row(p, n, SIZE: tl.constexpr):
    """[SIZE] contiguous elements from p; those from n on read as 0."""
    o = tl.arange(0, SIZE)
    return tl.load(p + o, mask=o < n, other=0.0)


@triton.jit
def store_row(p, b_x, n, SIZE: tl.constexpr):
    """Stores the first n of [SIZE] contiguous elements, in the tensor's type."""
    o = tl.arange(0, SIZE)
    tl.store(p + o, b_x.to(p.dtype.element_ty), mask=o < n)


@triton.jit
def load_state_t(p, n_k, n_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 V_FIRST: tl.constexpr):  # fmt: skip
    """[BV, BK] tile of a state: row-major for [V, K] storage, turned on chip for [K, V] storage."""
    if V_FIRST:
        b_h = load_tile(p, K, n_v, n_k, BV, BK)
    else:
        b_h = tl.trans(load_tile(p, V, n_k, n_v, BK, BV))
    return b_h


@triton.jit
def state_offset(i_k, i_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offset of element (i_k, i_v) inside one [K, V] (or [V, K]) state."""
    if V_FIRST:
        offset = i_v * K + i_k
    else:
        offset = i_k * V + i_v
    return offset


@triton.jit
def state_slot(i_c, row, chunk_indices, BT: tl.constexpr, PACKED: tl.constexpr):
    """Where chunk i_c with first row ``row`` keeps its state, int64.

    Packed: row // BT + sequence, which no two chunks share and which a sequence's walk knows without a table; there are
    T // BT + N slots. Meaningless, and not to be used, for a chunk of no row.
    """
    if PACKED:
        slot = row // BT + tl.cast(tl.load(chunk_indices + 2 * i_c), tl.int64)
    else:
        slot = tl.cast(i_c, tl.int64)
    return slot


@triton.jit
def decode_sequence(i_n, cu_seqlens, T, NT, BT: tl.constexpr, PACKED: tl.constexpr):
    """First row (int64), number of tokens and first state slot of sequence i_n."""
    if PACKED:
        begin = tl.cast(tl.load(cu_seqlens + i_n), tl.int64)
        n_tokens = tl.cast(tl.cast(tl.load(cu_seqlens + i_n + 1), tl.int64) - begin, tl.int32)
        slot = begin // BT + i_n
    else:
        begin = tl.cast(i_n, tl.int64) * T
        n_tokens = T
        slot = tl.cast(i_n, tl.int64) * NT
    return begin, n_tokens, slot


@triton.jit
def load_state(p, n_k, n_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               V_FIRST: tl.constexpr):  # fmt: skip
    """[BK, BV] tile of a state: row-major for [K, V] storage, turned on chip for [V, K] storage."""
    if V_FIRST:
        b_h = tl.trans(load_tile(p, K, n_v, n_k, BV, BK))
    else:
        b_h = load_tile(p, V, n_k, n_v, BK, BV)
    return b_h


@triton.jit
def store_state(p, b_h, n_k, n_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                V_FIRST: tl.constexpr):  # fmt: skip
    """Stores [BK, BV] into a state in either layout."""
    if V_FIRST:
        store_tile(p, tl.trans(b_h), K, n_v, n_k, BV, BK)
    else:
        store_tile(p, b_h, V, n_k, n_v, BK, BV)
