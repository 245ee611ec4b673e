"""Speed and memory of the reference: one forward and backward of ``chunk_kda`` on the ``torch`` backend.

    python benchmarks/reference.py                    # B1 T2048 H4 K=V=128 float32 on the CPU
    python benchmarks/reference.py --json --tokens 8192

The result is checked first: <do, o> + <dht, ht> = <v, dv> + <h0, dh0> (docs/kda_math.md, section 10, identity 5), in
float64 over what the op returned. Then the median of ``--repeats`` steps is taken on the wall clock (beside it the
processor time of one step, which other work on the machine changes less), and the process's largest resident memory
since its start, before and after. Exit status 1 where the identity, ``--max-seconds`` or ``--max-gigabytes`` is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.oracle import gradients
from mindspeed_kda.testing.timing import device_name, median_time

IDENTITY_LIMIT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-10}


def gigabytes() -> float:
    """Largest resident set of this process so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def identity_error(inputs: Any) -> float:
    """|left - right| of identity 5 over the root sum of squares of its terms."""
    out = gradients(chunk_kda, *inputs)
    pairs = [(inputs.do, out["o"]), (inputs.dht, out["final_state"])]
    pairs += [(-inputs.arguments["v"], out["dv"]), (-inputs.arguments["initial_state"], out["dinitial_state"])]
    terms = [x.detach().double() * y.double() for x, y in pairs]
    total = torch.stack([t.sum() for t in terms]).sum().abs()
    return float(total / torch.stack([t.square().sum() for t in terms]).sum().sqrt())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    inputs = kda_inputs(
        B=args.batch,
        T=args.tokens,
        H=args.heads,
        K=args.key,
        V=args.value,
        BT=args.chunk_size,
        gate="softplus",
        dtype=getattr(torch, args.dtype),
        backend="torch",
    )
    leaves = {
        n: t.requires_grad_() for n, t in inputs.arguments.items() if isinstance(t, Tensor) and t.is_floating_point()
    }
    before = gigabytes()

    def step() -> None:
        o, final_state = chunk_kda(**inputs.arguments)
        torch.autograd.grad([o, final_state], list(leaves.values()), [inputs.do, inputs.dht])

    def forward() -> None:
        with torch.no_grad():
            chunk_kda(**inputs.arguments)

    error = identity_error(inputs)
    start = time.process_time()
    step()
    processor = time.process_time() - start
    timing = median_time(step, "cpu", warmup=1, min_calls=args.repeats, max_calls=args.repeats)
    after = gigabytes()
    alone = median_time(forward, "cpu", warmup=1, min_calls=args.repeats, max_calls=args.repeats)
    shape = {n: getattr(args, n) for n in ("batch", "tokens", "heads", "key", "value", "chunk_size", "dtype")}
    return {
        **shape,
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "identity_error": error,
        "forward_seconds": alone.median,
        "forward_backward_seconds": timing.median,
        "processor_seconds": processor,
        "repeats": args.repeats,
        "gigabytes_with_inputs": before,
        "gigabytes_peak": after,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key", type=int, default=128)
    parser.add_argument("--value", type=int, default=128)
    parser.add_argument("--chunk-size", type=int, default=64, choices=(16, 32, 64))
    parser.add_argument("--dtype", default="float32", choices=tuple(IDENTITY_LIMIT))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps (default 5)")
    parser.add_argument("--max-seconds", type=float, default=5.0, help="limit of forward and backward (default 5)")
    parser.add_argument("--max-gigabytes", type=float, default=2.0, help="limit of resident memory (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    result = measure(args)
    misses = [
        f"{name} {result[key]:.3g} > {limit:g}"
        for name, key, limit in (
            ("identity error", "identity_error", IDENTITY_LIMIT[args.dtype]),
            ("seconds", "forward_backward_seconds", args.max_seconds),
            ("gigabytes", "gigabytes_peak", args.max_gigabytes),
        )
        if not result[key] <= limit
    ]
    result["misses"] = misses
    if args.json:
        print(json.dumps(result))
    else:
        print(f"B{args.batch} T{args.tokens} H{args.heads} K{args.key} V{args.value} {args.dtype}, {result['device']}")
        print(f"  identity 5           {result['identity_error']:.1e} (limit {IDENTITY_LIMIT[args.dtype]:.0e})")
        print(f"  forward              {result['forward_seconds']:.3f} s")
        print(f"  forward + backward   {result['forward_backward_seconds']:.3f} s (limit {args.max_seconds:g} s)")
        print(f"    processor time     {result['processor_seconds']:.3f} s, over all threads")
        print(
            f"  resident memory      {result['gigabytes_peak']:.2f} GB at its largest (limit {args.max_gigabytes:g} GB)"
        )
        print(f"    before any call    {result['gigabytes_with_inputs']:.2f} GB")
        for miss in misses:
            print(f"  missed: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
