"""The native training step of chunk_kda on one NVIDIA GPU, with its peers beside it in the same run.

    python benchmarks/chunk_kda_cuda.py --peers fla,cudnn --out benchmarks/results
    python benchmarks/chunk_kda_cuda.py --kernels             each launch of a step alone, with its bytes
    python benchmarks/chunk_kda_cuda.py --peers fla --tune    tunes flash-linear-attention and writes fla_configs.json

B1, K = V = 128 and bf16 unless a case says otherwise. Raw contract: norm of q and k, lower-bounded gate (-5) and
sigmoid of beta in the op. Plain: normalised q and k, decays and strengths as such. Times are medians of GPU events
around whole calls, host work included, unless a column says kernel time (the sum over a step's kernels, from
torch.profiler) or graph (a CUDA graph's replay). Peak: device memory beyond inputs and what was there before. Errors:
RMS ratio against float64 at T = 512, H = 32.

Peers: fla is flash-linear-attention's chunk_kda; its kernels take the configurations of fla_configs.json, which its own
tuning chose at T = 8192 and H = 32 on an H200, and those that are not listed there are tuned. cudnn is cuDNN frontend's
Hopper engine, which serves the plain contract alone. A peer that cannot be imported, or fails in a case, is listed with
the reason. Writes chunk_kda_cuda.json and .md (the tables), anew after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_tuning import CONFIGS, Tuning, known

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.timing import copy_speed, device_name, median_time

K = 128
RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
       "safe_gate": True, "lower_bound": -5.0}  # fmt: skip
BAR = {"raw, T 8192: forward": 0.45, "raw, T 8192": 0.42, "raw, T 32768": 0.45, "packed 8 x 1024": 0.45,
       "raw, H 96": 0.45, "raw, heads 16 -> 32": 0.45}  # fmt: skip
"""Largest share of flash-linear-attention's time that is asked for."""
GRAPH_BAR_US = 500.0
CUDNN_BAR = 1.0
ERROR_BAR = 1.25
"""Of flash-linear-attention's error, per tensor."""
DECAYS = {"logsigmoid": None, "-0.05": -0.05, "-1": -1.0, "-5": -5.0}

Step = Callable[[], Any]


class Case(NamedTuple):
    """One problem: T tokens, H query/key heads, HV value heads."""

    T: int
    H: int = 32
    HV: int = 32
    lengths: tuple[int, ...] | None = None
    plain: bool = False
    decay: float | None = None
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "raw, T 8192": Case(8192),
    "plain, T 8192": Case(8192, plain=True),
    "raw, T 2048": Case(2048),
    "raw, T 32768": Case(32768),
    "packed 8 x 1024": Case(8192, lengths=(1024,) * 8),
    "raw, heads 16 -> 32": Case(8192, H=16),
    "raw, H 96": Case(8192, H=96, HV=96),
}
PROBLEMS = {"raw": Case(512)} | {f"plain, {n}": Case(512, plain=True, decay=d) for n, d in DECAYS.items()}
"""Compared with float64."""


