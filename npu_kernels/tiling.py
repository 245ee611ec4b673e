"""The only table of tile sizes, by target, main dtype, head size and stage. Pure Python: no triton, no torch.

Change a tile here and nowhere else: launch, workspace, compile gate and tests read this table. The first row that
serves a call and a stage is used. UB by ``ascend-check``, microseconds by ``benchmarks/wy_tiles.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

TARGETS = ("npu", "cuda", "cpu")
MIN_DOT = 16
"""Smallest side of a matrix product on every target."""


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one stage of one call. BK, BV: columns of K and V that a program holds; BDA: side of a dA tile
    (BM = BN = BDA) and of the blocks it sums over, or the rows of a block (BR) in a stage that walks rows;
    the rest steers stock Triton and stays unused on an NPU."""

    BK: int
    BV: int
    BDA: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Row:
    """One row: which calls it serves, the sizes, and why these.

    bits: width of the main dtype, None for any; max_head: largest max(K, V) served, None for any; stages: names of the
    stages served, empty for all.
    """

    target: str
    bits: int | None
    max_head: int | None
    stages: tuple[str, ...]
    BK: int
    BV: int
    BDA: int
    reason: str
    num_warps: int = 4
    num_stages: int = 2

    def serves(self, target: str, bits: int, head: int, stage: str) -> bool:
        return (
            self.target == target
            and self.bits in (None, bits)
            and (self.max_head is None or head <= self.max_head)
            and (not self.stages or stage in self.stages)
        )


