"""The stage as the compile gate sees it. A chunk size means nothing here, so that all of them are one compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND
from mindspeed_kda.contracts.fused_recurrent_kda import OP
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, Config, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.chunk_kda.gate import plain, raw
from mindspeed_kda.npu_kernels.chunk_kda.specs import Sizes, types
from mindspeed_kda.npu_kernels.fused_recurrent_kda.specs import STAGE, constants


def specs(config: Config, target: Target) -> Iterator[KernelSpec]:
    """All flags on, the other gate, and all flags off."""
    full = raw(config)
    yield _spec(full, "")
    yield _spec(replace(full, gate=LOWER_BOUND, bias=False), "lower bound")
    yield _spec(plain(config), "plain")


def _spec(sizes: Sizes, variant: str) -> KernelSpec:
    runtime, fixed = types(sizes), constants(sizes)
    values = {n: fixed.get(n) for n in STAGE.arguments if n in fixed or runtime.get(n) is None}
    signature = {n: CONSTEXPR if n in values else str(runtime[n]) for n in STAGE.arguments}
    return KernelSpec.of(OP, STAGE.name, f"{STAGE.module}:{STAGE.kernel_name}", signature, values, variant)
