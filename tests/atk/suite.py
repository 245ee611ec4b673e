"""Runs frozen cases: one case, many cases over processes, a stratified sample, and the pass table."""

from __future__ import annotations

import builtins
import importlib
import itertools
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from unittest import mock

import torch

from mindspeed_kda import config
from mindspeed_kda.chunks import cdiv, count_chunks
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import cu_seqlens_of
from mindspeed_kda.testing.memory import hostile_memory
from tests.atk import standards
from tests.atk.plugin import DTYPES, Executor, break_argument
from tests.atk.records import Spec

DECLINES = "cannot run this call"
"""What the registry says of a call that the backend asked for does not serve."""
STRATA = ("dtype", "chunk_size", "state_v_first", "gate")
"""A sample takes cases from every combination of these, and of packed or not, equally."""


@dataclass
class CaseResult:
    """Verdicts of one case. ``misses`` is empty where it passed; figures are those of its worst output."""

    op: str
    kind: str
    case_id: int
    key: str
    dtype: str
    seconds: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    declined: str = ""
    """Why the backend asked for, which is there, does not serve this call; nothing ran then."""

    @property
    def passed(self) -> bool:
        return not self.misses and not self.declined


def executor(op: str) -> Executor:
    return cast("Executor", importlib.import_module(f"tests.atk.{op}.executor_{op}"))


def generator(op: str) -> Any:
    return importlib.import_module(f"tests.atk.{op}.gen_{op}")


def cost(spec: Spec) -> int:
    """Elements that a case computes on, for ordering and for the CPU's samples."""
    BT, lengths = spec["chunk_size"], spec["lengths"]
    NT = cdiv(spec["T"], BT) if lengths is None else count_chunks(cu_seqlens_of(lengths).tolist(), BT)
    K, V = spec["K"], spec["V"]
    return int(spec["B"] * spec["HV"] * (spec["T"] * (3 * K + 3 * V) + max(NT, 1) * (BT * BT + 2 * K * V)))


def family(spec: Spec) -> tuple[Any, ...]:
    """What a kernel is compiled for: cases that share it run in one process, one after the other."""
    names = ("dtype", "state_dtype", "H", "HV", "K", "V", "chunk_size", "state_v_first", "gate", "qk_l2norm")
    return (*(spec.get(n) for n in names), spec["lengths"] is None)


def sample(specs: Sequence[Spec], count: int | None, max_cost: int | None = None) -> list[Spec]:
    """``count`` cases spread over the strata (None: all), the same ones each time, in the order given."""
    affordable = [s for s in specs if max_cost is None or cost(s) <= max_cost]
    if count is None or count >= len(affordable):
        return affordable
    strata: dict[tuple[Any, ...], list[Spec]] = {}
    for s in affordable:
        strata.setdefault((*(s.get(n) for n in STRATA), s["lengths"] is None), []).append(s)
    for i, cases in enumerate(strata.values()):
        random.Random(i).shuffle(cases)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*strata.values()))
    chosen = list(itertools.islice((s for s in turns if s is not None), count))
    return sorted(chosen, key=lambda s: int(s["case_id"]))


