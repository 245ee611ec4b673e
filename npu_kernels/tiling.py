"""The only table of tile sizes, by target, main dtype and head size. Pure Python: no triton, no torch.

Change a tile here and nowhere else: launch, workspace, compile gate and tests read this table. The first row whose
``target``, ``bits`` and ``max_head`` fit a call is used.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("npu", "cuda", "cpu")
MIN_DOT = 16
"""Smallest side of a matrix product on every target."""


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one call. BK, BV: columns of K and V that a program holds; BDA: side of a dA tile (BM = BN = BDA)
    and of the blocks it sums over; the rest steers stock Triton and stays unused on an NPU."""

    BK: int
    BV: int
    BDA: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Row:
    """One row: which calls it serves, the sizes, and why these.

    bits: width of the main dtype, None for any; max_head: largest max(K, V) served, None for any.
    """

    target: str
    bits: int | None
    max_head: int | None
    BK: int
    BV: int
    BDA: int
    reason: str
    num_warps: int = 4
    num_stages: int = 2

    def serves(self, target: str, bits: int, head: int) -> bool:
        return self.target == target and self.bits in (None, bits) and (self.max_head is None or head <= self.max_head)


TABLE = (
    Row("npu", 16, None, 64, 64, 32, "the op page's default"),
    Row("npu", 32, None, 64, 64, 32, "the op page's default"),
    Row("cuda", 16, None, 64, 64, 32, "as on the NPU"),
    Row("cuda", 32, None, 32, 32, 32, "64 x 64 fp32 products on CUDA cores spill registers"),
    Row("cpu", None, None, 64, 64, 32, "the interpreter proves the NPU's rows"),
)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n and at least MIN_DOT."""
    p = MIN_DOT
    while p < n:
        p *= 2
    return p


def tile(target: str, bits: int, K: int, V: int, BT: int) -> Tile:
    """Tile of a call; sizes shrink to the head size and to BT where those are smaller. ValueError: no row serves it."""
    for row in TABLE:
        if row.serves(target, bits, max(K, V)):
            return Tile(
                BK=min(row.BK, power_of_two(K)),
                BV=min(row.BV, power_of_two(V)),
                BDA=min(row.BDA, BT),
                num_warps=row.num_warps,
                num_stages=row.num_stages,
            )
    raise ValueError(f"tile: expected a row of the table for target {target!r}, {bits} bits, K={K}, V={V}, found none")
