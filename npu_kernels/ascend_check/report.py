"""What a walk found, as tables for people and as JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspeed_kda.npu_kernels.ascend_check.matrix import Row
from mindspeed_kda.npu_kernels.ascend_check.spec import TRITON_TYPES
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS, Target

KIB = 1024
DISCLAIMER = (
    "Compiled up to HIVM and its memory plan by the compilers on PyPI. The last step (hivmc: HIVM to device object) "
    "was a stand-in, and no NPU was involved: strong evidence that a kernel compiles and fits, not a run."
)
TARGET_HEADER = ("target", "series", "UB KiB", "L1 KiB", "L0C KiB", "compiler")
HEADER = ("target", "stage", "dtype", "configs", "compiled", "core", "UB KiB", "L1 KiB", "L0C KiB", "ws KiB", "failed")


def dtype_of(row: Row) -> str:
    """The main dtypes whose configurations launch this compilation."""
    return "/".join(dict.fromkeys(TRITON_TYPES[c.dtype] for c in row.configs))


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """One line per target, stage and dtype, cells in the order of ``HEADER``: peaks over the configurations."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.target.name, row.spec.stage, dtype_of(row)), []).append(row)
    return [[*key, *_group_cells(group)] for key, group in groups.items()]


def _group_cells(rows: list[Row]) -> list[str]:
    target = rows[0].target
    failed = [row for row in rows if row.failed]
    return [
        str(sum(len(row.configs) for row in rows)),
        str(len(rows)),
        "/".join(dict.fromkeys(row.report.core for row in rows if row.report and row.report.stopped_in is None)) or "-",
        _peak(rows, lambda report: report.ub, target.ub),
        _peak(rows, lambda report: report.l1, target.l1),
        _peak(rows, lambda report: report.l0c, target.l0c),
        _peak(rows, lambda report: report.workspace, 0),
        str(len(failed)) if failed else "",
    ]


def _peak(rows: Iterable[Row], read: Callable[[Any], int | None], budget: int) -> str:
    sizes = [size for row in rows if row.report and (size := read(row.report))]
    if not sizes:
        return "-"
    share = f" ({max(sizes) / budget:.0%})" if budget else ""
    return f"{max(sizes) / KIB:.1f}{share}"


def failures(rows: Iterable[Row]) -> list[str]:
    """One line per failing rule of each compilation."""
    return [
        f"{row.target.name} {row.spec.stage} [{row.configs[0].label()}{_more(row)}] {name}: {sentence}"
        for row in rows
        for name, sentence in row.failed.items()
    ]


def _more(row: Row) -> str:
    return f" and {len(row.configs) - 1} more" if len(row.configs) > 1 else ""


def configurations(rows: Iterable[Row]) -> int:
    """Points of the support matrix on a target that these compilations serve."""
    return len({(row.target.name, config) for row in rows for config in row.configs})


def closing(rows: Sequence[Row], seconds: float) -> str:
    bad = sum(bool(row.failed) for row in rows)
    verdict = f"{bad} of them failed" if bad else "all passed"
    return f"{configurations(rows)} configurations, {len(rows)} distinct compilations, {verdict}, {seconds:.0f} s"


def as_json(rows: Sequence[Row], versions: dict[str, str]) -> dict[str, Any]:
    """Everything measured, one list per compilation in the order of ``columns``."""
    return {
        "note": DISCLAIMER,
        "versions": versions,
        "configurations": configurations(rows),
        "compilations": len(rows),
        "failed": failures(rows),
        "columns": [
            "target", "op", "stage", "variant", "first configuration", "configurations", "core",
            "ub", "l1", "l0c", "workspace", "dots", "products", "notes", "marks", "scalar",
        ],
        "rows": [_json_row(row) for row in rows],
    }  # fmt: skip


def _json_row(row: Row) -> list[Any]:
    report, spec = row.report, row.spec
    assert report is not None
    return [
        row.target.name, spec.op, spec.stage, spec.variant, row.configs[0].label(), len(row.configs), report.core,
        report.ub, report.l1, report.l0c, report.workspace, report.dots, report.products,
        len(report.notes), sum((report.marks or {}).values()), len(report.scalar),
    ]  # fmt: skip


def json_lines(value: dict[str, Any]) -> str:
    """The JSON text with one compilation per line, for files that are kept and compared."""
    import json

    rows = ",\n".join(json.dumps(row) for row in value["rows"])
    head = json.dumps({**value, "rows": []}, indent=1)
    return re.sub(r'"rows": \[\]', lambda _: f'"rows": [\n{rows}\n]', head) + "\n"


def markdown(rows: Sequence[Row], versions: dict[str, str], full: bool) -> str:
    """The page ``docs/ascend_check.md``; ``full`` says whether the rows are the whole matrix."""
    title, option = ("the whole support matrix", " --full") if full else ("a stratum of the support matrix", "")
    targets = ",".join(dict.fromkeys(row.target.name for row in rows))
    option += "" if len(targets.split(",")) == len(TARGETS) else f" --target {targets}"
    lines = [
        f"# Compile gate: {title}",
        "",
        f"Written by `python -m mindspeed_kda ascend-check{option} --write .`; how to read it: [ascend.md](ascend.md).",
        "",
        f"{DISCLAIMER}",
        "",
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"{configurations(rows)} configurations, {len(rows)} distinct compilations, "
        f"{sum(bool(r.failed) for r in rows)} failed.",
        "",
        "Peaks are over the configurations of a line, with their share of the chip's memory; `ws` is global scratch "
        "memory per block.",
        "",
        *_markdown_table(TARGET_HEADER, map(_target_cells, TARGETS.values())),
        "",
        *_markdown_table(HEADER, summary(rows)),
    ]  # fmt: skip
    bad = failures(rows)
    if bad:
        lines += ["", "## Failures", "", *(f"- {line}" for line in bad)]
    return "\n".join(lines) + "\n"


def _target_cells(target: Target) -> list[str]:
    sizes = (target.ub, target.l1, target.l0c)
    return [target.name, target.series, *(str(size // KIB) for size in sizes), target.compiler]


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
