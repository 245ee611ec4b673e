"""Time of each Triton stage on an NVIDIA GPU under other tiles: where the rows of tiling.TABLE come from.

    python benchmarks/wy_tiles.py                       all candidates, fp16 and fp32
    python benchmarks/wy_tiles.py --dtype fp32 --heads 8

Each result is compared with float64 before it is timed. Sizes: B1 T2048, K = V = 128, chunk 64, fp32 state.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.timing import FLUSH_BYTES, device_name
from mindspeed_kda.testing.wy_check import assert_right

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CANDIDATES = {
    16: ((64, 64, 64, 4), (64, 64, 32, 4), (64, 64, 64, 8), (128, 64, 64, 8), (32, 64, 64, 4)),
    32: (
        (16, 16, 16, 4), (16, 16, 16, 8), (32, 16, 32, 4), (32, 16, 32, 8), (32, 32, 32, 4), (32, 32, 64, 8),
        (64, 16, 64, 4), (64, 16, 64, 8), (64, 32, 32, 4), (64, 32, 32, 8), (64, 64, 32, 4),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp16", "fp32"])
    parser.add_argument("--heads", type=int, default=32)
    args = parser.parse_args()
    print(device_name(torch.device("cuda")))
    table = tiling.TABLE
    for name in args.dtype:
        bits = DTYPES[name].itemsize * 8
        kwargs = wy_inputs(
            B=1, T=2048, H=args.heads, K=128, V=128, BT=64, dtype=DTYPES[name], state_dtype=torch.float32, device="cuda"
        )
        for rows in (table, *(_everywhere(bits, *candidate) for candidate in CANDIDATES[bits])):
            tiling.TABLE = rows
            tiling.tile.cache_clear()
            assert_right(op(**kwargs, backend="triton"), kwargs)
            times = stage_times(kwargs)
            label = (
                "the table" if rows is table else "BK {0.BK} BV {0.BV} BDA {0.BDA} warps {0.num_warps}".format(rows[0])
            )
            each = "  ".join(f"{stage} {us:.1f}" for stage, us in times.items())
            print(f"{name} {label}: {sum(times.values()):.1f} us  ({each})", flush=True)
        tiling.TABLE = table
        tiling.tile.cache_clear()


def _everywhere(bits: int, BK: int, BV: int, BDA: int, warps: int) -> tuple[tiling.Row, ...]:
    return (tiling.Row("cuda", bits, None, (), BK, BV, BDA, "a candidate", num_warps=warps),)


if __name__ == "__main__":
    main()
