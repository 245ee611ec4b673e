"""``python -m tests.atk``: runs the frozen cases on one backend and prints the pass table of a merge request."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence

import torch

import mindspeed_kda
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.timing import device_name
from tests.atk import records, suite

EPILOG = """\
Kinds: accuracy (all shapes, dual benchmark), model (the training shape, RMS ratio only), negative (wrong calls and
their messages). Without --kind: accuracy and negative.

examples:
  python -m tests.atk --backend torch --sample 40                     a stratified sample on the CPU
  TRITON_INTERPRET=1 python -m tests.atk --backend triton --sample 12 --dtype fp16 --max-cost 20000
  python -m tests.atk --backend cuda --device cuda --processes 8      every case on a GPU
  python -m tests.atk --backend cuda --device cuda --kind model       the training shape
  python -m tests.atk --backend torch --case 17 --op chunk_kda        one case, with what it missed
  python -m tests.atk --write                                         freeze the cases anew

Exit codes: 0 all passed, 1 a case failed or was not run, 2 wrong usage.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m tests.atk", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--backend", help="backend under test; default: the one chosen for each call")
    p.add_argument("--op", action="append", choices=records.ops(), help="only this op (may be repeated)")
    p.add_argument("--kind", action="append", choices=list(records.KINDS), help="only cases of this kind (repeatable)")
    p.add_argument("--sample", type=int, metavar="N", help="N cases an op and kind, spread over dtypes and sizes")
    p.add_argument("--max-cost", type=int, metavar="N", help="leave out cases of more than N elements")
    p.add_argument(
        "--dtype", action="append", choices=("fp16", "bf16", "fp32"), help="only this main dtype (repeatable)"
    )
    p.add_argument("--case", type=int, action="append", metavar="ID", help="only this case (may be repeated)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, npu; goldens are computed there too")
    p.add_argument("--processes", type=int, default=1, metavar="N", help="run in N processes (default 1)")
    p.add_argument("--repeats", type=int, default=2, metavar="N", help="runs that must agree bit for bit (default 2)")
    p.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="S",
        help="begin no case after S seconds; exit code 1 if any",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    p.add_argument("--out", metavar="FILE", help="also write that JSON object to FILE")
    p.add_argument("--brief", action="store_true", help="JSON with the table and only the cases that did not pass")
    p.add_argument("--write", action="store_true", help="write the frozen case files from the generators, then stop")
    return p


def write() -> None:
    for op in records.ops():
        module = suite.generator(op)
        for kind in records.KINDS:
            if hasattr(module, kind):
                specs = getattr(module, kind)()
                records.path(op, kind).write_text(records.dump(op, specs), encoding="utf-8")
                print(f"{records.path(op, kind).name}: {len(specs)} cases", file=sys.stderr)


def select(args: argparse.Namespace) -> list[suite.Job]:
    jobs: list[suite.Job] = []
    for op in args.op or records.ops():
        for kind in args.kind or ("accuracy", "negative"):
            specs = records.load(op, kind)
            if args.case:
                specs = [s for s in specs if s["case_id"] in args.case]
            if args.dtype:
                specs = [s for s in specs if s["dtype"] in args.dtype]
            jobs += [(op, kind, s) for s in suite.sample(specs, args.sample, args.max_cost)]
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if args.write:
        write()
        return 0
    for op in args.op or records.ops():
        if args.backend is not None and args.backend not in REGISTRY.of(op):
            p.error(f"--backend: expected one of {', '.join(REGISTRY.of(op))} for {op}, got {args.backend!r}")
    try:
        device = torch.zeros(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:
        p.error(f"--device: {args.device!r} cannot be used here: {error}")
    jobs = select(args)
    if not jobs:
        p.error("no case is left to run")
    began = time.perf_counter()

    def progress(result: suite.CaseResult, done: int, total: int) -> None:
        if result.misses or done % 50 == 0 or done == total:
            words = "; ".join(result.misses[:4]) if result.misses else "ok"
            clock = time.perf_counter() - began
            print(f"[{done}/{total} {clock:.0f} s] {result.op} {result.case_id} {result.key}: {words}", file=sys.stderr)

    results = suite.run_all(
        jobs,
        args.backend,
        args.device,
        repeats=args.repeats,
        processes=args.processes,
        seconds=args.time_limit,
        progress=progress,
    )
    failed = [r for r in results if r.misses]
    summary = {
        "version": mindspeed_kda.__version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "backend": args.backend or "automatic",
        "cases": len(results),
        "not_run": len(jobs) - len(results),
        "passed": sum(r.passed for r in results),
        "declined": sum(bool(r.declined) for r in results),
        "seconds": round(time.perf_counter() - began, 1),
    }
    details = suite.brief(results) if args.brief else {"results": suite.as_dict(results)}
    report = json.dumps({**summary, **details}, indent=1)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(report + "\n")
    if args.json:
        print(report)
    else:
        print(suite.table(results))
        print()
        print(
            "{passed} of {cases} cases passed, {declined} declined, {not_run} not run; "
            "backend {backend}, {device}, torch {torch}, {seconds} s".format(**summary)
        )
    return 1 if failed or len(results) < len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
