"""flash-linear-attention's own chunk_kda with this package's op in the place of its own: gradients, and what it gains.

    python benchmarks/fla_swap.py --json benchmarks/results/fla_swap.json

Its module's op is replaced for the length of a call (nowhere but here). Gradients of both are held against the float64
reference at a small T, within the tolerances of its own test of chunk_kda (tests/ops/test_kda.py, RMS of the error over
RMS of the value), then forward with backward is timed with either op. Raw contract: norm of q and k, gate and sigmoid
of beta in the op.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton_tuning import Tuning, known

from mindspeed_kda import chunk_kda, chunk_kda_bwd_wy_dqkg_fused
from mindspeed_kda.testing.timing import device_name, median_time

TOLERANCES = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "g": 2e-2, "beta": 2e-2, "A_log": 1e-3, "dt_bias": 1e-3}
FLAGS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def inputs(tokens: int, heads: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    gen = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    leaves = {name: randn(1, tokens, heads, size).to(dtype) for name in ("q", "k", "v", "g")}
    leaves["beta"] = randn(1, tokens, heads).to(dtype)
    leaves["A_log"] = torch.empty(heads, device="cuda").uniform_(1, 16, generator=gen).log()
    leaves["dt_bias"] = randn(heads * size)
    return {name: t.requires_grad_() for name, t in leaves.items()}


def gradients(fn: Callable[..., Any], leaves: dict[str, Tensor], do: Tensor) -> tuple[Tensor, ...]:
    o = fn(**leaves, **FLAGS, safe_gate=True, lower_bound=-5.0)[0]
    return torch.autograd.grad(o, list(leaves.values()), do)


def ours(
    q: Tensor, k: Tensor, v: Tensor, v_new: Tensor, g: Tensor, beta: Tensor, A: Tensor, h: Tensor, do: Tensor,
    dh: Tensor, dv: Tensor, scale: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    chunk_size: int = 64, chunk_indices: Tensor | None = None, **_unused: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return chunk_kda_bwd_wy_dqkg_fused(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices,
        state_v_first=state_v_first, backend="cuda",
    )  # fmt: skip


@contextlib.contextmanager
def swapped(module: Any) -> Iterator[None]:
    theirs = module.chunk_kda_bwd_wy_dqkg_fused
    module.chunk_kda_bwd_wy_dqkg_fused = ours
    try:
        yield
    finally:
        module.chunk_kda_bwd_wy_dqkg_fused = theirs


def error(got: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def compared(
    args: argparse.Namespace, theirs: Callable[..., Any], chunk_bwd: Any, result: dict[str, Any], start: float
) -> int:
    dtype = DTYPES[args.dtype]
    leaves = inputs(512, args.heads, 128, dtype)
    do = torch.randn_like(leaves["v"])
    exact = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    expected = gradients(lambda **kw: chunk_kda(**kw, backend="torch"), exact, do.double())
    found = {"own": gradients(theirs, leaves, do)}
    print(f"own op tuned [{time.monotonic() - start:.0f} s]", flush=True)
    with swapped(chunk_bwd):
        found["swapped"] = gradients(theirs, leaves, do)
    failed = False
    for name, grads in found.items():
        errors = {n: error(g, e) for n, g, e in zip(leaves, grads, expected, strict=True)}
        result[f"{name}_errors"] = errors
        failed |= name == "swapped" and not all(errors[n] <= limit for n, limit in TOLERANCES.items())
        print(name, {n: f"{e:.2e}" for n, e in errors.items()}, flush=True)

    leaves = inputs(args.tokens, args.heads, 128, dtype)
    do = torch.randn_like(leaves["v"])
    for name, context in (("own", contextlib.nullcontext()), ("swapped", swapped(chunk_bwd))):
        with context:
            timing = median_time(lambda: gradients(theirs, leaves, do), "cuda", budget=1.0, flush=False)
        result[f"{name}_us"] = timing.median * 1e6
        print(
            f"{name}: forward and backward {timing.median * 1e6:.0f} us [{time.monotonic() - start:.0f} s]", flush=True
        )
    result["gain"] = result["own_us"] / result["swapped_us"]
    print(f"{result['gain']:.3f} times as fast with the op swapped; gradients {'too far off' if failed else 'within'}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="T of the timed calls (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="that of its tests (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    try:
        from fla.ops.kda import chunk_bwd
        from fla.ops.kda import chunk_kda as theirs
    except ImportError as why:
        raise SystemExit(f"flash-linear-attention cannot be imported: {why}") from None
    start = time.monotonic()
    result: dict[str, Any] = {
        "device": device_name(torch.device("cuda")), "torch": torch.__version__, "dtype": args.dtype,
        "heads": args.heads, "tokens": args.tokens, "check_tokens": 512,
    }  # fmt: skip

    with Tuning(known()):
        return compared(args, theirs, chunk_bwd, result, start)


if __name__ == "__main__":
    sys.exit(main())