def leaves_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Differentiable inputs, the other arguments, and the gradient of o."""
    gen = torch.Generator("cuda").manual_seed(0)
    T, H, HV, dtype = case.T, case.H, case.HV, case.dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    x = {"q": draw(1, T, H, K), "k": draw(1, T, H, K), "v": draw(1, T, HV, K), "g": draw(1, T, HV, K)}
    x["beta"] = draw(1, T, HV)
    do = draw(1, T, HV, K).to(dtype)
    other: dict[str, Any] = {} if case.plain else dict(RAW)
    if case.plain:
        x["q"], x["k"] = (F.normalize(x[n], dim=-1) for n in ("q", "k"))
        decay = F.logsigmoid(x["g"]) if case.decay is None else case.decay * (1 - 0.1 * x["g"].sigmoid())
        x["g"], x["beta"] = decay, x["beta"].sigmoid()
    main = ("q", "k", "v") if case.plain else ("q", "k", "v", "g", "beta")
    leaves = {n: t.to(dtype) if n in main else t for n, t in x.items()}
    if not case.plain:
        leaves["A_log"] = torch.empty(HV, device="cuda").uniform_(1, 16, generator=gen).log()
        leaves["dt_bias"] = draw(HV * K)
    if case.lengths is not None:
        other["cu_seqlens"] = torch.tensor([0, *case.lengths], device="cuda").cumsum(0)
    return {n: t.requires_grad_() for n, t in leaves.items()}, other, do


def steps(fn: Callable[..., Any], case: Case) -> tuple[Step, Step]:
    """Forward alone, and forward with backward."""
    leaves, other, do = leaves_of(case)

    def forward() -> Tensor:
        return fn(**leaves, **other)[0]

    return forward, lambda: torch.autograd.grad(forward(), list(leaves.values()), do)


def native(**arguments: Any) -> Any:
    return chunk_kda(**arguments, backend="cuda")


def peer(name: str) -> Callable[..., Any] | str:
    """The peer's function, or why it is not there."""
    module, function = {"fla": ("fla.ops.kda", "chunk_kda"), "cudnn": ("cudnn.linear_attention.ops",
                                                                      "kimi_delta_attention")}[name]  # fmt: skip
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    if name == "fla":
        return found

    bounds: dict[int, Tensor] = {}

    def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        T = q.shape[1]
        if T not in bounds:
            bounds[T] = torch.tensor([0, T], dtype=torch.int32, device="cuda")
        out = found(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), bounds[T], plan_name="kda_hopper_cuda")
        return (out[0] if isinstance(out, (tuple, list)) else out).unsqueeze(0), None

    return plain


def us(step: Step) -> float:
    return round(median_time(step, "cuda", budget=0.25, flush=False).median * 1e6, 1)


def peak_bytes(step: Step) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def kernel_times(step: Step, times: int = 8) -> list[tuple[str, float]]:
    """Each launch of one step in order of its first start: name, median microseconds of that name's launches a step."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    durations: dict[str, list[float]] = defaultdict(list)
    for e in sorted(seen.events(), key=lambda e: e.time_range.start):
        if e.device_type == torch.autograd.DeviceType.CUDA:
            durations[e.name].append(e.time_range.elapsed_us())
    found = []
    for name, each in durations.items():
        launches = max(1, round(len(each) / times))
        of_steps = [sum(each[i : i + launches]) for i in range(0, len(each), launches)]
        found.append((name, round(statistics.median(of_steps), 1)))
    return found


def graph_us(step: Step) -> float:
    """Microseconds of a CUDA graph's replay of the step."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = step()
    elapsed = us(graph.replay)
    del kept
    return elapsed


def measured(fn: Callable[..., Any], name: str, case: Case, seconds: dict[str, float]) -> dict[str, Any]:
    """One contestant in one case; the reason where it fails."""
    start = time.perf_counter()
    try:
        forward, both = steps(fn, case)
        both()
        row: dict[str, Any] = {"forward_us": us(forward), "both_us": us(both), "peak_bytes": peak_bytes(both)}
        if name == "raw, T 2048":
            row["graph_us"] = graph_us(both)
        if name in ("raw, T 8192", "plain, T 8192"):
            row["kernels_us"] = {n[:70]: t for n, t in kernel_times(both)}
            row["kernel_us"] = round(sum(row["kernels_us"].values()), 1)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    torch.cuda.empty_cache()
    seconds[name] = round(time.perf_counter() - start, 1)
    return row


