"""Zeroes the rows of packed outputs that belong to no sequence.

Formula: x[t] = 0 for cu_seqlens[-1] <= t < T, for up to six tensors x of W elements a row (W = 0: no tensor).

Grid: persistent, 1-D, vector cores only. Task (block of BLOCK elements): a program owns that block of each tensor's
tail. The length of the tail is read on the device, so that nothing waits for it.
Tile: BLOCK elements. Bytes: 8 read, the tail's bytes written; a few scalar instructions where there is no tail.
Must hold: every tensor contiguous [T, W].
"""

import triton
import triton.language as tl


@triton.jit
def _zero_rows(x, begin, T, W: tl.constexpr, BLOCK: tl.constexpr):
    n = (T - begin) * W
    o = tl.arange(0, BLOCK)
    b_zero = tl.zeros([BLOCK], dtype=x.dtype.element_ty)
    for i_b in range(tl.program_id(0), tl.cast(tl.cdiv(n, BLOCK), tl.int32), tl.num_programs(0)):
        at = tl.cast(i_b, tl.int64) * BLOCK
        left = tl.cast(tl.minimum(n - at, BLOCK), tl.int32)
        tl.store(x + begin * W + at + o, b_zero, mask=o < left)


@triton.jit(do_not_specialize=["N", "T"])
def zero_tail(
    x0, x1, x2, x3, x4, x5, cu_seqlens, N, T, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, W4: tl.constexpr, W5: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.cast(tl.load(cu_seqlens + N), tl.int64)
    if W0 > 0:
        _zero_rows(x0, begin, T, W0, BLOCK)
    if W1 > 0:
        _zero_rows(x1, begin, T, W1, BLOCK)
    if W2 > 0:
        _zero_rows(x2, begin, T, W2, BLOCK)
    if W3 > 0:
        _zero_rows(x3, begin, T, W3, BLOCK)
    if W4 > 0:
        _zero_rows(x4, begin, T, W4, BLOCK)
    if W5 > 0:
        _zero_rows(x5, begin, T, W5, BLOCK)
