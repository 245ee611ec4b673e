"""``doctor``: what runs here, what does not and why, and the classic mistakes. Needs torch and numpy only."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from mindspeed_kda.cli import environment
from mindspeed_kda.cli.common import DTYPE_NAMES, add_command, devices, print_json, table
from mindspeed_kda.registry import REGISTRY, Backend
from mindspeed_kda.testing.judge import SUBJECTS, to_device

EXAMPLES = """\
  mindspeed-kda doctor           one line per op, backend and device: yes, or the reason why not
  mindspeed-kda doctor --run     also runs a small call on each and compares it with float64
  mindspeed-kda doctor --json    the same for programs (attach it to a bug report)
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 mindspeed-kda doctor
                                 where torch_npu is installed without CANN and `import torch` itself fails

exit code: 0; 1 if --run finds a wrong result or an error. A machine without an accelerator is not an error."""
MODULES = ("triton", "torch_npu", "fla", "matplotlib", "rich")


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers, "doctor", "Shows every backend of every op on this machine: runs here, or why not.", EXAMPLES
    )
    parser.add_argument("--run", action="store_true", help="run a small call on each backend that says yes")


def ask(backend: Backend, device: torch.device, run: bool) -> dict[str, object]:
    """One row: whether this backend runs on this device. Whatever the backend raises is the answer, not our failure."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    row: dict[str, object] = {"op": backend.op, "backend": backend.name, "device": str(device)}
    try:
        reason = backend.available()
        subject = SUBJECTS.get(backend.op)
        if reason is None and subject is not None:
            row["dtype"] = DTYPE_NAMES[dtype]
            call = to_device(subject.probe(dtype), device)
            reason = subject.why_not(backend, call)
            if reason is None:
                backend.load()
            if reason is None and run:
                verdicts = subject.verdicts(call, subject.run(call, backend.name))
                row["misses"] = [f"{v.output}: {miss}" for v in verdicts for miss in v.misses]
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        row["failed"] = True
    row["runs"] = reason is None
    row["reason"] = reason
    return row


def collect(run: bool) -> dict[str, Any]:
    """Everything that ``doctor`` shows, as JSON-ready data."""
    modules = {m: environment.try_import(m) for m in MODULES if environment.installed(m)}
    rows = [
        ask(backend, device, run)
        for device in devices()
        for op in REGISTRY.ops()
        for backend in REGISTRY.of(op).values()
    ]
    return {
        "versions": environment.versions(),
        "imports": {m: s.error for m, s in modules.items()},
        "devices": [str(d) for d in devices()],
        "backends": rows,
        "findings": [{"what": f.what, "cure": f.cure} for f in environment.findings(modules)],
    }


def run(args: argparse.Namespace) -> int:
    report = collect(args.run)
    wrong = [r for r in report["backends"] if args.run and (r.get("misses") or r.get("failed"))]
    if args.json:
        print_json(report)
        return 1 if wrong else 0
    print(table(("", "version"), [(k, v or "-") for k, v in report["versions"].items()]))
    print()
    print(table(("op", "backend", "device", "runs here"), [(*_words(r), _answer(r)) for r in report["backends"]]))
    for finding in report["findings"]:
        print(f"\nWRONG: {finding['what']}\n  cure: {finding['cure']}")
    broken = [f"{m}: {e}" for m, e in report["imports"].items() if e and m not in ("triton", "torch_npu")]
    if broken:
        print("\nInstalled but cannot be imported: " + "; ".join(broken))
    return 1 if wrong else 0


def _words(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["op"], row["backend"], row["device"]


def _answer(row: dict[str, Any]) -> str:
    if not row["runs"]:
        return f"no: {row['reason']}"
    if row.get("misses"):
        return "WRONG: " + "; ".join(row["misses"])
    return "yes, checked against float64" if "misses" in row else "yes"