PAIRS = ("states", "grads")
SCANS = ("scan", "scan_bwd")
STEPS = ("fused_recurrent",)
# The first rows are the stages of chunk_kda; a stage that no row names takes the op's.
TABLE = (
    Row("npu", None, None, ("intra",), 32, 64, 64, "183 KiB of UB; at 64 its sums over levels overflow"),
    Row("npu", None, None, PAIRS, 16, 64, 64, "191 KiB of UB; at 32 the compiler gives up multi-buffering"),
    Row("npu", None, 128, SCANS, 64, 64, 64, "147 KiB of UB"),
    Row("npu", None, None, SCANS, 64, 32, 64, "a state of 256 x 64 overflows UB (265 KiB)"),
    Row("npu", None, None, STEPS, 64, 32, 64, "K whole: a state of 256 x 32 is 32 KiB of UB"),
    Row("npu", None, None, ("heads",), 64, 64, 16, "K whole: 64 rows of 256 overflow UB (320 KiB)"),
    Row("cuda", None, None, STEPS, 64, 16, 64, "not measured: 256 x 16 is 32 registers a thread"),
    Row("cuda", 16, 128, ("scan",), 64, 32, 64, "H200, bf16, T8192 H32 128: 682 us; BV 64: 741, 16: 907"),
    Row("cuda", 16, 128, ("scan_bwd",), 64, 32, 64, "same: 372 us; BV 64: 395, 16: 677, 8 warps: 415"),
    Row("cuda", 16, None, SCANS, 64, 32, 64, "two stages of a K of 256 exceed shared memory", num_stages=1),
    Row("cuda", 16, None, ("prepare",), 64, 64, 64, "same: 670 us; 4 warps: 703, BK 128: 762", num_warps=8),
    Row("cuda", 16, None, ("intra",), 64, 64, 64, "same: 776 us; BK 32: 847, 128: 1888, 8 warps: 1372"),
    Row("cuda", 16, None, ("states",), 64, 64, 64, "same: 546 us; 2 stages: 640, BK 128: 716", num_stages=3),
    Row("cuda", 16, None, ("grads",), 64, 64, 64, "same: 1920 us; 1 stage: 2311; all levels by products: 2367", 8, 2),
    Row("cuda", None, None, ("heads",), 64, 64, 16, "same: 144 us, near the copy speed"),
    Row("cuda", 32, None, ("intra", *SCANS, *PAIRS), 32, 32, 64, "fp32 products of 64 x 64 spill registers", 8, 1),
    Row("cuda", 32, None, ("prepare", "values", "betas", "gate_sums"), 32, 32, 64, "not measured; as the line above"),
    Row("cpu", None, None, STEPS, 64, 32, 64, "the interpreter proves the NPU's rows"),
    Row("cpu", None, None, PAIRS, 16, 64, 64, "the interpreter proves the NPU's rows"),
    Row("npu", 16, None, (), 64, 64, 32, "the op page's default; main needs up to 190 of 192 KiB of UB"),
    Row("npu", 32, None, (), 64, 64, 32, "fits as it is: main needs up to 170 KiB of UB"),
    Row("cuda", 16, None, (), 64, 64, 64, "H200, fp16, T2048 H32 128: 305 us; BDA 32: 331, BK 32: 420, 8 warps: 428"),
    Row("cuda", 32, None, (), 64, 64, 64, "H200, as above: 503 us; BV 32: 561, BK 32: 694, BDA 32: 623, 8 warps: 848"),
    Row("cpu", None, None, (), 64, 64, 32, "the interpreter proves the NPU's rows"),
)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n and at least MIN_DOT."""
    p = MIN_DOT
    while p < n:
        p *= 2
    return p


@functools.cache
def tile(target: str, bits: int, K: int, V: int, BT: int, stage: str) -> Tile:
    """Tile of a stage; sizes shrink to the head size and to BT where those are smaller. ValueError: no row fits."""
    for row in TABLE:
        if row.serves(target, bits, max(K, V), stage):
            return Tile(
                BK=min(row.BK, power_of_two(K)),
                BV=min(row.BV, power_of_two(V)),
                BDA=min(row.BDA, BT),
                num_warps=row.num_warps,
                num_stages=row.num_stages,
            )
    raise ValueError(
        f"tile: expected a row of the table for target {target!r}, {bits} bits, K={K}, V={V}, stage {stage!r}, got none"
    )


@dataclass(frozen=True)
class AttentionTile:
    """Query rows and keys of a block of ``flash_attention``; the rest as in ``Tile``."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionRow:
    """As ``Row``: which calls it serves, the sizes, and why these. max_head: largest max(D, DV) served, None for any;
    stages: empty for all; masks: which of MASKS, empty for all."""

    target: str
    bits: int | None
    max_head: int | None
    stages: tuple[str, ...]
    masks: tuple[str, ...]
    BM: int
    BN: int
    num_warps: int
    num_stages: int
    reason: str

    def serves(self, target: str, bits: int, head: int, stage: str, mask: str) -> bool:
        return (
            self.target == target
            and self.bits in (None, bits)
            and (self.max_head is None or head <= self.max_head)
            and (not self.stages or stage in self.stages)
            and (not self.masks or mask in self.masks)
        )


