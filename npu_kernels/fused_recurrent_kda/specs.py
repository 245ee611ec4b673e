"""The stage of ``fused_recurrent_kda`` and what decides its compilation, for the plan and for the compile gate.

Sizes and argument types are those of ``chunk_kda``, whose names the kernel uses.
"""

from __future__ import annotations

from typing import Any

from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.chunk_kda.specs import GATES, Sizes
from mindspeed_kda.npu_kernels.wy_dqkg.specs import Stage

STAGE = Stage("fused_recurrent", f"{__package__}.fused_recurrent", "fused_recurrent", cube=False)


def constants(sizes: Sizes) -> dict[str, Any]:
    """Compile-time parameters of the stage by name."""
    z = sizes
    return {
        "H": z.H, "HV": z.HV, "K": z.K, "V": z.V, "BS": tiling.power_of_two(z.K), "BV": z.tile(STAGE.name).BV,
        "NORM": z.norm, "GATE": GATES[z.gate], "BIAS": z.bias, "SIGMOID": z.sigmoid, "HAS_H0": z.h0, "HAS_HT": z.ht,
        "V_FIRST": z.v_first, "PACKED": z.packed,
    }  # fmt: skip
