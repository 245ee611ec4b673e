"""The op on one NVIDIA GPU: time of the native kernel against the roofline, beside the package's other backends and
flash-linear-attention's op where it is installed, all in one run.

    python benchmarks/wy_dqkg_cuda.py --out benchmarks/results

flash-linear-attention's op is timed where the states are 16-bit, as its own forward hands them over (`--peer-cases`
names others), with the configuration of fla_configs.json (see chunk_kda_cuda.py). Writes wy_dqkg_cuda.json, .md (the
table) and .png.
Floor: bytes (each input read once, each output written once) over the speed of a device-to-device copy measured in the
same run. Each case is checked against float64 at T = 128 first. The native kernel goes first through all cases, then
the peers, and files are written after every case: a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from triton_tuning import Tuning, known

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.timing import copy_speed, device_name, median_time
from mindspeed_kda.testing.wy_check import assert_right

H, K, BT = 32, 128, 64
DTYPES = {
    "fp16/fp32": (torch.float16, torch.float32),
    "bf16/bf16": (torch.bfloat16, torch.bfloat16),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    "fp32/fp32": (torch.float32, torch.float32),
}
PACKED = "packed bf16/bf16"


def uneven(tokens: int, sequences: int) -> list[int]:
    """Lengths of packed sequences: drawn once, the same on every run."""
    cuts = sorted(
        torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[: sequences - 1].add(1).tolist()
    )
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


def inputs(T: int, main: torch.dtype, state: torch.dtype, lengths: list[int] | None, device: str) -> dict[str, Any]:
    """Random inputs drawn on the device: T = 32768 takes the CPU minutes."""
    gen = torch.Generator(device).manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype = main, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device, generator=gen) * size).to(dtype)

    NT = -(-T // BT) if lengths is None else sum(-(-n // BT) for n in lengths)
    decay = F.logsigmoid(draw(1, T // BT, BT, H, K, dtype=torch.float32)).cumsum(2).view(1, T, H, K)
    out = {n: draw(1, T, H, K) for n in ("v", "v_new", "do", "dv")}
    out |= {n: F.normalize(draw(1, T, H, K, dtype=torch.float32), dim=-1).to(main) for n in ("q", "k")}
    out |= {n: draw(1, NT, H, K, K, dtype=state, size=0.1) for n in ("h", "dh")}
    out |= {"g": decay / 0.6931471805599453, "beta": draw(1, T, H).sigmoid(), "A": draw(1, T, H, BT, size=0.1)}
    if lengths is not None:
        out["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    return out


def peers(kwargs: dict[str, Any], state: torch.dtype) -> dict[str, Any]:
    """Functions to time, by name."""
    found: dict[str, Any] = {"cuda": lambda: op(**kwargs, backend="cuda")}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused as theirs

        found["fla"] = lambda: theirs(**kwargs, scale=K**-0.5, chunk_size=BT)
    return found


def host_time(device: str) -> float:
    """Microseconds from the Python call to its return, on a problem too small to keep the queue full."""
    kwargs = wy_inputs(T=64, H=1, K=K, V=K, dtype=torch.float16, state_dtype=torch.float32, device=device)
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            op(**kwargs, backend=None)
        times.append((time.perf_counter() - start) / 50 * 1e6)
    return sorted(times)[len(times) // 2]


def memory_beyond_outputs(device: str) -> int:
    kwargs = inputs(2048, torch.bfloat16, torch.bfloat16, None, device)
    op(**kwargs, backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = op(**kwargs, backend="cuda")
    return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in out)


def measure(T: int, label: str, speed: float, device: str, row: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row with the native kernel's time or, given that row, with the peers' beside it."""
    packed = label == PACKED
    main, state = DTYPES[label.removeprefix("packed ")]
    kwargs = inputs(T, main, state, uneven(T, 32) if packed else None, device)
    theirs = row is not None
    if row is None:
        floor = wy_dqkg.bytes_moved(wy_dqkg.check(**kwargs)) / speed
        row = {"case": label, "T": T, "floor_us": floor * 1e6}
    for name, call in peers(kwargs, state).items():
        if (name != "cuda") == theirs:
            row[f"{name}_us"] = median_time(call, device, budget=0.25, flush=False).median * 1e6
            row[f"{name}_over_floor"] = row[f"{name}_us"] / row["floor_us"]
    return row


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, torch {result['torch']}, copy {result['copy_TBps']:.2f} TB/s; B1 H32 K=V=128 chunk 64; "
        f"host {result['host_us']:.1f} us a call; {result['memory_beyond_outputs']} bytes beyond the outputs",
        "",
        "| case | T | floor us | native us | native / floor | FLA us | FLA / floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        fla = (f"{r['fla_us']:.0f}", f"{r['fla_over_floor']:.2f}") if "fla_us" in r else ("", "")
        lines.append(
            f"| {r['case']} | {r['T']} | {r['floor_us']:.0f} | {r['cuda_us']:.0f} | {r['cuda_over_floor']:.2f} | "
            f"{fla[0]} | {fla[1]} |"
        )
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    labels = [f"{r['case']}\nT={r['T']}" for r in rows]
    figure, axes = plt.subplots(figsize=(1.1 * len(rows) + 2, 4.5))
    axes.bar([i - 0.2 for i in range(len(rows))], [1 / r["cuda_over_floor"] for r in rows], 0.4, label="native")
    if any("fla_us" in r for r in rows):
        fla = [1 / r["fla_over_floor"] if "fla_us" in r else 0 for r in rows]
        axes.bar([i + 0.2 for i in range(len(rows))], fla, 0.4, label="flash-linear-attention")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylabel("share of the roofline (copy speed)")
    axes.set_title(f"chunk_kda_bwd_wy_dqkg_fused, {result['device']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--peer-cases", default=f"bf16/bf16,{PACKED}", help="cases that other implementations run too")
    parser.add_argument("--no-peers", action="store_true", help="time the native kernel alone")
    parser.add_argument("--name", default="wy_dqkg_cuda", help="of the files written")
    args = parser.parse_args()
    for main_dtype, state in DTYPES.values():
        kwargs = wy_inputs(T=128, H=2, K=K, V=K, dtype=main_dtype, state_dtype=state, device=args.device)
        assert_right(op(**kwargs, backend="cuda"), kwargs)
    speed = copy_speed(args.device)
    result: dict[str, Any] = {
        "device": device_name(torch.device(args.device)),
        "torch": torch.__version__,
        "copy_TBps": speed / 1e12,
        "host_us": host_time(args.device),
        "memory_beyond_outputs": memory_beyond_outputs(args.device),
        "rows": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / f"{args.name}.md").write_text(table(result))
        torch.cuda.empty_cache()

    for T, label in [(int(T), label) for T in args.tokens.split(",") for label in DTYPES] + [(8192, PACKED)]:
        result["rows"].append(measure(T, label, speed, args.device))
        print(json.dumps(result["rows"][-1]), flush=True)
        write()
    plot(result, args.out / f"{args.name}.png")
    peer_cases = [] if args.no_peers else args.peer_cases.split(",")
    with Tuning(known()) if peer_cases else contextlib.nullcontext():
        for row in result["rows"]:
            if row["case"] in peer_cases:
                print(json.dumps(measure(row["T"], row["case"], speed, args.device, row)), flush=True)
                write()
    plot(result, args.out / f"{args.name}.png")
    print(table(result))


if __name__ == "__main__":
    main()
