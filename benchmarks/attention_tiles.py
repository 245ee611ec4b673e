"""Time of each attention kernel on an NVIDIA GPU under other tiles: where the rows of tiling.ATTENTION come from.

    python benchmarks/attention_tiles.py                          all stages, D 64, 128, 256, causal and not
    python benchmarks/attention_tiles.py --stages attention_dq --heads 128 --json out.json
    python benchmarks/attention_tiles.py --window 1024            causal with a window to the left

bf16, B2 H16 T8192. Each result is held against PyTorch's flash kernel before it is timed, with a window against the
tiles that the table has. Candidates compile in processes of their own first, since that is what takes the time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda.contracts import flash_attention as contract
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.flash_attention import plan
from mindspeed_kda.npu_kernels.flash_attention.specs import ATOMIC
from mindspeed_kda.testing.timing import device_name, median_time

CANDIDATES = {
    ("attention", 64): (
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4),
    ),
    ("attention", 128): ((64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    ("attention", 256): (
        (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 1), (128, 64, 8, 2),
    ),
    ("attention_dkdv", 64): (
        (64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 128, 8, 3),
    ),
    ("attention_dkdv", 128): ((32, 128, 8, 4), (64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 4), (128, 64, 8, 3)),
    ("attention_dkdv", 256): (
        (32, 32, 4, 2), (32, 64, 8, 2), (32, 64, 8, 3), (64, 32, 4, 1), (64, 64, 8, 1), (64, 64, 8, 2),
    ),
    (ATOMIC, 64): ((64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 4, 2), (128, 64, 4, 3)),
    (ATOMIC, 128): ((64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 8, 4)),
    (ATOMIC, 256): ((32, 64, 8, 2), (64, 64, 8, 1)),
    ("attention_dq", 64): (
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3),
    ),
    ("attention_dq", 128): ((64, 64, 4, 2), (128, 32, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    ("attention_dq", 256): ((64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 1), (64, 64, 8, 2), (128, 32, 8, 2)),
}  # fmt: skip
"""BM, BN, warps and stages by stage and head size."""
TABLE = tiling.ATTENTION
AGREE = 2e-2
"""Largest RMS ratio between ours and the flash kernel's result."""
B, H = 2, 16


def choose(tile: tuple[int, ...]) -> None:
    """Every stage takes this tile."""
    tiling.ATTENTION = (tiling.AttentionRow("cuda", None, None, (), (), *tile, "a candidate"),)
    tiling.attention_tile.cache_clear()


def table() -> None:
    """Every stage takes the table's tile again."""
    tiling.ATTENTION = TABLE
    tiling.attention_tile.cache_clear()


class Work:
    """One call's tensors, and each stage on them."""

    def __init__(self, B: int, T: int, D: int, causal: bool, window: int | None = None) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        q, k, v, self.do = (torch.randn(B, T, H, D, generator=gen, device="cuda").bfloat16() for _ in range(4))
        self.call = contract.check(q, k, v, causal=causal, window=(window, None), deterministic=window is not None)
        if window is None:
            aten = torch.ops.aten
            t = [x.transpose(1, 2) for x in (q, k, v)]
            o, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(*t, 0.0, causal)
            grads = aten._scaled_dot_product_flash_attention_backward(
                self.do.transpose(1, 2), *t, o, lse, None, None, T, T, 0.0, causal, seed, offset
            )
            self.o, self.lse = o.transpose(1, 2).contiguous(), lse
            self.grads = dict(zip(("dq", "dk", "dv"), (g.transpose(1, 2) for g in grads), strict=True))
        else:
            self.o, self.lse = plan.forward(self.call)
            self.grads = plan.backward(self.call, self.o, self.lse, self.do)._asdict()
        self.r = (self.do.float() * self.o.float()).sum(-1).transpose(1, 2).contiguous()
        self.out = {name: torch.empty_like(q) for name in ("o", "dq", "dk", "dv")}
        self.total = torch.zeros(q.shape, device="cuda")

    def run(self, stage: str) -> None:
        c = self.call
        t: dict[str, Any] = {"q": c.q, "k": c.k, "v": c.v, "do": self.do, "lse": self.lse, "r": self.r}
        if stage == "attention":
            plan._launch(c, stage, {**t, "o": self.out["o"], "lse": torch.empty_like(self.lse)})
        elif stage == ATOMIC:
            self.total.zero_()
            plan._launch(c, "attention_dkdv", {**t, **self.out, "dq": self.total}, atomic=True)
            torch.mul(self.total, c.scale, out=self.out["dq"])
        elif stage == "attention_dkdv":
            plan._launch(c, stage, {**t, "dk": self.out["dk"], "dv": self.out["dv"]})
        else:
            plan._launch(c, stage, {**t, "dq": self.out["dq"]})

    def worst(self, stage: str) -> float:
        """Largest RMS ratio of what the stage writes."""
        names = {"attention": ("o",), "attention_dkdv": ("dk", "dv"), "attention_dq": ("dq",)}.get(
            stage, tuple(self.grads)
        )
        want = {"o": self.o, **self.grads}
        return max(rms_ratio(self.out[n], want[n]) for n in names)


def rms_ratio(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt())


def compile_one(job: tuple[str, int, bool, int | None, tuple[int, ...]]) -> str | None:
    """Compiles in this process, for Triton's cache on disk; the first line of what went wrong, or None."""
    stage, D, causal, window, tile = job
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            table()
            work = Work(1, 256, D, causal, window)
            choose(tile)
            work.run(stage)
            torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is a row of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
    return None


def time_of(work: Work, stage: str) -> float:
    return median_time(lambda: work.run(stage), "cuda", budget=0.05).median * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = list(dict.fromkeys(stage for stage, _ in CANDIDATES))
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--heads", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, help="keys to the left that a causal query sees (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    chosen = [(s, D) for D in args.heads for s in args.stages]
    masks = (True, False) if args.window is None else (True,)
    jobs = [(s, D, causal, args.window, tile) for (s, D) in chosen for tile in CANDIDATES[s, D] for causal in masks]
    # forked before CUDA starts here; the longest-running stages first
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        failed = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=1), strict=True))
    device = torch.device("cuda")
    rows = []
    for D, causal in itertools.product(args.heads, masks):
        table()
        work = Work(B, args.tokens, D, causal, args.window)
        for stage in args.stages:
            for tile in CANDIDATES[stage, D]:
                row = {
                    "stage": stage,
                    "D": D,
                    "causal": causal,
                    **dict(zip(("BM", "BN", "warps", "stages"), tile, strict=True)),
                }
                why = failed[stage, D, causal, args.window, tile]
                if why is None:
                    choose(tile)
                    for x in work.out.values():
                        x.fill_(torch.nan)
                    work.run(stage)
                    row["rms_ratio"] = worst = work.worst(stage)
                    why = None if worst <= AGREE else f"wrong: RMS ratio {worst:.1e}"
                row |= {"failed": why} if why else {"us": time_of(work, stage)}
                rows.append(row)
                said = why or f"{row['us']:8.1f} us"
                print(f"{stage:22} D{D} {'causal' if causal else 'full  '} {tile}: {said}", flush=True)
    if args.json:
        found = {
            "device": device_name(device),
            "torch": torch.__version__,
            "B": B,
            "H": H,
            "T": args.tokens,
            "window": args.window,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
