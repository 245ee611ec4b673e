"""``demo``: the main job. Trains a small language model of KDA layers on real text, then checks every backend on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from mindspeed_kda.cli import checking, common
from mindspeed_kda.cli.common import UsageError, add_command, note
from mindspeed_kda.cli.progress import progress
from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.demo import real_inputs, text
from mindspeed_kda.demo.model import ByteModel, Config
from mindspeed_kda.demo.train import Plan, Step, held_out_loss, sample, train
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.capture import op_inputs
from mindspeed_kda.testing.judge import SUBJECTS
from mindspeed_kda.testing.timing import device_name

EXAMPLES = """\
  mindspeed-kda demo                        Python's own documentation, best backend here; minutes on a plain CPU
  mindspeed-kda demo --text book.txt --minutes 10 --out book
  mindspeed-kda demo --zero-kda             the same model without KDA: it sees one byte at a time
  mindspeed-kda demo --compare              both, in one PNG
  mindspeed-kda demo --model small --dtype fp32 --beside cpu/loss.json
                                            on a GPU: the curve of a CPU run in the same PNG
  mindspeed-kda demo --steps 20 --json      a short run, for programs

Training ends after --steps or --minutes, whichever comes first. The loss is in nats a byte; the held-out loss is that
of the last tenth of the text, which is never trained on. Writes loss.png and loss.json into --out.

