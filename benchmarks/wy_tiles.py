"""Time of each Triton stage on an NVIDIA GPU under other tiles: where the rows of tiling.TABLE come from.

    python benchmarks/wy_tiles.py                       all candidates, fp16 and fp32
    python benchmarks/wy_tiles.py --dtype fp32 --products tf32x3 bf16x6

Candidates compile in processes of their own first, since that is what takes the time. Each result is compared with
float64 before it is timed. Sizes: B1 T2048, K = V = 128, chunk 64, fp32 state.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os

import torch
from torch.profiler import ProfilerActivity, profile

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.wy_dqkg import plan, specs
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.timing import FLUSH_BYTES, device_name
from mindspeed_kda.testing.wy_check import assert_right

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CANDIDATES = {
    16: ((64, 64, 64, 4), (64, 64, 32, 4), (64, 64, 64, 8), (128, 64, 64, 8), (32, 64, 64, 4)),
    32: (
        (32, 16, 32, 4), (32, 32, 32, 4), (32, 32, 64, 4), (32, 32, 64, 8), (64, 16, 64, 4), (64, 32, 32, 4),
        (64, 32, 64, 4), (64, 32, 64, 8), (64, 64, 64, 4), (64, 64, 64, 8), (128, 32, 64, 8),
    ),
}  # fmt: skip
"""BK, BV, BDA and warps by width of the main dtype."""
ROUNDS = 10


def stage_times(kwargs: dict[str, object]) -> dict[str, float]:
    """Microseconds of each kernel of one call, with the L2 overwritten before it."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(ROUNDS):
            flush.zero_()
            op(**kwargs, backend="triton")
        torch.cuda.synchronize()
    kernels = (e for e in found.key_averages() if "chunk_kda_bwd_kernel" in e.key)
    return {e.key.removeprefix("chunk_kda_bwd_kernel_"): e.self_device_time_total / ROUNDS for e in kernels}


def choose(rows: tuple[tiling.Row, ...], products: str) -> None:
    """Every call takes these tiles, and multiplies float32 so."""
    tiling.TABLE = rows
    tiling.tile.cache_clear()
    specs.float32_products = lambda: products
    plan._REPEATED.clear()


def compile_one(job: tuple[str, str, tuple[tiling.Row, ...]]) -> str | None:
    """Compiles in this process, for Triton's cache on disk; the first line of what went wrong, or None."""
    name, products, rows = job
    choose(rows, products)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            op(**_inputs(DTYPES[name], 64, 1), backend="triton")
            torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is a row of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
    return None


def _inputs(dtype: torch.dtype, T: int, heads: int) -> dict[str, object]:
    return wy_inputs(B=1, T=T, H=heads, K=128, V=128, BT=64, dtype=dtype, state_dtype=torch.float32, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp16", "fp32"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--products", nargs="+", default=[specs.float32_products()],
                        help="of float32: ieee, tf32x3, bf16x6 (default: what the package takes)")  # fmt: skip
    args = parser.parse_args()
    table = tiling.TABLE
    jobs = [
        (name, products, rows)
        for name in args.dtype
        for products in (args.products if name == "fp32" else args.products[:1])
        for bits in (DTYPES[name].itemsize * 8,)
        for rows in (table, *(_everywhere(bits, *candidate) for candidate in CANDIDATES[bits]))
    ]
    # forked before CUDA starts here
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        failed = pool.map(compile_one, jobs, chunksize=1)
    print(device_name(torch.device("cuda")))
    calls = {name: _inputs(DTYPES[name], 2048, args.heads) for name in args.dtype}
    for (name, products, rows), why in zip(jobs, failed, strict=True):
        label = "the table" if rows is table else "BK {0.BK} BV {0.BV} BDA {0.BDA} warps {0.num_warps}".format(rows[0])
        label = f"{name} {products if name == 'fp32' else ''} {label}"
        if why is not None:
            print(f"{label}: {why}", flush=True)
            continue
        choose(rows, products)
        kwargs = calls[name]
        assert_right(op(**kwargs, backend="triton"), kwargs)
        times = stage_times(kwargs)
        each = "  ".join(f"{stage} {us:.1f}" for stage, us in times.items())
        print(f"{label}: {sum(times.values()):.1f} us  ({each})", flush=True)


def _everywhere(bits: int, BK: int, BV: int, BDA: int, warps: int) -> tuple[tiling.Row, ...]:
    return (tiling.Row("cuda", bits, None, (), BK, BV, BDA, "a candidate", num_warps=warps),)


if __name__ == "__main__":
    main()
