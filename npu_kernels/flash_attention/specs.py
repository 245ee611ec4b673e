"""The kernels of ``flash_attention`` and what decides their compilation, for the plan and for the compile gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.wy_dqkg.specs import BITS, Stage

_HERE = __package__
STAGES = {
    stage.name: stage
    for stage in (
        Stage("attention", f"{_HERE}.forward", "flash_attention_fwd_kernel"),
        Stage("attention_preprocess", f"{_HERE}.backward", "flash_attention_bwd_kernel_preprocess", cube=False),
        Stage("attention_dkdv", f"{_HERE}.backward", "flash_attention_bwd_kernel_dkdv"),
        Stage("attention_dq", f"{_HERE}.backward", "flash_attention_bwd_kernel_dq"),
    )
}
ATOMIC = "attention_dkdv_atomic"
"""The tiles of attention_dkdv where it adds dq too."""


@dataclass(frozen=True)
class Sizes:
    """All that decides which kernels a call compiles. main: Triton's dtype name; index: dtype of cu_seqlens ("i32" or
    "i64"), None for a call that is not packed; left, right, cap: whether there is such a bound or cap; target: a key of
    the tile table."""

    target: str
    main: str
    index: str | None
    H: int
    HK: int
    D: int
    DV: int
    left: bool
    right: bool
    cap: bool

    @property
    def parts(self) -> int:
        """Of the sum over the head in a score, added apart: without tensor cores one running sum over 192 numbers costs
        a float32 score as much as all else. (On an NPU the product unit sums as it sees fit.)"""
        apart = self.main == "fp32" and self.target != "npu" and tiling.power_of_two(self.D) >= 4 * tiling.MIN_DOT
        return 4 if apart else 1

    def tile(self, stage: str) -> tiling.AttentionTile:
        mask = tiling.WINDOW if self.left else tiling.CAUSAL if self.right else tiling.FULL
        return tiling.attention_tile(self.target, BITS[self.main], self.D, self.DV, stage, mask)


def constants(sizes: Sizes, stage: str, atomic: bool = False) -> dict[str, Any]:
    """Compile-time parameters of a stage by name (and some that only other stages take)."""
    z, tile = sizes, sizes.tile(ATOMIC if atomic else stage)
    return {
        "H": z.H, "HK": z.HK, "D": z.D, "DV": z.DV, "HAS_LEFT": z.left, "HAS_RIGHT": z.right, "CAP": z.cap,
        "ATOMIC": atomic, "PACKED": z.index is not None, "RELOAD": z.target != "cuda", "PARTS": z.parts,
        "BM": tile.BM, "BN": tile.BN,
        "BD": tiling.power_of_two(z.D), "BDV": tiling.power_of_two(z.DV),
    }  # fmt: skip


def types(sizes: Sizes, stage: str) -> dict[str, str | None]:
    """Triton's type of every run-time argument of a stage by name; None for an absent tensor."""
    out: dict[str, str | None] = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), f"*{sizes.main}")
    out |= dict.fromkeys(("lse", "r"), "*fp32")
    out |= dict.fromkeys(("cu_q", "cu_k", "blocks"), f"*{sizes.index}" if sizes.index else None)
    out |= dict.fromkeys(("TQ", "TK", "MB", "NB", "n_tasks", "left", "right"), "i32")
    out |= dict.fromkeys(("scale", "factor", "cap", "inner"), "fp32")
    if stage == "attention_dkdv":
        out["dq"] = None  # ATOMIC is for GPUs alone
    return out