exit code: 0; 1 if a backend misses a limit on the trained layers' inputs; 2 wrong usage or input."""
SAMPLE_BYTES = 200
PROMPT_BYTES = 64
MODELS: dict[str, dict[str, int]] = {
    "small": {},
    "large": {"width": 256, "heads": 4, "value_heads": 4, "key_size": 128, "value_size": 128, "chunk_size": 64},
}
"""What differs from ``Config``. small: trained in minutes on two CPU cores; large: head size and chunk that the kernels
for NPUs and GPUs are tuned for."""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "demo",
        "Trains a byte-level language model of KDA layers on real text, shows its loss and a sample, and checks every "
        "backend that runs here against float64 on the inputs of the trained layers.",
        EXAMPLES,
    )
    plan = Plan()
    parser.add_argument("--text", metavar="FILE", help="text to learn; default: Python's documentation")
    parser.add_argument("--steps", type=int, default=plan.steps, help="optimiser steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=2.5, help="ends training sooner (default %(default)s)")
    parser.add_argument("--backend", help="backend of the training; default: the best that can run it")
    parser.add_argument("--device", help="cpu, cuda or npu; default: the best present")
    parser.add_argument("--model", choices=MODELS, help="default: small on a CPU, large otherwise")
    parser.add_argument("--dtype", help="fp32, or bf16 by autocast; default: fp32 on a CPU, else bf16")
    parser.add_argument("--seed", type=int, default=0, help="weights, batches and sample (default %(default)s)")
    variant = parser.add_mutually_exclusive_group()
    variant.add_argument("--zero-kda", action="store_true", help="train with the KDA output zeroed, for comparison")
    variant.add_argument("--compare", action="store_true", help="train with and without KDA, both curves in the PNG")
    parser.add_argument("--beside", metavar="FILE", help="loss.json of another run, drawn in the same PNG")
    parser.add_argument("--out", metavar="DIR", default="out", help="folder of loss.png and loss.json (default out)")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG (no matplotlib needed)")


def run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    if args.steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {args.steps}")
    if not args.minutes > 0:
        raise UsageError(f"--minutes: expected more than 0, got {args.minutes}")
    if not args.no_plot:
        common.need_plots()
    plan = Plan(steps=args.steps, seconds=args.minutes * 60, seed=args.seed)
    read = load_text(args.text, plan.length)
    device = common.device(args.device)
    checking.allow_interpreter(device)
    leave_room(device)
    config = model_config(device, args.model, args.dtype, args.backend)
    backend = chosen_backend(config, device)
    beside = None if args.beside is None else load_report(args.beside)
    out = common.folder(args.out)

    bigram = text.bigram_entropy(torch.cat((read.train, read.held_out)))
    note(f"text: {read.source}, {len(read)} bytes, bigram entropy {bigram:.3f} nats a byte")
    note(f"device: {device_name(device)}; backend of the training: {backend}")
    variants = (False, True) if args.compare else (args.zero_kda,)
    report: dict[str, Any] = {
        "text": {"source": read.source, "bytes": len(read), "bigram_entropy": bigram},
        "device": device_name(device),
        "backend": backend,
        "model": {f: str(v) for f, v in dataclasses.asdict(config).items() if f not in ("backend", "zero_kda")},
        "plan": dataclasses.asdict(plan),
        "runs": [],
    }
    model = None
    for zero in variants:
        trained, entry = train_one(dataclasses.replace(config, zero_kda=zero), plan, read, device)
        report["runs"].append(entry)
        model = trained if not zero else model
    report["checks"] = [] if model is None else check_layers(model, read, device)
    report["seconds"] = time.perf_counter() - began
    common.write_json(out / "loss.json", report)
    if not args.no_plot:
        draw(report, beside, out / "loss.png")
    if args.json:
        common.print_json(report)
    else:
        print(render(report, out))
    return 1 if checking.missed(report["checks"]) else 0


def leave_room(device: torch.device) -> None:
    """One thread where other processes keep every core busy: OpenMP's threads wait for each other by spinning, and on
    shared cores two of them were over ten times slower than one."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except (AttributeError, OSError):  # not every system tells
        return
    if device.type == "cpu" and load > cores and torch.get_num_threads() > 1:
        note(f"this machine is busy (load {load:.1f} on {cores} cores): training on one thread")
        torch.set_num_threads(1)


def load_text(path: str | None, length: int) -> text.Text:
    """The text; UsageError where it cannot be read, or is too short to cut windows of ``length`` from both parts."""
    try:
        return text.load(path, shortest=20 * length)
    except OSError as error:
        raise UsageError(f"--text: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--text: {path or 'the documentation'} is too short: {error}") from error
    except ModuleNotFoundError as error:
        raise UsageError("--text: this Python ships no documentation (pydoc_data.topics); name a file") from error


def model_config(device: torch.device, model: str | None, dtype: str | None, backend: str | None) -> Config:
    on_cpu = device.type == "cpu"
    main = common.dtypes(dtype or ("fp32" if on_cpu else "bf16"))
    if main not in ([torch.float32], [torch.bfloat16]):
        raise UsageError(f"--dtype: expected fp32 or bf16, got {dtype!r}")
    sizes: dict[str, Any] = MODELS[model or ("small" if on_cpu else "large")]
    return Config(**sizes, main=main[0], backend=backend)


def chosen_backend(config: Config, device: torch.device) -> str:
    """The backend that training will run on; UsageError where the one asked for is unknown or cannot."""
    c, T = config, 2 * config.chunk_size
    if c.backend is not None:
        common.backends(chunk_kda.OP, c.backend)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(1, T, *shape, dtype=c.main, device=device)

    q, v = empty(c.heads, c.key_size), empty(c.value_heads, c.value_size)
    call = chunk_kda.check(q, q, v, empty(c.value_heads, c.key_size), empty(c.value_heads), chunk_size=c.chunk_size)
    try:
        return REGISTRY.choose(chunk_kda.OP, call, device.type, c.backend).name
    except RuntimeError as error:
        raise UsageError(f"--backend: {error}") from error


def train_one(config: Config, plan: Plan, read: text.Text, device: torch.device) -> tuple[ByteModel, dict[str, Any]]:
    """One trained model and what it did, JSON-ready."""
    torch.manual_seed(plan.seed)
    model = ByteModel(config).to(device)
    with progress("without KDA" if config.zero_kda else "training") as report:

        def show(step: Step) -> None:
            report(step.done, f"loss {step.loss:.3f} nats a byte, {step.tokens_per_second:,.0f} tokens/s")

        history = train(model, read.train, plan, show)
    held = held_out_loss(model, read.held_out)
    written = bytes(sample(model, read.held_out[:PROMPT_BYTES], SAMPLE_BYTES, seed=plan.seed))
    return model, {
        "zero_kda": config.zero_kda,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(history.losses),
        "cut_short": history.cut_short,
        "seconds": history.seconds,
        "tokens_per_second": history.tokens_per_second,
        "held_out": held,
        "prompt": bytes(read.held_out[:PROMPT_BYTES].tolist()).decode(errors="replace"),
        "sample": written.decode(errors="replace"),
        "losses": [round(x, 5) for x in history.losses],
    }


def check_layers(model: ByteModel, read: text.Text, device: torch.device) -> list[dict[str, Any]]:
    """Every backend of the op on each trained layer's inputs, taken over held-out text, against float64."""
    length = 2 * model.config.chunk_size + model.config.chunk_size // 2 + 1  # two whole chunks and a ragged one
    window = read.held_out[: 2 * length].view(2, length)
    subject = SUBJECTS[wy_dqkg.OP]
    rows = []
    for i, recorded in enumerate(real_inputs.record(model, window[:, :-1], window[:, 1:])):
        call = op_inputs(recorded)
        rows += checking.check_call(subject, f"layer {i}", call, REGISTRY.of(wy_dqkg.OP), device, required=False)
    return rows


def load_report(path: str) -> dict[str, Any]:
    """The loss.json of another run; UsageError where it cannot be read or is something else."""
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        for entry in report["runs"]:
            _ = entry["losses"], entry["held_out"], entry["zero_kda"], report["device"], report["backend"]
    except OSError as error:
        raise UsageError(f"--beside: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--beside: expected the loss.json of a demo, got {path}") from error
    return report


def draw(report: dict[str, Any], beside: dict[str, Any] | None, path: Path) -> None:
    """Training loss of each run, smoothed over a fiftieth of it, its held-out loss, and the text's bigram entropy."""
    figure, axes = common.figure(7.0, 4.2)
    reports = [report] if beside is None else [report, beside]
    for color, (of, entry) in enumerate((r, e) for r in reports for e in r["runs"]):
        losses = torch.tensor(entry["losses"], dtype=torch.float64)
        width = max(1, len(losses) // 50)
        smooth = torch.nn.functional.avg_pool1d(losses.view(1, 1, -1), width, 1).flatten()
        name = "KDA output zeroed" if entry["zero_kda"] else "KDA"
        if beside is not None:
            name += f", {of['backend']} on {of['device'].split(',')[0]}"
        axes.plot(losses, color=f"C{color}", alpha=0.2, linewidth=0.8)
        axes.plot(range(width - 1, len(losses)), smooth, color=f"C{color}", label=f"{name}: training")
        label = f"{name}: held out {entry['held_out']:.3f}"
        axes.plot(len(losses), entry["held_out"], "o", color=f"C{color}", label=label)
    entropy = report["text"]["bigram_entropy"]
    axes.axhline(
        entropy, color="gray", linestyle="--", linewidth=0.8, label=f"bigram entropy of the text {entropy:.3f}"
    )
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title=Path(report["text"]["source"]).name)
    axes.set_ylim(0, 4.5)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def render(report: dict[str, Any], out: Path) -> str:
    lines = []
    for entry in report["runs"]:
        name = "KDA output zeroed" if entry["zero_kda"] else "KDA"
        ended = ", ended by --minutes" if entry["cut_short"] else ""
        lines.append(
            f"{name}: held-out loss {entry['held_out']:.3f} nats a byte after {entry['steps']} steps in "
            f"{entry['seconds']:.0f} s ({entry['tokens_per_second']:,.0f} tokens/s, {entry['parameters']:,} "
            f"parameters{ended}); bigram entropy of the text {report['text']['bigram_entropy']:.3f}"
        )
    shown = next((e for e in report["runs"] if not e["zero_kda"]), report["runs"][0])
    lines += ["", f"sample after {shown['prompt']!r}:", shown["sample"], ""]
    if report["checks"]:
        lines += ["The trained layers' inputs of the op, each backend against float64:"]
        lines += [checking.render(report["checks"]), ""]
    lines.append(f"written: {', '.join(str(p) for p in sorted(out.glob('loss.*')))}; {report['seconds']:.0f} s in all")
    return "\n".join(lines)
