"""The cost report: every kernel of an op compiled, counted, and set against the chip's published rates."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_kda.npu_kernels.ascend_check import hivm
from mindspeed_kda.npu_kernels.ascend_check.cost import Cost, count
from mindspeed_kda.npu_kernels.ascend_check.spec import Config, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

HEADER = (
    "stage", "launches", "tensors KiB", "workspace KiB", "MMAC", "vector Kelem", "core waits", "pipe waits",
    "memory ns", "cube ns", "vector ns", "binds",
)  # fmt: skip
TOTAL = "total"
NOTE = (
    "Per (chunk, value head): counts of the compiled code, full chunks. Times at the published rates of the whole chip "
    "(docs/ascend.md): no run can be faster; how much slower it is, these counts do not say."
)


@dataclass(frozen=True)
class Counted:
    """One stage's cost per (chunk, value head)."""

    stage: str
    cost: Cost


def cost_config(dtype: str) -> Config:
    """The configuration that is counted: K = V = 128, chunks of 64, one sequence, states in the main dtype."""
    return Config(dtype, K=128, V=128, BT=64, packed=False, state_dtype=dtype, state_v_first=False)


def measure(specs: Sequence[KernelSpec], target: Target, jobs: int = 1) -> list[Counted]:
    """Compiles and counts each spec; launches of one stage are added up.

    Raises RuntimeError for a kernel that does not compile, ExecutionError for one that cannot be counted."""
    found = []
    with tempfile.TemporaryDirectory(prefix="ascend_cost_") as name:
        tasks = [Task(spec, target, Path(name) / str(i)) for i, spec in enumerate(specs)]
        reports = dict(run_all(tasks, jobs))
        for i, spec in enumerate(specs):
            if reports[i].stopped_in is not None:
                raise RuntimeError(f"{spec.stage} does not compile for {target.name}: {reports[i].error}")
            found.append(counted_in(Path(name) / str(i), spec))
    return by_stage(found)


def counted_in(folder: Path, spec: KernelSpec) -> Counted:
    """The cost of the kernel whose compilation was kept in that folder."""
    text = (folder / "temps" / "module.hivm.opt.mlir").read_text(encoding="utf-8")
    cost = count(hivm.parse_module(text), dict(spec.signature), dict(spec.scalars), spec.blocks)
    return Counted(spec.stage, cost.scaled(spec.per))


def by_stage(found: Sequence[Counted]) -> list[Counted]:
    """Launches of one stage added up, stages in order of their first launch."""
    sums: dict[str, Cost] = {}
    for one in found:
        sums[one.stage] = sums[one.stage].plus(one.cost) if one.stage in sums else one.cost
    return [Counted(stage, cost) for stage, cost in sums.items()]


def total(counted: Sequence[Counted]) -> Counted:
    """The sum over stages."""
    cost = replace(Cost(), launches=0)
    for one in counted:
        cost = cost.plus(one.cost)
    return Counted(TOTAL, cost)


def op_bound(counted: Sequence[Counted], target: Target) -> float:
    """Seconds per (chunk, value head) that the op takes at least: stages run one after another, so their bounds add."""
    return sum(one.cost.bound(target)[1] for one in counted)


def rows(counted: Sequence[Counted], target: Target) -> list[list[str]]:
    """Cells in the order of ``HEADER``: a line per stage, then the total."""
    return [_cells(one, target) for one in (*counted, total(counted))]


def _cells(one: Counted, target: Target) -> list[str]:
    cost = one.cost
    times = cost.times(target)
    return [
        one.stage, f"{cost.launches:.0f}", f"{cost.tensor_bytes / 1024:.1f}", f"{cost.workspace / 1024:.1f}",
        f"{sum(cost.macs.values()) / 1e6:.3f}", f"{sum(cost.vector.values()) / 1e3:.1f}",
        f"{cost.waits['cores']:.1f}", f"{cost.waits['pipes']:.1f}",
        *(f"{times[pipe] * 1e9:.2f}" for pipe in ("memory", "cube", "vector")), cost.bound(target)[0],
    ]  # fmt: skip


def as_json(counted: Sequence[Counted], target: Target) -> dict[str, Any]:
    """Every count of every stage, and the bounds."""
    stages = [
        {
            "stage": one.stage,
            "launches": one.cost.launches,
            "read": dict(one.cost.read),
            "written": dict(one.cost.written),
            "workspace": one.cost.workspace,
            "macs": dict(one.cost.macs),
            "vector": dict(one.cost.vector),
            "vector_bytes": one.cost.vector_bytes,
            "waits": dict(one.cost.waits),
            "seconds": one.cost.times(target),
            "binds": one.cost.bound(target)[0],
        }
        for one in (*counted, total(counted))
    ]
    return {"target": target.name, "bound_seconds": op_bound(counted, target), "stages": stages}
