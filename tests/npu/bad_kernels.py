"""Kernels with one fault each, to show that a check bites."""

import triton
import triton.language as tl


@triton.jit
def reads_before_its_tensor(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o - 1, mask=o < BLOCK, other=0.0), mask=o < BLOCK)
