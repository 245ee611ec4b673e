"""``verify``: every backend and dtype against float64, on inputs of a forward and backward over real text."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from mindspeed_kda.cli import checking, common, demo
from mindspeed_kda.cli.common import UsageError, add_command, note
from mindspeed_kda.cli.progress import progress
from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.contracts.checks import CHUNK_SIZES
from mindspeed_kda.demo import real_inputs, text
from mindspeed_kda.demo.model import ByteModel, Config
from mindspeed_kda.demo.train import Plan, train
from mindspeed_kda.testing.capture import RecordedCall, op_inputs
from mindspeed_kda.testing.judge import SUBJECTS
from mindspeed_kda.testing.timing import device_name

EXAMPLES = """\
  mindspeed-kda verify                                   every backend that runs here, fp32, fp16 and bf16
  mindspeed-kda verify --backend cuda --dtype bf16 --shape 1x2048x32x128x128
  mindspeed-kda verify --shape 1x512x2x60x100 --value-heads 4 --chunk 16,32,64 --packed 0,65,1,63,300
  mindspeed-kda verify --op chunk_kda --json             the whole layer: outputs and every gradient

The inputs are real: a small model of KDA layers reads text, is trained for --steps, and one forward and backward over
the held-out end of the text gives A, h, dh, dv and the rest. Each is rounded to the dtype before both sides see it.
do carries a power of two, as loss scaling gives it. Limits: RMS ratio, and 99% of the elements in the mixed tolerance.

exit code: 0 all within limits; 1 a miss; 2 wrong usage, or a backend named here that cannot run."""
OPS = {"wy_dqkg": wy_dqkg.OP, "chunk_kda": chunk_kda.OP}
DTYPES = "fp32,fp16,bf16"
SHAPE = "2x150x2x64x64"


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers, "verify", "Compares every backend with float64 on inputs captured from real text.", EXAMPLES
    )
    parser.add_argument("--op", choices=OPS, default="wy_dqkg", help="default %(default)s")
    parser.add_argument("--backend", help="comma-separated names; default: all that can run here")
    parser.add_argument("--dtype", help="comma-separated; default: fp32,fp16,bf16")
    parser.add_argument("--state-dtype", help="of h and dh: fp32 (default) or the main dtype's name")
    parser.add_argument("--device", help="cpu, cuda or npu; default: the best present")
    parser.add_argument("--text", metavar="FILE", help="text to read; default: Python's documentation")
    parser.add_argument("--shape", default=SHAPE, metavar="BxTxHxKxV", help="default %(default)s")
    parser.add_argument("--value-heads", type=int, metavar="HV", help="a multiple of H; default: H")
    parser.add_argument("--chunk", default="64", help="comma-separated of 16, 32, 64 (default %(default)s)")
    parser.add_argument("--packed", metavar="LENGTHS", help="cut the tokens into sequences, as 0,65,1,63")
    parser.add_argument("--state-v-first", action="store_true", help="states as [V, K]")
    parser.add_argument("--steps", type=int, default=10, help="training before the capture (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    B, T, H, HV, K, V = common.sizes("--shape", args.shape, args.value_heads)
    chunk_sizes = common.integers("--chunk", args.chunk)
    if not set(chunk_sizes) <= set(CHUNK_SIZES):
        raise UsageError(f"--chunk: expected any of {', '.join(map(str, CHUNK_SIZES))}, got {args.chunk!r}")
    lengths = None if args.packed is None else common.integers("--packed", args.packed, least=0)
    if lengths is not None and sum(lengths) > B * T:
        raise UsageError(f"--packed: expected lengths that sum to at most B * T = {B * T}, got {sum(lengths)}")
    if args.steps < 0:
        raise UsageError(f"--steps: expected 0 or more, got {args.steps}")
    subject = SUBJECTS[OPS[args.op]]
    dtypes = common.dtypes(args.dtype or DTYPES)
    names = common.backends(subject.op, args.backend)
    device = common.device(args.device)
    checking.allow_interpreter(device)
    config = Config(heads=H, value_heads=HV, key_size=K, value_size=V, chunk_size=chunk_sizes[0])
    demo.chosen_backend(config, device)
    read = demo.load_text(args.text, T)

    calls = capture(config, read, args, B, T, device)
    rows = []
    pieces = [(c, d, i) for c in chunk_sizes for d in dtypes for i in range(len(calls))]
    with progress("checking") as report:
        for number, (size, dtype, i) in enumerate(pieces):
            recorded = dataclasses.replace(calls[i], arguments={**calls[i].arguments, "chunk_size": size})
            if lengths is not None:
                recorded = real_inputs.packed(recorded, lengths)
            label = f"layer {i} BT{size}{'' if lengths is None else ' packed'}"
            call = make_call(args, recorded, dtype)
            report(number / len(pieces), f"{label} {common.DTYPE_NAMES[dtype]}")
            required = args.backend is not None and args.dtype is not None
            rows += checking.check_call(subject, label, call, names, device, required=required)
        report(1.0, "done")
    for name in names if args.backend else ():
        reasons = [r.get("reason") for r in rows if r["backend"] == name]
        if all(reasons):
            raise UsageError(f"--backend: {name} cannot run {subject.op} here: {reasons[0]}")
    wrong = checking.missed(rows)
    if args.json:
        common.print_json(
            {"op": subject.op, "device": device_name(device), "text": read.source, "rows": rows, "passed": not wrong}
        )
    else:
        print(checking.render(rows))
        judged = sum("reason" not in r for r in rows)
        print(f"\n{judged} outputs on {device_name(device)}: {'a MISS, see above' if wrong else 'all within limits'}")
    return 1 if wrong else 0


def capture(
    config: Config, read: text.Text, args: argparse.Namespace, B: int, T: int, device: torch.device
) -> list[RecordedCall]:
    """The call of each layer of a model trained for ``--steps``, in float32."""
    torch.manual_seed(args.seed)
    model = ByteModel(config).to(device)
    if args.steps:
        plan = Plan(steps=args.steps, rows=B, length=T, seed=args.seed)
        with progress("training") as report:
            train(model, read.train, plan, lambda step: report(step.done, f"loss {step.loss:.3f} nats a byte"))
    note(f"capturing a forward and backward over {B} x {T} bytes of {read.source}")
    window = text.batch(read.held_out, B, T, torch.Generator().manual_seed(args.seed))
    return real_inputs.record(model, *window)


def make_call(args: argparse.Namespace, recorded: RecordedCall, dtype: torch.dtype) -> dict[str, Any]:
    """The op's keyword arguments for one recorded call, rounded to ``dtype``."""
    if OPS[args.op] == wy_dqkg.OP:
        state = None
        if args.state_dtype is not None:
            state = common.dtypes(args.state_dtype, "--state-dtype")[0]
            if state not in (torch.float32, dtype):
                raise UsageError(
                    f"--state-dtype: expected fp32 or {common.DTYPE_NAMES[dtype]} with --dtype "
                    f"{common.DTYPE_NAMES[dtype]}, got {args.state_dtype!r}"
                )
        return op_inputs(recorded, dtype=dtype, state_dtype=state, state_v_first=args.state_v_first)
    call = {**recorded.arguments, "do": recorded.do, "dht": None, "state_v_first": args.state_v_first}
    for name in ("q", "k", "v", "g", "beta", "do"):
        call[name] = call[name].to(dtype)
    return call
