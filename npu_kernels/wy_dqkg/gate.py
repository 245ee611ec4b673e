"""The stages as the compile gate sees them: argument types in place of the plan's tensors, all else shared with it."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_kda.contracts.wy_dqkg import OP
from mindspeed_kda.npu_kernels.ascend_check.spec import (
    CONSTEXPR,
    COST_CHUNKS,
    TRITON_TYPES,
    Config,
    KernelSpec,
)
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.wy_dqkg.specs import ZERO_TAIL, Sizes, constants, stages, types

H, HV = 4, 8
"""Heads of the compiled calls: grouped, so that the head mapping is in the code."""
INDEX = "i64"
"""Type of cu_seqlens and chunk_indices in packed calls: the wider, and what torch makes by default."""


def sizes_of(config: Config) -> Sizes:
    return Sizes(
        target="npu",
        main=TRITON_TYPES[config.dtype],
        state=TRITON_TYPES[config.state_dtype],
        index=INDEX if config.packed else None,
        H=H,
        HV=HV,
        K=config.K,
        V=config.V,
        BT=config.BT,
        v_first=config.state_v_first,
    )


def specs(config: Config, target: Target) -> Iterator[KernelSpec]:
    """Every kernel that ``plan.run`` launches for this configuration, in order. One tile table serves all targets."""
    sizes = sizes_of(config)
    runtime = types(sizes)
    rows = COST_CHUNKS * sizes.BT
    launch = {"T": rows, "NT": COST_CHUNKS, "R": rows, "n_chunks": COST_CHUNKS, "N": 1}
    absent = {name: None for name, kind in runtime.items() if kind is None}
    for stage in (*stages(sizes), *((ZERO_TAIL,) if sizes.packed else ())):
        values = stage.pick(constants(sizes, stage) | absent)
        signature = {name: CONSTEXPR if name in values else runtime[name] for name in stage.arguments}
        reference = f"{stage.module}:{stage.kernel_name}"
        yield KernelSpec.of(OP, stage.name, reference, signature, values, scalars=launch, per=COST_CHUNKS * HV)
