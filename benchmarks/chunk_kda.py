"""chunk_kda, forward and forward with backward: backends side by side, and flash-linear-attention beside them.

    python benchmarks/chunk_kda.py --help
    python benchmarks/chunk_kda.py --tokens 2048,8192 --backends triton,torch --peer fla --kernels --json out.json

The raw contract: norm of q and k, lower-bounded gate (-5) and sigmoid of beta in the op. Each backend's gradients are
held against the first's before it is timed. Times are medians of GPU events around whole calls, host work included.
flash-linear-attention's kernels take the configurations of fla_configs.json (see chunk_kda_cuda.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton_tuning import Tuning, known

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.timing import copy_speed, device_name, median_time

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AGREE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest RMS ratio between two backends' gradients."""


def inputs(tokens: int, heads: int, size: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    gen = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    shape = (1, tokens, heads, size)
    leaves = {name: randn(*shape).to(dtype) for name in ("q", "k", "v", "g")}
    leaves["beta"] = randn(1, tokens, heads).to(dtype)
    leaves["A_log"] = torch.empty(heads, device=device).uniform_(1, 16, generator=gen).log()
    leaves["dt_bias"] = randn(heads * size)
    return {name: t.requires_grad_() for name, t in leaves.items()}


def steps(fn: Callable[..., Any], leaves: dict[str, Tensor], do: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward alone, and forward with backward."""
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def forward() -> Tensor:
        return fn(**leaves, **flags, safe_gate=True, lower_bound=-5.0)[0]

    return forward, lambda: torch.autograd.grad(forward(), list(leaves.values()), do)


def kernels_of(step: Callable[[], Any], times: int = 5) -> dict[str, float]:
    """Microseconds of each kernel of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    found = {e.key[:48]: round(e.self_device_time_total / times, 1) for e in seen.key_averages()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def peer(name: str) -> Callable[..., Any]:
    if name != "fla":
        raise SystemExit(f"--peer: expected fla, got {name}")
    try:
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError as error:
        raise SystemExit(f"--peer fla: cannot be imported: {error}") from None
    return fla_chunk_kda


def rms_ratio(got: Tensor, reference: Tensor) -> float:
    error, size = (x.double().square().mean().sqrt() for x in (got.double() - reference.double(), reference))
    return float(error / size.clamp(min=1e-30))


def timed(args: argparse.Namespace, contestants: dict[str, Callable[..., Any]], rows: list[dict[str, Any]]) -> bool:
    """Prints and appends the rows; whether one's gradients were off."""
    dtype, device, failed = DTYPES[args.dtype], torch.device(args.device), False
    for tokens in map(int, args.tokens.split(",")):
        leaves = inputs(tokens, args.heads, args.size, dtype, args.device)
        do = torch.randn_like(leaves["v"])
        expected: tuple[Tensor, ...] | None = None
        base = None
        for name, fn in contestants.items():
            forward, both = steps(fn, leaves, do)
            grads = both()
            expected = grads if expected is None else expected
            worst = max(rms_ratio(a, b) for a, b in zip(grads, expected, strict=True))
            failed |= not worst <= AGREE[dtype]
            us = [median_time(step, device).median * 1e6 for step in (forward, both)]
            base = us[1] if base is None else base
            row = {"tokens": tokens, "name": name, "forward_us": round(us[0], 1), "both_us": round(us[1], 1),
                   "ratio_to_first": round(us[1] / base, 3), "worst_rms_ratio_to_first": worst}  # fmt: skip
            print(f"T={tokens} {name}: forward {us[0]:.0f} us, forward + backward {us[1]:.0f} us, gradients within "
                  f"{worst:.1e} of {next(iter(contestants))}'s", flush=True)  # fmt: skip
            if args.kernels:
                row["kernels_us"] = kernels_of(both)
                for kernel, t in list(row["kernels_us"].items())[:24]:
                    print(f"  {t:9.1f} us  {kernel}")
            rows.append(row)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,8192", help="lengths T, comma separated (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="H = HV (default: %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="K = V (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="main dtype (default: %(default)s)")
    parser.add_argument("--backends", default="triton", help="comma separated; the first judges (default: %(default)s)")
    parser.add_argument("--peer", help="fla: flash-linear-attention's chunk_kda beside ours")
    parser.add_argument("--kernels", action="store_true", help="time of each kernel too")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    contestants = {n: lambda n=n, **kw: chunk_kda(**kw, backend=n) for n in args.backends.split(",")}
    if args.peer:
        contestants[args.peer] = peer(args.peer)
    device = torch.device(args.device)
    result: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "rows": [],
    }
    result["copy_bytes_per_s"] = copy_speed(device)
    with Tuning(known()) if args.peer else contextlib.nullcontext():
        failed = timed(args, contestants, result["rows"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
