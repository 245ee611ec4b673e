"""flash_attention on an NVIDIA GPU beside PyTorch's flash and cuDNN kernels: rates, windows, memory.

    python benchmarks/flash_attention.py
    python benchmarks/flash_attention.py --json benchmarks/results/flash_attention_h200.json --heads 128

bf16, B2 H16 T8192. Rates are operations of the five products of the backward (the two of the forward) over the pairs
inside the mask, whatever a kernel computes besides, over the median time. Every gradient is held against the flash
kernel's before it is timed. The windowed backward (1024 keys to the left, causal) stands beside its share of the causal
one's pairs. Memory is the peak of forward and backward above the inputs, at T and at twice T.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import flash_attention, flash_attention_bwd
from mindspeed_kda.contracts import flash_attention as contract
from mindspeed_kda.testing.timing import device_name, median_time

B, H = 2, 16
WINDOW = 1024
AGREE = 2e-2
"""Largest RMS ratio between a gradient and the flash kernel's."""
BARS = {"triton, any order": 0.8, "triton, deterministic": 0.6}
"""Of the flash kernel's rate."""
WINDOW_BAR = 1.5
"""Of the window's share of the work."""

Step = Callable[[], tuple[Tensor, ...]]


def inputs(B: int, T: int, D: int) -> tuple[Tensor, ...]:
    """q, k, v, do."""
    gen = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(B, T, H, D, generator=gen, device="cuda").bfloat16() for _ in range(4))


def flash(x: tuple[Tensor, ...], causal: bool) -> tuple[Step, Step]:
    """Forward and backward of PyTorch's flash kernel."""
    q, k, v, do = (t.transpose(1, 2) for t in x)
    aten, T = torch.ops.aten, q.shape[2]
    o, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return (
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:1],
        lambda: aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, T, T, 0.0, causal, seed, offset
        ),
    )


def cudnn(x: tuple[Tensor, ...], causal: bool) -> tuple[Step, Step]:
    """Forward and backward of cuDNN's kernel."""
    q, k, v, do = (t.transpose(1, 2) for t in x)
    aten, T = torch.ops.aten, q.shape[2]
    o, lse, cu_q, cu_k, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    return (
        lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:1],
        lambda: aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, cu_q, cu_k, T, T, 0.0, causal
        ),
    )


def own(x: tuple[Tensor, ...], deterministic: bool, **options: Any) -> tuple[Step, Step]:
    """Forward and backward of our Triton kernels."""
    q, k, v, do = x
    options |= {"backend": "triton", "deterministic": deterministic}
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    return (
        lambda: flash_attention(q, k, v, return_lse=True, **options)[:1],
        lambda: flash_attention_bwd(do, q, k, v, o, lse, **options),
    )


def rms_ratio(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt())


def rates(T: int, D: int, causal: bool) -> list[dict[str, Any]]:
    """Every kernel on one shape, the flash kernel first."""
    x = inputs(B, T, D)
    work = contract.flops(contract.check(*x[:3], causal=causal))
    contestants = {
        "flash": flash(x, causal),
        "cudnn": cudnn(x, causal),
        "triton, any order": own(x, False, causal=causal),
        "triton, deterministic": own(x, True, causal=causal),
    }
    want: list[Tensor] | None = None
    rows: list[dict[str, Any]] = []
    for name, steps in contestants.items():
        got = [g.transpose(1, 2) if name in ("flash", "cudnn") else g for g in steps[1]()]
        want = got if want is None else want
        worst = max(rms_ratio(a, b) for a, b in zip(got, want, strict=True))
        row: dict[str, Any] = {"D": D, "causal": causal, "kernel": name, "rms_ratio_to_flash": worst}
        for part, step, operations in zip(("forward", "backward"), steps, work, strict=True):
            seconds = median_time(step, "cuda", budget=0.25).median
            row[f"{part}_ms"], row[f"{part}_tflops"] = seconds * 1e3, operations / seconds / 1e12
            row[f"{part}_of_flash"] = row[f"{part}_tflops"] / (rows[0] if rows else row)[f"{part}_tflops"]
        bar = BARS.get(name)
        row["passes"] = worst <= AGREE and (bar is None or row["backward_of_flash"] >= bar)
        rows.append(row)
        print(f"D{D} {'causal' if causal else 'full':6} {name:22} forward {row['forward_tflops']:4.0f} TFLOP/s "
              f"({row['forward_of_flash']:.2f}), backward {row['backward_tflops']:4.0f} TFLOP/s "
              f"({row['backward_of_flash']:.2f}){'' if row['passes'] else '  BELOW THE BAR'}", flush=True)  # fmt: skip
    return rows