def run_case(op: str, kind: str, spec: Spec, backend: str | None, device: str, repeats: int = 2) -> CaseResult:
    """One case, on hostile memory. An unexpected exception is a miss of the case, not the end of the run."""
    result = CaseResult(op, kind, spec["case_id"], spec["case_key"], spec["dtype"])
    began = time.perf_counter()
    try:
        if kind == "negative":
            _run_negative(op, spec, backend, device, result)
        else:
            _run_accuracy(op, spec, backend, device, repeats, result, dual=kind == "accuracy")
    except Exception as error:
        result.misses.append(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    result.seconds = time.perf_counter() - began
    return result


def _run_negative(op: str, spec: Spec, backend: str | None, device: str, result: CaseResult) -> None:
    it = executor(op)
    arguments = {"backend": backend, **it.arguments(it.build(spec, torch.device(device)))}
    expected = getattr(builtins, spec["expected_exception"])
    with mock.patch.dict(os.environ, {config.VALIDATE.name: "1"}):
        try:
            it.FUNCTION(**break_argument(arguments, spec["broken"]))
        except Exception as error:
            if type(error) is not expected or spec["expected_message"] not in str(error):
                wanted = f"{spec['expected_exception']}({spec['expected_message']!r})"
                result.misses.append(f"expected {wanted}, got {type(error).__name__}({str(error)!r})")
        else:
            result.misses.append(f"expected {spec['expected_exception']}, got a result")


def _run_accuracy(
    op: str, spec: Spec, backend: str | None, device: str, repeats: int, result: CaseResult, *, dual: bool
) -> None:
    it, main = executor(op), DTYPES[spec["dtype"]]
    inputs = it.build(spec, torch.device(device))
    try:
        it.run(inputs, backend)
    except RuntimeError as error:
        if backend is None or REGISTRY.of(op)[backend].available() is not None or DECLINES not in str(error):
            raise
        result.declined = str(error).partition(f"{DECLINES}: ")[2]
        return
    golden, control, dtypes = it.golden(inputs), it.control(inputs) if dual else None, it.dtypes(inputs)
    with hostile_memory():
        runs = [it.run(inputs, backend) for _ in range(max(repeats, 1))]
    if set(runs[0]) != set(golden):
        result.misses.append(f"expected outputs {sorted(golden)}, got {sorted(runs[0])}")
    for name in golden.keys() & runs[0].keys():
        verdict = standards.judge(
            name,
            [run[name] for run in runs],
            golden[name],
            golden[name] if control is None else control[name],
            main,
            dtypes[name],
            it.valid(name, golden[name], inputs),
            dual=dual,
        )
        result.misses += [f"{name}: {miss}" for miss in verdict.misses]
        figures = dict(verdict.ratios)
        if verdict.errors is not None and verdict.errors.rms_ref > 0:
            figures |= {"rms_ratio": verdict.errors.rms_ratio, "mixed": verdict.errors.mixed}
        for figure, value in figures.items():
            pick = min if figure == "mixed" else max
            result.worst[figure] = pick(result.worst.get(figure, value), value)


Job = tuple[str, str, Spec]


def _batch(
    jobs: Sequence[Job], backend: str | None, device: str, repeats: int, deadline: float = math.inf
) -> list[CaseResult]:
    """The cases of ``jobs`` that begin before ``deadline``, a reading of time.time()."""
    torch.set_num_threads(1)
    started = itertools.takewhile(lambda _: time.time() < deadline, jobs)
    return [run_case(op, kind, spec, backend, device, repeats) for op, kind, spec in started]


def batches(jobs: Iterable[Job], size: int = 6) -> list[list[Job]]:
    """Cases of one compile family together, small families joined up to ``size`` cases, the dearest batches first."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job[0], job[1], family(job[2])), []).append(job)
    out: list[list[Job]] = []
    for group in groups.values():
        if out and len(out[-1]) + len(group) <= size:
            out[-1] += group
        else:
            out.append(list(group))
    return sorted(out, key=lambda batch: -sum(cost(spec) for _, _, spec in batch))


def run_all(
    jobs: Sequence[Job],
    backend: str | None,
    device: str,
    *,
    repeats: int = 2,
    processes: int = 1,
    seconds: float = math.inf,
    progress: Callable[[CaseResult, int, int], None] = lambda result, done, total: None,
) -> list[CaseResult]:
    """All cases that begin within ``seconds``, in ``processes`` processes of their own (1: in this one). Sorted by op,
    kind and case."""
    results: list[CaseResult] = []
    for new in _results(jobs, backend, device, repeats, processes, time.time() + seconds):
        results.append(new)
        progress(new, len(results), len(jobs))
    return sorted(results, key=lambda r: (r.op, r.kind, r.case_id))


def _results(
    jobs: Sequence[Job], backend: str | None, device: str, repeats: int, processes: int, deadline: float
) -> Iterator[CaseResult]:
    work = batches(jobs)
    if processes <= 1:
        for job in itertools.chain.from_iterable(work):
            yield from _batch([job], backend, device, repeats, deadline)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(work)) or 1, mp_context=context) as pool:
        for future in as_completed([pool.submit(_batch, batch, backend, device, repeats, deadline) for batch in work]):
            yield from future.result()


def table(results: Sequence[CaseResult]) -> str:
    """The pass table as Markdown: a row per op, kind and dtype; ratios are the largest of all cases and outputs."""
    head = (
        "op",
        "cases",
        "dtype",
        "passed",
        "RMS ratio",
        "mixed tolerance",
        "MARE",
        "MERE",
        "RMSE",
        "declined",
        "failed",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (op, kind, dtype), group in itertools.groupby(
        sorted(results, key=lambda r: (r.op, r.kind, r.dtype)), key=lambda r: (r.op, r.kind, r.dtype)
    ):
        cases = list(group)
        bad, passed = [r for r in cases if r.misses], sum(r.passed for r in cases)

        def worst(figure: str, cases: list[CaseResult] = cases) -> float:
            pick = min if figure == "mixed" else max
            return pick((r.worst[figure] for r in cases if figure in r.worst), default=math.nan)

        figures = [f"{worst('rms_ratio'):.1e}", f"{worst('mixed'):.4f}"]
        figures += [f"{worst(m):.2f}" for m in standards.RATIO_LIMITS]
        cells = [f"`{op}`", kind, dtype, f"{passed} / {len(cases)}"]
        cells += ["-" if f == "nan" else f for f in figures]
        cells.append(str(sum(bool(r.declined) for r in cases)))
        lines.append("| " + " | ".join([*cells, ", ".join(str(r.case_id) for r in bad[:8]) or "-"]) + " |")
    return "\n".join(lines)


def as_dict(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    return [asdict(r) for r in results]


def brief(results: Sequence[CaseResult]) -> dict[str, Any]:
    """What is committed of a run: the table, and what each case that did not pass says."""
    left = [r for r in results if not r.passed]
    said = [
        {"op": r.op, "kind": r.kind, "case": r.key, "id": r.case_id, "says": "; ".join(r.misses[:3]) or r.declined}
        for r in left
    ]
    return {"table": table(results).splitlines(), "not_passed": said}
