"""The attention kernels as the compile gate sees them: D and DV are the matrix's K and V; chunk size and state mean
nothing here, so that all of them are one compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_kda.contracts.flash_attention import OP
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, TRITON_TYPES, Config, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.flash_attention.specs import STAGES, Sizes, constants, types

H, HK = 8, 4
"""Heads of the compiled calls: grouped, so that the head mapping is in the code."""
INDEX = "i64"
"""Type of cu_seqlens in packed calls: the wider, and what torch makes by default."""


def sizes_of(config: Config) -> Sizes:
    """Causal with a window and a softcap: all the code there is."""
    main, index = TRITON_TYPES[config.dtype], INDEX if config.packed else None
    return Sizes("npu", main, index, H, HK, config.K, config.V, left=True, right=True, cap=True)


def specs(config: Config, target: Target) -> Iterator[KernelSpec]:
    """Every launch of forward and backward: with all flags, causal alone, and without a mask."""
    full = sizes_of(config)
    causal = replace(full, left=False, cap=False)
    for sizes, variant in ((full, ""), (causal, "causal"), (replace(causal, right=False), "full")):
        for stage in STAGES.values():
            runtime, fixed = types(sizes, stage.name), constants(sizes, stage.name)
            values = {n: fixed.get(n) for n in stage.arguments if n in fixed or runtime.get(n) is None}
            signature = {n: CONSTEXPR if n in values else str(runtime[n]) for n in stage.arguments}
            yield KernelSpec.of(OP, stage.name, f"{stage.module}:{stage.kernel_name}", signature, values, variant)