def windows(T: int, D: int) -> list[dict[str, Any]]:
    """The windowed backward's time over the causal one's, beside its share of the pairs."""
    x = inputs(B, T, D)
    pairs = [contract.pairs_seen(contract.check(*x[:3], causal=True, window=(w, None))) for w in (WINDOW, None)]
    share = pairs[0] / pairs[1]
    rows = []
    for deterministic in (False, True):
        steps = (own(x, deterministic, causal=True, window=(w, None))[1] for w in (WINDOW, None))
        some, whole = (median_time(step, "cuda", budget=0.25).median for step in steps)
        row = {"D": D, "window": WINDOW, "deterministic": deterministic, "window_ms": some * 1e3,
               "causal_ms": whole * 1e3, "share_of_pairs": share, "of_share": some / whole / share}  # fmt: skip
        row["passes"] = row["of_share"] <= WINDOW_BAR
        rows.append(row)
        print(f"D{D} window {WINDOW} {'deterministic' if deterministic else 'any order':13}: {some * 1e3:.2f} of "
              f"{whole * 1e3:.2f} ms, {row['of_share']:.2f} of its share {share:.3f}"
              f"{'' if row['passes'] else '  ABOVE THE BAR'}", flush=True)  # fmt: skip
    return rows


def memory(T: int, D: int, deterministic: bool) -> dict[str, Any]:
    """Peak above the inputs of a training step at T / 2 and T, one batch."""
    peaks = []
    for n in (T // 2, T):
        x = inputs(1, n, D)
        leaves = [t.requires_grad_() for t in x[:3]]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = flash_attention(*leaves, causal=True, deterministic=deterministic, backend="triton")
        torch.autograd.grad(o, leaves, x[3])
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del leaves, o, x
    row = {"T": T, "D": D, "H": H, "deterministic": deterministic, "peak_bytes": peaks[1],
           "peak_bytes_at_half_T": peaks[0], "bytes_of_T_by_T_in_bf16": 2 * H * T * T}  # fmt: skip
    row["passes"] = peaks[1] <= 2.1 * peaks[0] and peaks[1] < T * T
    print(f"T{T} D{D} {'deterministic' if deterministic else 'any order'}: peak {peaks[1] / 2**20:.0f} MiB, "
          f"{peaks[0] / 2**20:.0f} at half T; one head's scores in a byte each would be {T * T / 2**20:.0f}"
          f"{'' if row['passes'] else '  FAILS'}", flush=True)  # fmt: skip
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="T of rates and windows (default: %(default)s)")
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64], help="head sizes D (default: 128 64)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    device = torch.device("cuda")
    found: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "dtype": "bf16", "B": B, "H": H,
                             "T": args.tokens}  # fmt: skip
    print(found["device"], "torch", found["torch"], flush=True)
    found["rates"] = [row for D in args.heads for causal in (False, True) for row in rates(args.tokens, D, causal)]
    found["windows"] = [row for D in args.heads for row in windows(args.tokens, D)]
    found["memory"] = [memory(32768, D, deterministic) for D in args.heads for deterministic in (False, True)]
    failed = sum(not row["passes"] for part in ("rates", "windows", "memory") for row in found[part])
    found["failed"] = failed
    print(f"{failed} of the bars missed")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
