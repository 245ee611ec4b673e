"""What the commands share: the one error that users see, tables, JSON, folders, plots, and words for arguments."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_kda.contracts import checks
from mindspeed_kda.registry import REGISTRY

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
DTYPE_NAMES = {value: name for name, value in DTYPES.items()}


class UsageError(Exception):
    """Wrong usage or input: ``main`` prints its text as one line and exits with code 2."""


def add_command(subparsers: Any, name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A subcommand's parser with its examples kept as written, and ``--json``."""
    from mindspeed_kda.cli.main import COMMANDS

    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=COMMANDS[name],
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns: words to the left, figures to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    numeric = [bool(cells) and all(_is_figure(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()

    return "\n".join([line(list(header)), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def _is_figure(text: str) -> bool:
    return text in ("", "-") or text[0].isdigit() or text[0] in "-+.<" or text in ("nan", "inf")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1, sort_keys=False, default=str))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")


def note(text: str) -> None:
    """A line of progress: to standard error, so that standard output holds results alone."""
    print(text, file=sys.stderr, flush=True)


def folder(path: str) -> Path:
    """The output folder, made where absent and proven writable before any long work."""
    out = Path(path)
    probe = out / ".mindspeed_kda_write_test"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out: cannot write to {path}: {error.strerror or error}") from error
    return out


def need_plots() -> Any:
    """matplotlib's ``pyplot`` on the file-only canvas. Raises UsageError where it is absent or broken; commands call it
    before the work whose plot it is."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a PNG needs matplotlib, which is not installed: pip install 'mindspeed_kda[cli]'")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except (ImportError, OSError) as error:
        raise UsageError(f"a PNG needs matplotlib, which cannot be imported: {error}") from error
    return pyplot


def figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes."""
    return need_plots().subplots(figsize=(width, height), layout="constrained")


def dtypes(text: str, option: str = "--dtype") -> list[torch.dtype]:
    """``fp16,bf16`` to dtypes."""
    names = [t.strip() for t in text.split(",") if t.strip()]
    unknown = [n for n in names if n not in DTYPES]
    if unknown or not names:
        raise UsageError(f"{option}: expected one or more of {', '.join(DTYPES)}, got {text!r}")
    return [DTYPES[n] for n in names]


def integers(option: str, text: str, least: int = 1) -> list[int]:
    """``16,32,64`` to numbers."""
    parts = [t.strip() for t in text.split(",")]
    if not all(p.isdigit() and int(p) >= least for p in parts):
        raise UsageError(f"{option}: expected numbers from {least}, separated by commas, got {text!r}")
    return [int(p) for p in parts]


def sizes(option: str, text: str, value_heads: int | None) -> tuple[int, int, int, int, int, int]:
    """``1x2048x32x128x128`` and ``--value-heads`` to B, T, H, HV, K, V."""
    parts = text.strip().lower().split("x")
    if len(parts) != 5 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise UsageError(f"{option}: expected BxTxHxKxV with numbers from 1, got {text!r}")
    B, T, H, K, V = map(int, parts)
    for axis, size in (("K", K), ("V", V)):
        if size > checks.MAX_HEAD_SIZE:
            raise UsageError(f"{option}: expected {axis} from 1 to {checks.MAX_HEAD_SIZE}, got {size}")
    HV = H if value_heads is None else value_heads
    if HV < 1 or HV % H:
        raise UsageError(f"--value-heads: expected a multiple of H = {H}, got {HV}")
    return B, T, H, HV, K, V


def backends(op: str, text: str | None, option: str = "--backend") -> list[str]:
    """``torch,triton`` to names registered for the op; None means all of them."""
    known = REGISTRY.of(op)
    if text is None:
        return list(known)
    names = [t.strip() for t in text.split(",") if t.strip()]
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise UsageError(f"{option}: expected one or more of {', '.join(known)}, got {text!r}")
    return names


def devices() -> list[torch.device]:
    """Devices that tensors can live on here, the CPU last. Asks torch only; imports no vendor module."""
    found = []
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        try:
            if module is not None and module.is_available():
                found.append(torch.device(kind, 0))
        except (RuntimeError, OSError, ImportError, AttributeError):
            continue  # a broken driver is the business of `doctor`, not a reason to stop a CPU run
    return [*found, torch.device("cpu")]


def device(text: str | None) -> torch.device:
    """``cpu``, ``cuda``, ``npu`` or ``cuda:1``; None takes the best that is present."""
    present = devices()
    if text is None:
        return present[0]
    kinds = [d.type for d in present]
    kind, _, index = text.partition(":")
    if kind not in kinds or (index and not index.isdigit()):
        raise UsageError(f"--device: expected one of {', '.join(kinds)} (present here), got {text!r}")
    if index and kind != "cpu" and int(index) >= torch.get_device_module(kind).device_count():
        raise UsageError(f"--device: {kind} has {torch.get_device_module(kind).device_count()} here, got {text!r}")
    return torch.device(text)
