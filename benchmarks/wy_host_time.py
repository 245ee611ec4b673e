"""Host time of one call of the op on an NVIDIA GPU, whole and by its pieces: microseconds, minimum and median.

    python benchmarks/wy_host_time.py --json benchmarks/results/wy_host_time.json

On a problem too small to keep the queue full. A group is 50 calls from a synchronised device on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.backends import cuda_backend
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.timing import device_name


def timed(fn: Callable[[], Any], groups: int = 150, calls: int = 50) -> tuple[float, float]:
    found = []
    for _ in range(groups):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        found.append((time.perf_counter() - start) / calls * 1e6)
    found.sort()
    return round(found[0], 2), round(found[groups // 2], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    kwargs = wy_inputs(T=64, H=1, K=128, V=128, dtype=torch.float16, state_dtype=torch.float32, device="cuda")
    op(**kwargs)
    call = wy_dqkg.check(**kwargs)
    arguments = (*call.inputs, None, None, None, call.BT, False)
    nothing = (*(x[:, :0].contiguous() for x in call.inputs), None, None, None, call.BT, False)
    operator = torch.ops.mindspeed_kda_cuda.wy_dqkg.default
    operator(*nothing, True)
    unknown = (*call.inputs, None, None, 0.123, call.BT, False)
    beta = call.beta
    pieces = {
        "the call": lambda: op(**kwargs),
        "types of the arguments": lambda: wy_dqkg.plain(*arguments),
        "whom to ask": lambda: REGISTRY.repeat(wy_dqkg.OP, "cuda", None),
        "the backend's share": lambda: cuda_backend._repeat_wy_dqkg(*arguments),
        "the operator": lambda: operator(*arguments, False),
        "the operator, one tensor an allocation": lambda: operator(*arguments, True),
        "the operator, on no token: no launch": lambda: operator(*nothing, False),
        "the operator, unknown signature: arguments alone": lambda: operator(*unknown, False),
        "checks of a new signature": lambda: wy_dqkg.check(**kwargs),
        "choice for a new signature": lambda: REGISTRY.choose(wy_dqkg.OP, call, "cuda", None),
        "torch.mul(out=) on one token": lambda: torch.mul(beta, beta, out=beta),
        "torch.empty": lambda: torch.empty((1, 64, 1, 128), device="cuda"),
    }
    result: dict[str, Any] = {"device": device_name(torch.device("cuda")), "torch": torch.__version__, "us": {}}
    for name, piece in pieces.items():
        low, median = timed(piece)
        result["us"][name] = {"min": low, "median": median}
        print(f"{name:50s} {low:7.2f} {median:7.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