def errors(contestants: dict[str, Callable[..., Any]], out: dict[str, dict[str, dict[str, float]]]) -> None:
    """Into ``out``: RMS ratio of o and each gradient against float64, by problem, contestant and tensor."""
    for problem, case in PROBLEMS.items():
        leaves, other, do = leaves_of(case)

        def results(fn: Callable[..., Any], x: dict[str, Tensor], do: Tensor, other: dict[str, Any]) -> list[Tensor]:
            o = fn(**x, **other)[0]
            return [o, *torch.autograd.grad(o, list(x.values()), do)]

        double = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
        right = results(lambda **x: chunk_kda(**x, backend="torch"), double, do.double(), other)
        out[problem] = {}
        for name, fn in contestants.items():
            if name == "cudnn" and not case.plain:
                continue
            try:
                got = results(fn, leaves, do, other)
            except Exception as error:
                print(f"errors of {name}, {problem}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            out[problem][name] = {
                n: float((a.double() - b).norm() / b.norm())
                for n, a, b in zip(("o", *(f"d{n}" for n in leaves)), got, right, strict=True)
            }


def launches_of(case: Case) -> dict[str, int]:
    """Bytes that each launch of a step has to move, by what its kernel's name holds."""
    tokens, chunks, b = case.T * case.HV, -(-case.T // 64) * case.HV, 2
    shared, tile, state, square = case.T * case.H * K * b, tokens * K * b, chunks * K * K * b, tokens * 64 * b
    inputs = 2 * shared + 2 * tile
    return {
        "kda_prepare_forward": inputs + 2 * square + 4 * tile,
        "kda_prepare_backward": inputs + square + 4 * tile,
        "kda_scan_forward": 4 * tile + square + tile,
        "kda_scan_backward": 5 * tile + square + 2 * tile + 2 * state,
        "kda_grads": inputs + square + 3 * tile + 2 * state + 2 * shared + 2 * tile,
    }


def print_kernels(case: Case) -> list[tuple[str, float]]:
    speed = copy_speed("cuda")
    forward, both = steps(native, case)
    rows = kernel_times(both, 20)
    print(f"{device_name(torch.device('cuda'))}, copy {speed / 1e12:.2f} TB/s, T {case.T}, H {case.H} -> {case.HV}")
    for name, t in rows:
        print(f"{t:9.1f} us  {name[:100]}")
    print(f"{sum(t for _, t in rows):9.1f} us  all kernels; forward {us(forward)} us, both {us(both)} us by events")
    for name, nbytes in launches_of(case).items():
        print(f"{nbytes / speed * 1e6:9.1f} us  floor of {name}: {nbytes / 1e6:.0f} MB")
    return rows


def verdicts(result: dict[str, Any]) -> list[str]:
    """A line for each bar that both sides have figures for."""
    rows, lines = result["cases"], []

    def line(what: str, got: float, bar: float, unit: str = "") -> None:
        lines.append(f"{what}: {got:.3g}{unit} (bar {bar:g}{unit}) {'met' if got <= bar else 'MISSED'}")

    for what, bar in BAR.items():
        case, field = what.removesuffix(": forward"), "forward_us" if what.endswith("forward") else "both_us"
        ours, theirs = (rows.get(case, {}).get(n, {}).get(field) for n in ("cuda", "fla"))
        if ours and theirs:
            line(f"{what}, share of flash-linear-attention's time", ours / theirs, bar)
    replay = rows.get("raw, T 2048", {}).get("cuda", {}).get("graph_us")
    if replay:
        line("raw, T 2048, graph replay", replay, GRAPH_BAR_US, " us")
    plain = rows.get("plain, T 8192", {})
    if "kernel_us" in plain.get("cuda", {}) and "kernel_us" in plain.get("cudnn", {}):
        share = plain["cuda"]["kernel_us"] / plain["cudnn"]["kernel_us"]
        line("plain, T 8192, share of cuDNN's kernel time", share, CUDNN_BAR)
    for problem, of in result["errors"].items():
        if "cuda" in of and "fla" in of:
            worst = max(of["cuda"], key=lambda n: of["cuda"][n] / of["fla"][n])
            line(f"{problem}, error of {worst} over flash-linear-attention's", of["cuda"][worst] / of["fla"][worst],
                 ERROR_BAR)  # fmt: skip
    return lines


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, torch {result['torch']}, copy {result['copy_TBps']:.2f} TB/s", ""]
    lines += ["| case | contestant | forward us | forward + backward us | share of fla's | kernel time us | graph us | "
              "peak MB |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case, of in result["cases"].items():
        base = of.get("fla", {}).get("both_us")
        for name, row in of.items():
            if "error" in row:
                lines.append(f"| {case} | {name} | {row['error'].replace('|', '/')} | | | | | |")
                continue
            share = f"{row['both_us'] / base:.2f}" if base else ""
            lines.append(
                f"| {case} | {name} | {row['forward_us']:.0f} | {row['both_us']:.0f} | {share} | "
                f"{row.get('kernel_us', '')} | {row.get('graph_us', '')} | {row['peak_bytes'] / 1e6:.0f} |"
            )
    for problem, of in result["errors"].items():
        names = list(next(iter(of.values()), {}))
        lines += ["", f"| error, {problem} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for name, e in of.items():
            lines.append(f"| {name} | {' | '.join(f'{e[n]:.1e}' for n in names)} |")
    lines += ["", *(f"{n}: {reason}" for n, reason in result["missing"].items()), *verdicts(result)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=";".join(CASES), help="separated by semicolons (default: all)")
    parser.add_argument("--peers", default="", help="of fla,cudnn (default: none)")
    parser.add_argument("--kernels", action="store_true", help="print each launch's time, and end")
    parser.add_argument("--tokens", type=int, default=8192, help="T of --kernels (default: %(default)s)")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 32), metavar=("H", "HV"), help="of --kernels")
    parser.add_argument("--tune", action="store_true", help="run flash-linear-attention once at T = 8192, and end")
    parser.add_argument("--no-errors", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--out", type=Path, help="folder of chunk_kda_cuda.json and .md; default: print them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    args = parser.parse_args()
    if args.kernels:
        print_kernels(Case(args.tokens, *args.heads))
        return
    begin = time.perf_counter()
    found = {name: peer(name) for name in args.peers.split(",") if name}
    contestants: dict[str, Callable[..., Any]] = {"cuda": native} | {n: f for n, f in found.items() if callable(f)}
    result: dict[str, Any] = {
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "copy_TBps": copy_speed("cuda") / 1e12,
        "missing": {n: reason for n, reason in found.items() if isinstance(reason, str)},
        "cases": {},
        "errors": {},
        "seconds": {},
    }
    names = args.cases.split(";")
    with contextlib.ExitStack() as stack:
        if "fla" in contestants:
            tuning = stack.enter_context(Tuning({} if args.tune else known()))
            if args.tune:
                steps(contestants["fla"], Case(8192))[1]()
                CONFIGS.write_text(json.dumps(tuning.chosen(), indent=1) + "\n", encoding="utf-8")
                return
            ahead = [CASES[n] for n in names] + ([] if args.no_errors else list(PROBLEMS.values()))
            try:
                tuning.compile_ahead([steps(contestants["fla"], case)[1] for case in ahead])
            except Exception as error:  # they are compiled one by one then, where they are needed
                result["missing"]["compilation ahead"] = f"{type(error).__name__}: {error}"
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            result["seconds"]["compiled ahead"] = round(time.perf_counter() - begin, 1)
        for name in names:
            case, of = CASES[name], result["cases"].setdefault(name, {})
            for contestant, fn in contestants.items():
                if contestant == "cudnn" and not case.plain:
                    continue
                of[contestant] = measured(fn, name, case, result["seconds"].setdefault(contestant, {}))
                print(name, contestant, json.dumps(of[contestant]), flush=True)
            save(result, args.out)
        if not args.no_errors:
            errors(contestants, result["errors"])
    result["seconds"]["all"] = round(time.perf_counter() - begin, 1)
    save(result, args.out)
    print(json.dumps(result, indent=1) if args.json else table(result))


def save(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "chunk_kda_cuda.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (out / "chunk_kda_cuda.md").write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
