"""``bench``: time of the op over shapes and backends, beside copy speed and PyTorch eager."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindspeed_kda.cli import common
from mindspeed_kda.cli.common import UsageError, add_command, table
from mindspeed_kda.cli.progress import progress
from mindspeed_kda.testing import benchmark
from mindspeed_kda.testing.benchmark import Case, Measurement

EXAMPLES = """\
  mindspeed-kda bench                                    a shape that suits this machine, every backend that runs here
  mindspeed-kda bench --shapes 1x2048x32x128x128,1x8192x32x128x128 --dtype fp16,bf16 --out bench_out
  mindspeed-kda bench --backends cuda,torch --peer fla   beside flash-linear-attention's Triton kernel
  mindspeed-kda bench --op chunk_kda --shapes 1x8192x32x128x128 --dtype bf16
                                                         the whole layer, forward and backward
  mindspeed-kda bench --json > bench.json

Each result is compared with float64 before it is timed; a wrong result has no figure. Inputs are random and not zero.
time      median; device events on an NPU or a GPU with its L2 overwritten between calls, wall clock on the CPU
MB        each input read once, each output written once: the fewest bytes that any implementation moves
of copy   those bytes a second, as a share of the device's own copy speed: 1.00 is the memory floor
x eager   how many times faster than the torch backend (PyTorch eager) on the same device

exit code: 0; 1 if a result is wrong; 2 wrong usage, or a backend named here that cannot run."""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers, "bench", "Times the op over shapes and backends; checks each result first.", EXAMPLES
    )
    parser.add_argument(
        "--op", choices=benchmark.OPS, default="wy_dqkg", help="wy_dqkg, the fused op (default), or the layer"
    )
    parser.add_argument("--shapes", metavar="BxTxHxKxV,...", help="default: one that suits the device")
    parser.add_argument("--value-heads", type=int, metavar="HV", help="a multiple of H; default: H")
    parser.add_argument("--chunk", type=int, choices=(16, 32, 64), default=64, help="default %(default)s")
    parser.add_argument("--dtype", help="comma-separated; default: fp32 on a CPU, fp16,bf16 otherwise")
    parser.add_argument("--state-dtype", choices=("fp32", "main"), default="fp32", help="of h and dh (default fp32)")
    parser.add_argument("--backends", help="comma-separated; default: all that can run here, torch among them")
    parser.add_argument("--peer", choices=(*benchmark.PEERS, "none"), help="default: every peer that can run here")
    parser.add_argument("--device", help="cpu, cuda or npu; default: the best present")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for each figure (default %(default)s)")
    parser.add_argument("--out", metavar="DIR", help="write bench.json and bench.png")


def run(args: argparse.Namespace) -> int:
    device = common.device(args.device)
    on_cpu = device.type == "cpu"
    if not args.seconds > 0:
        raise UsageError(f"--seconds: expected more than 0, got {args.seconds}")
    shapes = (args.shapes or ("1x512x4x128x128" if on_cpu else "1x2048x32x128x128,1x8192x32x128x128")).split(",")
    dtypes = common.dtypes(args.dtype or ("fp32" if on_cpu else "fp16,bf16"))
    names = common.backends(benchmark.OPS[args.op].op, args.backends, "--backends")
    out = None
    if args.out is not None:
        common.need_plots()
        out = common.folder(args.out)
    peers = {name: peer.why_not(device) for name, peer in benchmark.PEERS.items()}
    if args.peer in peers and peers[args.peer] is not None:
        raise UsageError(f"--peer: {args.peer} cannot run here: {peers[args.peer]}")
    wanted = [name for name, reason in peers.items() if reason is None and args.peer in (None, name)]
    cases = []
    for text in shapes:
        B, T, H, HV, K, V = common.sizes("--shapes", text, args.value_heads)
        for dtype in dtypes:
            cases.append(
                Case(args.op, B, T, H, HV, K, V, args.chunk, dtype, None if args.state_dtype == "fp32" else dtype)
            )

    with progress("bench") as report:
        result = benchmark.measure_all(
            cases,
            names,
            device,
            peers=wanted,
            seconds=args.seconds,
            report=report,
            required=args.backends is not None,
        )
    if result.cannot is not None:
        raise UsageError(f"--backends: {result.cannot}")
    if out is not None:
        common.write_json(out / "bench.json", result.as_dict())
        draw(result, out / "bench.png")
    if args.json:
        common.print_json(result.as_dict())
    else:
        print(render(result))
    return 1 if any(m.misses for m in result.rows) else 0


def render(result: benchmark.Result) -> str:
    header = ("shape", "dtype", "backend", "time us", "MB", "GB/s", "of copy", "x eager", "")
    lines = [f"{result.device}; copy speed {result.copy_speed / 1e9:.1f} GB/s", ""]
    lines.append(table(header, [_row(m) for m in result.rows if m.reason is None]))
    skipped = dict.fromkeys((m.backend, m.case.dtype_name, m.reason) for m in result.rows if m.reason is not None)
    lines += [f"not run: {backend} in {dtype}: {reason}" for backend, dtype, reason in skipped]
    return "\n".join(lines)


def _row(m: Measurement) -> tuple[str, ...]:
    head = (m.case.label, m.case.dtype_name, m.backend)
    if m.timing is None:
        return (*head, "-", f"{m.nbytes / 1e6:.1f}", "-", "-", "-", "WRONG: " + "; ".join(m.misses))
    eager = "-" if m.times_eager is None else f"{m.times_eager:.2f}"
    checked = f"misses {m.note}" if m.note else "checked"
    return (
        *head, f"{m.timing.median * 1e6:.1f}", f"{m.nbytes / 1e6:.1f}", f"{m.speed / 1e9:.1f}", f"{m.of_copy:.3f}",
        eager, checked,
    )  # fmt: skip


def draw(result: benchmark.Result, path: Path) -> None:
    """Bars of the share of copy speed: one group for each case, one colour for each backend."""
    rows = [m for m in result.rows if m.timing is not None]
    cases = list(dict.fromkeys(f"{m.case.label}\n{m.case.dtype_name}" for m in rows))
    backends = list(dict.fromkeys(m.backend for m in rows))
    figure, axes = common.figure(max(5.0, 1.6 * len(cases) * len(backends) ** 0.5), 4.0)
    width = 0.8 / max(len(backends), 1)
    for i, backend in enumerate(backends):
        own = [m for m in rows if m.backend == backend]
        places = [cases.index(f"{m.case.label}\n{m.case.dtype_name}") + (i + 0.5) * width - 0.4 for m in own]
        bars = axes.bar(places, [m.of_copy for m in own], width, label=backend)
        axes.bar_label(bars, [f"{m.timing.median * 1e6:.0f} us" for m in own if m.timing], fontsize=7)
    axes.set_xticks(range(len(cases)), cases, fontsize=7)
    axes.set(ylabel="bytes a second, share of copy speed", title=f"{result.what}\n{result.device}")
    axes.legend()
    figure.savefig(path, dpi=150)
