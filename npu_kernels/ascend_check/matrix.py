"""The support matrix, who provides its kernels, and the walk over it: every distinct compilation once."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field

from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport
from mindspeed_kda.npu_kernels.ascend_check.rules import findings
from mindspeed_kda.npu_kernels.ascend_check.spec import Config, KernelSpec, Provider
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

PROVIDERS = ("mindspeed_kda.npu_kernels.wy_dqkg.gate:specs",)
"""``module:function`` of every provider; a new op adds its own here."""

DTYPES = ("float16", "bfloat16", "float32")
HEADS = (*itertools.product((64, 128, 256), repeat=2), (60, 100))
"""K, V: all pairs of the usual sizes, and one where both need masks."""
CHUNKS = (16, 32, 64)
STRATUM = 60
"""Smallest number of (configuration, target) pairs in a run that is not full."""


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


def stratum(pairs: Sequence[tuple[Config, Target]], size: int = STRATUM) -> list[tuple[Config, Target]]:
    """A subset of at least ``size`` in which every two values of different axes occur together wherever they do in
    ``pairs``; the same on every run."""
    left = [(pair, _value_pairs(*pair)) for pair in pairs]
    uncovered = set().union(*(values for _, values in left)) if left else set()
    chosen: list[tuple[Config, Target]] = []
    while left and (uncovered or len(chosen) < size):
        best = max(range(len(left)), key=lambda i: (len(left[i][1] & uncovered), _spread(i, len(left))))
        pair, values = left.pop(best)
        chosen.append(pair)
        uncovered -= values
    return chosen


def _value_pairs(config: Config, target: Target) -> set[tuple[tuple[int, object], tuple[int, object]]]:
    dtype, K, V, BT, packed, state, v_first = astuple(config)
    axes = (dtype, (K, V), BT, packed, state == dtype, v_first, target.name)
    return set(itertools.combinations(enumerate(axes), 2))


def _spread(i: int, n: int) -> int:
    """Breaks ties far apart: a fixed scramble of the position."""
    return (i * 2654435761) % 4294967296 % n


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


def walk(rows: Sequence[Row], jobs: int, progress: Callable[[Row], None] = lambda row: None) -> None:
    """Compiles every row and judges it; ``progress`` is called as each one ends."""
    for index, report in run_all([Task(row.spec, row.target) for row in rows], jobs):
        row = rows[index]
        row.report = report
        row.failed = findings(report)
        progress(row)
