"""The stages of ``chunk_kda`` and what decides their compilation: one list for the plan and for the compile gate.

The plan runs a stage on tensors, the gate compiles it on the types that ``types`` names for the same arguments, both
with ``constants``. So what is compiled is what is launched. Imports triton only with a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.wy_dqkg.specs import BITS, ZERO_BLOCK, Stage

NO_NORM, COMPUTE_NORM, READ_NORM = 0, 1, 2
GATES = {"pregated": 0, "softplus": 1, "lower_bound": 2}

ORDER = (
    "prepare", "intra", "scan", "scan_bwd", "values", "states", "grads", "betas", "heads", "gate_sums",
)  # fmt: skip
VECTOR = ("prepare", "betas", "heads", "gate_sums")
STAGES = {name: Stage(name, f"{__package__}.{name}", name, cube=name not in VECTOR) for name in ORDER}


@dataclass(frozen=True)
class Sizes:
    """All that decides which kernels a call compiles. main, g, beta: Triton's dtype names; index: that of cu_seqlens
    and chunk_indices ("i32" or "i64"), None for a call that is not packed; target: a key of the tile table."""

    target: str
    main: str
    g: str
    beta: str
    index: str | None
    H: int
    HV: int
    K: int
    V: int
    BT: int
    norm: bool
    gate: str
    bias: bool
    sigmoid: bool
    h0: bool
    ht: bool
    v_first: bool = False

    @property
    def packed(self) -> bool:
        return self.index is not None

    @property
    def gated(self) -> bool:
        return self.gate != "pregated"

    def tile(self, stage: str) -> tiling.Tile:
        return tiling.tile(self.target, BITS[self.main], self.K, self.V, self.BT, stage)

    @property
    def pair_type(self) -> str:
        """Operands of the pair products and of P and D. fp16 would lose a strong decay's factor to its subnormals: 4e-3
        of a pair at -10 per token; and P and D have the range of gradients."""
        return "bf16" if self.main == "bf16" else "fp32"

    @property
    def pair_precision(self) -> str:
        return "tf32" if self.target == "cuda" and self.main == "fp16" else "ieee"

    @property
    def gathers(self) -> bool:
        """Whether level factors come from g (pairs.level_factor): where tensor cores make fp32 products dear."""
        return self.target == "cuda" and self.main != "fp32"

    @property
    def sums_decays(self) -> bool:
        """Whether stage 6 takes a and sums it itself: exponents as exact as fp32 can have them."""
        return self.main == "fp32" and not self.gathers

    @property
    def near_levels(self) -> int:
        """Levels of pairs that are taken row by row instead of by products: the four of a run of 16 rows."""
        return 4 if self.gathers else 0

    @property
    def inverse_precision(self) -> str:
        """Of the inversion: fp32-grade on tensor cores where there are some."""
        return "tf32x3" if self.target == "cuda" and self.main != "fp32" else "ieee"

    @property
    def finishes_in_grads(self) -> bool:
        """Whether stage 6 writes dq and dk themselves: no group to sum over, and a norm only where K is one block."""
        return self.H == self.HV and (not self.norm or self.K <= self.tile("grads").BK)


def k_blocks(sizes: Sizes, stage: str) -> int:
    return -(-sizes.K // sizes.tile(stage).BK)


def pair_parts(sizes: Sizes) -> tuple[dict[str, bool], ...]:
    """Flags of the launches of stage 7: rows and columns at once, or one after the other where UB cannot hold both."""
    if sizes.target == "cuda":
        return ({"ROWS": True, "COLS": True},)
    return {"ROWS": True, "COLS": False}, {"ROWS": False, "COLS": True}


def constants(sizes: Sizes, stage: str, **flags: Any) -> dict[str, Any]:
    """Compile-time parameters of one stage; ``flags`` are those that differ between its launches."""
    z, tile = sizes, sizes.tile(stage)
    here = z.finishes_in_grads
    out = {
        "H": z.H, "HV": z.HV, "K": z.K, "V": z.V, "BT": z.BT, "BK": tile.BK, "BV": tile.BV, "BR": tile.BDA,
        "BS": tiling.power_of_two(z.K), "NS": k_blocks(z, "states"), "NK": k_blocks(z, "grads"),
        "LOW": z.near_levels, "LEVELS": z.BT.bit_length() - 1, "GATHER": z.gathers, "PACKED": z.packed,
        "V_FIRST": z.v_first,
        "KEEP_A": not z.gathers, "SUMS": z.sums_decays, "NORM": z.norm,
        "NORM_HERE": here and z.norm, "TOKEN_MAJOR": here,
        "GATE": GATES[z.gate], "BIAS": z.bias, "SIGMOID": z.sigmoid, "HAS_H0": z.h0, "HAS_HT": z.ht,
        "HAS_DHT": z.ht, "HAS_DH0": z.h0,
        "XT": _dtype(z.pair_type), "PREC": z.pair_precision, "INV": z.inverse_precision, **flags,
    }  # fmt: skip
    return STAGES[stage].pick(out)


def _dtype(name: str) -> Any:
    import triton.language as tl

    return {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[name]


def tail_widths(z: Sizes, names: tuple[str, ...]) -> dict[str, int]:
    """zero_tail's constants for these outputs, x0 the first."""
    widths = {
        "o": z.HV * z.V, "dq": z.H * z.K, "dk": z.H * z.K, "dv": z.HV * z.V, "dx": z.HV * z.K, "dbeta": z.HV,
    }  # fmt: skip
    padded = (*(widths[n] for n in names), *([0] * (6 - len(names))))
    return {"BLOCK": ZERO_BLOCK, **{f"W{i}": w for i, w in enumerate(padded)}}


FORWARD_OUTPUTS = ("o",)
BACKWARD_OUTPUTS = ("dq", "dk", "dv", "dx", "dbeta")


def types(sizes: Sizes) -> dict[str, str | None]:
    """Triton's type of every run-time argument of all stages by name; None for an absent tensor."""
    z = sizes
    main = ("q", "k", "v", "do", "o", "dv", "dq", "dk", "A", "Aqk", "qg", "kg", "kr", "h", "dh", "v_new", "Y")
    wide = ("a", "da", "db_k", "db_p", "first", "decay", "b", "rq", "rk", "db_v", "dq_hv", "dk_hv", "log_k")
    out: dict[str, str | None] = dict.fromkeys(main, f"*{z.main}")
    out |= dict.fromkeys(wide, "*fp32")
    out |= {"x": f"*{z.g}", "dx": f"*{z.g}", "beta": f"*{z.beta}", "dbeta": f"*{z.beta}", "g": "*fp32"}
    out |= dict.fromkeys(("P", "D"), f"*{z.pair_type}")
    out |= dict.fromkeys(("rates", "sum_log"), "*fp32" if z.gated else None)
    out |= dict.fromkeys(("dt_bias", "ddt_bias", "sum_bias"), "*fp32" if z.bias else None)
    out |= dict.fromkeys(("h0", "dh0"), "*fp32" if z.h0 else None)
    out |= dict.fromkeys(("ht", "dht"), "*fp32" if z.ht else None)
    out |= dict.fromkeys(("cu_seqlens", "chunk_indices"), f"*{z.index}" if z.index else None)
    out |= dict.fromkeys(("T", "N", "NT", "R", "n_chunks", "n_seqs"), "i32")
    out |= dict.fromkeys(("scale", "bound", "beta_scale"), "fp32")
    return out
