"""What ``demo`` and ``verify`` share: backends on captured calls against float64, as rows of a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from mindspeed_kda import config
from mindspeed_kda.cli import environment
from mindspeed_kda.cli.common import DTYPE_NAMES, UsageError, note, table
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.judge import Subject, to_device

HEADER = ("input", "backend", "dtype", "out", "RMS ratio", "limit", "mixed", "MARE", "MERE", "RMSE", "max err", "")


def allow_interpreter(device: torch.device) -> None:
    """On a machine with nothing but a CPU, lets the ``triton`` backend run in Triton's interpreter, and says so.

    To be called early: Triton reads the variable when it is imported, and parts of torch import it.
    """
    if device.type != "cpu" or config.TRITON_INTERPRET.flag() is not None or "triton" in sys.modules:
        return
    if environment.installed("triton") and environment.try_import("triton").error is None:
        config.TRITON_INTERPRET.set("1")
        note(
            "Triton kernels are checked in Triton's interpreter (TRITON_INTERPRET=1): their numerics, not their speed."
        )


def check_call(
    subject: Subject, label: str, call: dict[str, Any], names: Iterable[str], device: torch.device, *, required: bool
) -> list[dict[str, Any]]:
    """One row per backend and output. ``call`` is rounded to its dtype.

    A backend that cannot run the call gives one row with its reason, or UsageError where it was ``required`` by name.
    """
    rows = []
    reference = None
    dtype = DTYPE_NAMES[call["q"].dtype]
    on_device = to_device(call, device)
    for name in names:
        row = {"op": subject.op, "input": label, "backend": name, "dtype": dtype}
        reason = subject.why_not(REGISTRY.of(subject.op)[name], on_device)
        if reason is not None:
            if required:
                raise UsageError(f"--backend: {name} cannot run {subject.op} in {dtype} on {device.type}: {reason}")
            rows.append({**row, "reason": reason})
            continue
        reference = subject.float64(on_device) if reference is None else reference
        verdicts = subject.verdicts(on_device, subject.run(on_device, name), reference)
        rows += [{**row, **v.as_dict()} for v in verdicts]
    return rows


def missed(rows: Iterable[dict[str, Any]]) -> bool:
    return any(row.get("misses") for row in rows)


def render(rows: list[dict[str, Any]]) -> str:
    """The table of all outputs that were computed, then one line for each backend and dtype that was not, and why."""
    shown = [
        (
            r["input"], r["backend"], r["dtype"], r["output"], f"{r['rms_ratio']:.1e}", f"{r['rms_limit']:.0e}",
            f"{r['mixed']:.4f}", f"{r['mare']:.1e}", f"{r['mere']:.1e}", f"{r['rmse']:.1e}", f"{r['max_abs']:.1e}",
            "MISS: " + "; ".join(r["misses"]) if r["misses"] else "ok",
        )
        for r in rows
        if "reason" not in r
    ]  # fmt: skip
    skipped = dict.fromkeys((r["op"], r["backend"], r["dtype"], r["reason"]) for r in rows if "reason" in r)
    lines = [table(HEADER, shown)] if shown else []
    lines += [f"not run: {op} on {backend} in {dtype}: {reason}" for op, backend, dtype, reason in skipped]
    return "\n".join(lines)
