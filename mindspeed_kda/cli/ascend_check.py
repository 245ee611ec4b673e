"""``ascend-check``: compiles every Triton kernel for Ascend NPUs on a machine that has none."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_kda.cli.common import UsageError, add_command, folder, note, print_json, table
from mindspeed_kda.npu_kernels.ascend_check import cost_report, matrix, report, toolchain
from mindspeed_kda.npu_kernels.ascend_check.matrix import Row
from mindspeed_kda.npu_kernels.ascend_check.spec import TRITON_TYPES, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS, Target

EXAMPLES = """\
  mindspeed-kda ascend-check                        a stratum: every stage, dtype and target, in a minute or two
  mindspeed-kda ascend-check --target Ascend910B3 --dtype bf16 --stage main --full
                                                    one stage over its whole matrix
  mindspeed-kda ascend-check --full --write .       everything; writes docs/ascend_check.md and benchmarks/results/
  mindspeed-kda ascend-check --cost --dtype bf16    bytes, products, vector work and waits of each kernel, per chunk
                                                    and head, and the time at the chip's published rates

A kernel passes where the compiler exits 0 in its default configuration, UB, L1 and L0C hold it, no access is broken
into single elements, no loop is scalar code, and no matrix product is lost (docs/ascend.md).
The last compiler step (hivmc) and silicon are not involved.

exit code: 0 all pass; 1 a kernel fails; 2 wrong usage, or a package is missing (the message says what to install)."""
DTYPES = {TRITON_TYPES[name]: name for name in matrix.DTYPES}


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers, "ascend-check", "Compiles the Triton kernels for Ascend NPUs, on a machine without one.", EXAMPLES
    )
    parser.add_argument("--target", help=f"comma-separated, of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--dtype", help=f"comma-separated, of {', '.join(DTYPES)}; default: all")
    parser.add_argument("--stage", help="comma-separated names of stages; default: all")
    parser.add_argument("--full", action="store_true", help="the whole support matrix instead of a stratum of it")
    parser.add_argument(
        "--cost", action="store_true", help="count what the kernels move and compute, K = V = 128, BT 64"
    )
    parser.add_argument("--jobs", type=int, default=0, help="compilations at once; default: the machine's cores")
    parser.add_argument(
        "--cache", metavar="DIR", help="take reports of unchanged code from DIR, and keep new ones there"
    )
    parser.add_argument("--write", metavar="DIR", help="write docs/ascend_check.md and its JSON under DIR")


def run(args: argparse.Namespace) -> int:
    reason = toolchain.missing()
    if reason is not None:
        raise UsageError(reason)
    if args.jobs < 0:
        raise UsageError(f"--jobs: expected a positive number, got {args.jobs}")
    targets = [TARGETS[name] for name in _names("--target", args.target, list(TARGETS))]
    dtypes = [DTYPES[name] for name in _names("--dtype", args.dtype, list(DTYPES))]
    out = folder(args.write) if args.write else None
    if args.cost:
        return _cost(args, targets, dtypes, out)
    cache = folder(args.cache).resolve() if args.cache else None
    pairs = [(config, target) for config in matrix.full_matrix() if config.dtype in dtypes for target in targets]
    rows = _plan(pairs, args.stage)
    if not args.full:
        rows = matrix.stratum(rows)
    started = time.perf_counter()
    with _progress(rows) as step:
        matrix.walk(rows, args.jobs or os.cpu_count() or 1, step, cache)
    versions = toolchain.versions()
    if args.json:
        print_json(report.as_json(rows, versions))
    else:
        print(table(report.HEADER, report.summary(rows)))
        print("\n".join(["", *report.failures(rows)]).rstrip())
        print(f"{report.closing(rows, time.perf_counter() - started)}\n{report.DISCLAIMER}")
    if out is not None:
        _write(out / "docs" / "ascend_check.md", report.markdown(rows, versions, args.full))
        values = report.as_json(rows, versions)
        _write(out / "benchmarks" / "results" / "ascend_check.json", report.json_lines(values))
    return int(any(row.failed for row in rows))


def _cost(args: argparse.Namespace, targets: list[Target], dtypes: list[str], out: Path | None) -> int:
    found = []
    for target in targets:
        for dtype in dtypes:
            config = cost_report.cost_config(dtype)
            specs = [spec for provider in matrix.load_providers() for spec in provider(config, target)]
            counted_stages = {spec.stage for spec in specs if spec.scalars}
            silent = dict.fromkeys(spec.stage for spec in specs if spec.stage not in counted_stages)
            specs = [spec for spec in specs if spec.scalars]
            wanted = _names("--stage", args.stage, list(dict.fromkeys(spec.stage for spec in specs)))
            note(f"{target.name} {config.label()}")
            if silent:
                note(f"not counted, since their providers name no launch (KernelSpec.scalars): {', '.join(silent)}")
            ops: dict[str, list[KernelSpec]] = {}
            for spec in specs:
                if spec.stage in wanted:
                    ops.setdefault(spec.op, []).append(spec)
            for op, launches in ops.items():
                try:
                    counted = cost_report.measure(launches, target, args.jobs or os.cpu_count() or 1)
                except (RuntimeError, ValueError) as error:
                    print(f"{target.name} {config.label()}: {error}", file=sys.stderr)
                    return 1
                found.append({"op": op, "configuration": config.label(), **cost_report.as_json(counted, target)})
                if not args.json:
                    bound = cost_report.op_bound(counted, target) * 1e9
                    print(f"{op}, {target.name}, {config.label()}: at least {bound:.1f} ns per (chunk, head)")
                    print(f"{table(cost_report.HEADER, cost_report.rows(counted, target))}\n")
    values = {"note": cost_report.NOTE, "versions": toolchain.versions(), "reports": found}
    if args.json:
        print_json(values)
    else:
        print(f"{cost_report.NOTE}\n{report.DISCLAIMER}")
    if out is not None:
        _write(out / "benchmarks" / "results" / "ascend_cost.json", f"{json.dumps(values, indent=1)}\n")
    return 0


def _plan(pairs: Sequence[tuple[Any, Any]], stages: str | None) -> list[Row]:
    rows = matrix.plan(pairs, matrix.load_providers())
    known = list(dict.fromkeys(row.spec.stage for row in rows))
    wanted = _names("--stage", stages, known)
    return [row for row in rows if row.spec.stage in wanted]


def _names(option: str, text: str | None, known: list[str]) -> list[str]:
    """``a,b`` to names, each of them known; None means all."""
    if text is None:
        return known
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"{option}: expected one or more of {', '.join(known)}, got {text!r}")
    return names


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write: cannot write {path}: {error.strerror or error}") from error
    note(f"wrote {path}")


@contextlib.contextmanager
def _progress(rows: Sequence[Row]) -> Iterator[Callable[[Row], None]]:
    """A bar on standard error where rich is installed, else a line for every twentieth of the work."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("starting", total=len(rows))
            yield lambda row: bar.update(task, advance=1, description=f"{row.target.name} {row.spec.stage}")
        return
    done = 0
    every = max(1, len(rows) // 20)

    def step(row: Row) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == len(rows):
            note(f"{done}/{len(rows)} {row.target.name} {row.spec.stage}")

    yield step