FULL, CAUSAL, WINDOW = "full", "causal", "window"
MASKS = (FULL, CAUSAL, WINDOW)
"""Calls without a bound, with none to the left, and the rest."""
FWD, DKDV, DQ = "attention", "attention_dkdv", "attention_dq"
# Causal / without a mask in ms, H200, bf16, B2 H16 T8192 (benchmarks/attention_tiles.py,
# benchmarks/results/attention_tiles_h200.json); windows: causal with 1024 keys, ms (attention_window_tiles_h200.json).
ATTENTION = (
    AttentionRow("cuda", 16, 64, (FWD,), (CAUSAL, WINDOW), 64, 64, 4, 3, "0.80 / 1.62"),
    AttentionRow("cuda", 16, 64, (FWD,), (FULL,), 128, 64, 8, 3, "0.99 / 1.34"),
    AttentionRow("cuda", 16, 64, (DKDV,), (), 128, 64, 4, 2, "1.29 / 2.73; 64 x 64 4 warps 3 stages: 1.76 / 3.08"),
    AttentionRow("cuda", 16, 64, (DQ,), (WINDOW,), 64, 128, 4, 2, "1024 keys: 0.26; 64 x 64, 3 stages: 0.30"),
    AttentionRow("cuda", 16, 64, (DQ,), (CAUSAL,), 64, 64, 4, 3, "0.82 / 1.54"),
    AttentionRow("cuda", 16, 64, (DQ,), (FULL,), 128, 64, 8, 3, "1.07 / 1.43"),
    AttentionRow("cuda", 16, 128, (FWD,), (), 128, 64, 8, 3, "1.51 / 2.42; 128 x 128, 2 stages: 1.48 / 2.45"),
    AttentionRow("cuda", 16, 128, (DKDV,), (), 64, 128, 8, 3, "2.64 / 4.90; 32 x 128, 4 stages: 3.28 / 6.29"),
    AttentionRow("cuda", 16, 128, (f"{DKDV}_atomic",), (), 64, 128, 8, 3, "with dq: 4.35 / 8.63"),
    AttentionRow("cuda", 16, 128, (DQ,), (WINDOW,), 64, 64, 4, 2, "1024 keys: 0.41; 128 x 64, 8 warps, 3 stages: 0.56"),
    AttentionRow("cuda", 16, 128, (DQ,), (), 128, 64, 8, 3, "1.77 / 2.58; 128 x 128, 2 stages: 1.71 / 2.88"),
    AttentionRow("cuda", 16, None, (FWD,), (), 128, 64, 8, 2, "D 256: 2.83 / 4.46; 1 stage: 3.05 / 6.19"),
    AttentionRow("cuda", 16, None, (DKDV,), (), 64, 32, 4, 1, "D 256: 10.6 / 21.2; 32 x 64, 8 warps: 9.4 / 29.3"),
    AttentionRow("cuda", 16, None, (DQ,), (), 128, 32, 8, 2, "D 256: 4.79 / 7.70; 64 x 64: 7.89 / 12.3"),
    AttentionRow("cuda", 32, 128, (), (), 32, 32, 8, 1, "not measured; with 4 warps dk and dv spill 1.8 KiB a thread"),
    AttentionRow("cuda", None, None, (), (), 16, 16, 4, 1, "not measured; heads over 128 in fp32"),
    AttentionRow("npu", 16, 128, (), (), 64, 64, 4, 2, "up to 222 of 248 KiB of UB, all 512 of L1 for dK and dV"),
    AttentionRow("npu", 16, None, (), (), 32, 32, 4, 2, "up to 512 KiB of L1 for dK and dV"),
    AttentionRow("npu", 32, 128, (), (), 32, 32, 4, 2, "up to 512 KiB of L1; at 64 x 64 dK, dV lose multi-buffering"),
    AttentionRow("npu", 32, None, (), (), 16, 16, 4, 2, "up to 512 KiB of L1; at 32 x 32 dK, dV lose multi-buffering"),
    AttentionRow("cpu", None, 128, (), (), 32, 64, 4, 2, "the interpreter: sides that differ"),
    AttentionRow("cpu", None, None, (), (), 32, 32, 4, 2, "the interpreter"),
)


PREPROCESS = AttentionTile(32, 32, 4, 1)
"""Of the row sums on every target: no product; 64 rows of 256 in fp32 overflow UB (256 KiB)."""


@functools.cache
def attention_tile(target: str, bits: int, D: int, DV: int, stage: str, mask: str) -> AttentionTile:
    """Tile of a stage of ``flash_attention``: the first row that serves it. ValueError: none does."""
    if stage == "attention_preprocess":
        return PREPROCESS
    for row in ATTENTION:
        if row.serves(target, bits, max(D, DV), stage, mask):
            return AttentionTile(row.BM, row.BN, row.num_warps, row.num_stages)
    raise ValueError(
        f"tile: expected a row of ATTENTION for target {target!r}, {bits} bits, D={D}, DV={DV}, stage {stage!r}, "
        "got none"
    )


def attention_adds_dq(target: str, bits: int, D: int, DV: int, left: bool, right: bool) -> bool:
    """Whether atomics into dq are faster than a pass of its own: 4.35 ms and 4.41 (H200, as above) for causal heads of
    128, and nowhere else: 8.63 and 7.48 without a mask, 2.43 and 2.12 for heads of 64."""
    return target == "cuda" and bits == 16 and 64 < max(D, DV) <= 128 and right and not left
