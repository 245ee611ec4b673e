"""The stages, their order, and what decides their compilation: one list for the plan and for the compile gate.

The plan launches ``stages(sizes)`` on tensors; the gate compiles the same list on the types that ``types(sizes)`` names
for the same arguments (``gate``). So what is compiled is what is launched. Imports triton only with a kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from mindspeed_kda import config
from mindspeed_kda.npu_kernels import tiling

BITS = {"fp16": 16, "bf16": 16, "fp32": 32}
_HERE = __package__


@dataclass(frozen=True)
class Sizes:
    """All that decides which kernels a call compiles. main, state: Triton's dtype names; index: dtype of cu_seqlens and
    chunk_indices ("i32" or "i64"), None for a call that is not packed; target: a key of the tile table."""

    target: str
    main: str
    state: str
    index: str | None
    H: int
    HV: int
    K: int
    V: int
    BT: int
    v_first: bool = False

    @property
    def packed(self) -> bool:
        return self.index is not None

    def tile(self, stage: str) -> tiling.Tile:
        """Tile of the stage of that name."""
        return tiling.tile(self.target, BITS[self.main], self.K, self.V, self.BT, stage)

    @property
    def precision(self) -> str:
        """Of the products: float32's own, which 16-bit operands have anyway, but on tensor cores where they can."""
        return float32_products() if self.target == "cuda" and self.main == "fp32" else "ieee"

    @property
    def label(self) -> str:
        """Short and unique, for tables."""
        parts = [self.main, f"h={self.state}{'-vfirst' if self.v_first else ''}", f"K{self.K}", f"V{self.V}"]
        return " ".join([*parts, f"BT{self.BT}", f"packed-{self.index}" if self.index else "dense"])


@functools.cache
def float32_products() -> str:
    """How Triton for NVIDIA is to multiply float32: six products of bf16 parts, which miss float32's rounding by
    little, or with a Triton that lacks them (before 3.5) three of TF32 parts, 21 bits: the tiles spill without tensor
    cores. The interpreter knows no bf16 parts, whatever the device, and multiplies in float32 itself."""
    if config.TRITON_INTERPRET.flag():
        return "ieee"
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:  # triton-ascend, which compiles nothing for NVIDIA
        return "ieee"
    known = CUDAOptions.allowed_dot_input_precisions
    return next(name for name in ("bf16x6", "tf32x3", "ieee") if name in known)


@dataclass(frozen=True)
class Stage:
    """One stage: where its kernel stands, its tasks for one chunk and value head, and whether it holds a product."""

    name: str
    module: str
    kernel_name: str
    tasks: int = 1
    cube: bool = True

    @property
    def kernel(self) -> Any:
        return getattr(importlib.import_module(self.module), self.kernel_name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in order."""
        return _parameters(self.module, self.kernel_name)

    def pick(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of ``values`` that this kernel takes."""
        return {name: values[name] for name in self.arguments if name in values}


@functools.cache
def _parameters(module: str, kernel_name: str) -> tuple[str, ...]:
    kernel = getattr(importlib.import_module(module), kernel_name)
    return tuple(inspect.signature(kernel.fn).parameters)


def stages(sizes: Sizes) -> tuple[Stage, ...]:
    """The six stages in order. Stage n reads what earlier ones wrote: dw (1 to 3, 4), dk, dg (1 to 3), db_t (2 to 3),
    M (4 to 5), P (5 to 6)."""
    k_blocks = -(-sizes.K // sizes.tile("main").BK)
    right, left = ((sizes.BT // sizes.tile(name).BDA) ** 2 for name in ("dA_post_right", "dA_post_left"))
    return (
        Stage("main", f"{_HERE}.main", "chunk_kda_bwd_kernel_wy_dqkg_fused", k_blocks),
        Stage("dv2_db", f"{_HERE}.dv2_db", "chunk_kda_bwd_kernel_wy_dv2_db"),
        Stage("dk_dg_db", f"{_HERE}.dk_dg_db", "chunk_kda_bwd_kernel_wy_dk_dg_db"),
        Stage("dA_pre", f"{_HERE}.dA_pre", "chunk_kda_bwd_kernel_wy_dA_pre"),
        Stage("dA_post_right", f"{_HERE}.dA_post_right", "chunk_kda_bwd_kernel_dA_post_right", right),
        Stage("dA_post_left", f"{_HERE}.dA_post_left", "chunk_kda_bwd_kernel_dA_post_left", left),
    )


ZERO_TAIL = Stage("zero_tail", "mindspeed_kda.npu_kernels.zero_tail", "zero_tail", cube=False)
"""After the stages of a packed call; its tasks are blocks of the outputs, x0 to x5 in return order."""
ZERO_BLOCK = 1024
"""Elements that one task of zero_tail owns in each output."""


def constants(sizes: Sizes, stage: Stage) -> dict[str, int | bool | str]:
    """Compile-time parameters of a stage by name (and some that only other stages take)."""
    tile = sizes.tile(stage.name)
    return {
        "H": sizes.H, "HV": sizes.HV, "K": sizes.K, "V": sizes.V, "BT": sizes.BT,
        "BK": tile.BK, "BV": tile.BV, "BDA": tile.BDA, "V_FIRST": sizes.v_first, "PACKED": sizes.packed,
        "PREC": sizes.precision, "BLOCK": ZERO_BLOCK, "W0": sizes.HV * sizes.K, "W1": sizes.HV * sizes.K,
        "W2": sizes.HV * sizes.V, "W3": sizes.HV, "W4": sizes.HV * sizes.K, "W5": sizes.HV * sizes.BT,
    }  # fmt: skip


def types(sizes: Sizes) -> dict[str, str | None]:
    """Triton's type of every run-time argument of all stages by name; None for an absent tensor."""
    main = ("q", "k", "v", "v_new", "do", "dv", "A", "dv_out", "dw", "M", "P", "x2")
    wide = ("g", "dq", "dk", "dg", "dA", "beta_t", "db_t", "x0", "x1", "x3", "x4", "x5")
    out: dict[str, str | None] = dict.fromkeys(main, f"*{sizes.main}")
    out |= dict.fromkeys(wide, "*fp32")
    out |= dict.fromkeys(("h", "dh"), f"*{sizes.state}")
    out |= dict.fromkeys(("cu_seqlens", "chunk_indices"), f"*{sizes.index}" if sizes.index else None)
    out |= dict.fromkeys(("T", "N", "NT", "R", "n_chunks"), "i32")
    out["scale"] = "fp32"
    return out
