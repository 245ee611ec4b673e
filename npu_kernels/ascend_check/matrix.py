"""The support matrix, who provides its kernels, and the walk over it: every distinct compilation once."""

from __future__ import annotations

import heapq
import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport
from mindspeed_kda.npu_kernels.ascend_check.rules import findings
from mindspeed_kda.npu_kernels.ascend_check.spec import Config, KernelSpec, Provider
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

PROVIDERS = tuple(
    f"mindspeed_kda.npu_kernels.{op}.gate:specs"
    for op in ("wy_dqkg", "chunk_kda", "fused_recurrent_kda", "flash_attention")
)
"""``module:function`` of every provider; a new op adds its own here."""

DTYPES = ("float16", "bfloat16", "float32")
HEADS = (*itertools.product((64, 128, 256), repeat=2), (60, 100))
"""K, V: all pairs of the usual sizes, and one where both need masks."""
CHUNKS = (16, 32, 64)
STRATUM = 90
"""Smallest number of compilations in a run that is not full."""


def full_matrix() -> list[Config]:
    """Every configuration. The state is float32 or the main dtype, which are one and the same for float32."""
    return [
        Config(dtype, K, V, BT, packed, state, v_first)
        for dtype in DTYPES
        for K, V in HEADS
        for BT in CHUNKS
        for packed in (False, True)
        for state in dict.fromkeys(("float32", dtype))
        for v_first in (False, True)
    ]


def load_providers(names: Iterable[str] = PROVIDERS) -> list[Provider]:
    loaded = []
    for name in names:
        module, _, function = name.partition(":")
        loaded.append(getattr(importlib.import_module(module), function))
    return loaded


@dataclass
class Row:
    """One distinct compilation: its kernel, the configurations that launch it, what came of it."""

    spec: KernelSpec
    target: Target
    configs: list[Config] = field(default_factory=list)
    report: CompileReport | None = None
    failed: dict[str, str] = field(default_factory=dict)


def stratum(rows: Sequence[Row], size: int = STRATUM) -> list[Row]:
    """At least ``size`` of the compilations, such that every two values of different axes (K and V, chunk size, packed,
    ...) and every triple of stage, target and dtype meet in one wherever they do in ``rows``; the same on every run.

    Greedy: the row that covers most pairs left, as long as one does; gains only shrink, so a stale one is looked at
    again before it is taken."""
    covers = [set().union(*(_value_pairs(row, config) for config in row.configs)) for row in rows]
    left = set().union(*covers)
    heap = [(-len(covers[i]), _scramble(i), i) for i in range(len(rows))]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and (left or len(chosen) < size):
        stale, order, i = heapq.heappop(heap)
        gain = len(covers[i] & left)
        if gain < -stale:
            heapq.heappush(heap, (-gain, order, i))
            continue
        chosen.append(i)
        left -= covers[i]
    return [rows[i] for i in sorted(chosen)]


def _value_pairs(row: Row, config: Config) -> set[tuple[object, ...]]:
    dtype, K, V, BT, packed, state, v_first = astuple(config)
    axes = (row.spec.stage, row.target.name, dtype, (K, V), BT, packed, state == dtype, v_first)
    return {*itertools.combinations(enumerate(axes), 2), axes[:3]}


def _scramble(i: int) -> int:
    """Breaks ties far apart, the same way on every run."""
    return i * 2654435761 % 4294967296


def plan(
    pairs: Iterable[tuple[Config, Target]], providers: Iterable[Provider], stages: Sequence[str] | None = None
) -> list[Row]:
    """The distinct compilations behind these configurations; ``stages`` keeps only those named."""
    rows: dict[tuple[object, ...], Row] = {}
    loaded = list(providers)
    for config, target in pairs:
        for provider in loaded:
            for spec in provider(config, target):
                if stages is not None and spec.stage not in stages:
                    continue
                row = rows.setdefault((target.name, spec.key()), Row(spec, target))
                row.configs.append(config)
    return list(rows.values())


def walk(
    rows: Sequence[Row], jobs: int, progress: Callable[[Row], None] = lambda row: None, cache: Path | None = None
) -> None:
    """Compiles every row and judges it; ``progress`` is called as each one ends. ``cache``: see compile_kernel."""
    for index, report in run_all([Task(row.spec, row.target, cache=cache) for row in rows], jobs):
        row = rows[index]
        row.report = report
        row.failed = findings(report)
        progress(row)
