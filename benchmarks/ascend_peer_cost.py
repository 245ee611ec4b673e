"""The cost report on flash-linear-attention's Ascend kernels of this op, beside ours: same counter, target and shape.

Their launches are captured by calling their host function on CPU tensors; each captured kernel is compiled with the
options of its launch and counted like ours. What their host function does around the kernels (transposed copies, zero
fills) is counted as `host passes`. They ask for a later triton-ascend than the 3.2.0 that is on PyPI and both sides are
compiled with here; hivmc and silicon are not involved.

Needs an environment of its own, since fla-core wants stock Triton 3.3 or later:

    python3.11 -m venv .venv-peer
    .venv-peer/bin/pip install torch 'numpy<2.4' -e '.[ascend-check]' einops
    .venv-peer/bin/pip install --no-deps fla-core==0.6.0
    .venv-peer/bin/python benchmarks/ascend_peer_cost.py --write benchmarks/results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_kda.cli.common import table
from mindspeed_kda.npu_kernels.ascend_check import cost_report, toolchain
from mindspeed_kda.npu_kernels.ascend_check.compile import OPTION_FLAGS, compile_kernel
from mindspeed_kda.npu_kernels.ascend_check.cost import Cost
from mindspeed_kda.npu_kernels.ascend_check.cost_report import Counted
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, COST_CHUNKS, TRITON_TYPES, KernelSpec, pointer
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS, Target, target_named
from mindspeed_kda.npu_kernels.wy_dqkg import gate

K, V, BT = 128, 128, 64
NEEDED = (
    "needs fla-core 0.6.0 and einops beside triton-ascend, in an environment of its own (see this file's first lines)"
)


class HostPasses(TorchDispatchMode):
    """Bytes of the copies and fills that host code launches between kernels."""

    COPIES = ("aten.clone", "aten._to_copy", "aten.copy_")
    FILLS = ("aten.zeros", "aten.zeros_like", "aten.zero_", "aten.fill_", "aten.full", "aten.new_zeros")

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost(launches=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        if isinstance(result, torch.Tensor) and name in (*self.COPIES, *self.FILLS):
            size = result.numel() * result.element_size()
            self.cost.written[name] += size
            self.cost.read[name] += size if name in self.COPIES else 0
            self.cost.launches += 1
        return result


def captured(target: Target, dtype: torch.dtype) -> tuple[list[tuple[Any, KernelSpec]], Cost]:
    """Their kernels with the launches of one call of the op, and their host passes."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, KernelSpec]] = []
    per = COST_CHUNKS * gate.HV

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.append((kernel, _spec(kernel, args, grid, kwargs, per)))

    torch.npu = torch.cpu  # their device helpers ask for it; nothing runs on it
    run, JITFunction.run = JITFunction.run, record
    try:
        from fla.ops.kda.backends.triton_ascend.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused_npu as op

        T = COST_CHUNKS * BT
        keys, values, state = (1, T, gate.H, K), (1, T, gate.HV, V), (1, COST_CHUNKS, gate.HV, K, V)
        shapes = {
            "q": keys,
            "k": keys,
            "v": values,
            "v_new": values,
            "do": values,
            "dv": values,
            "h": state,
            "dh": state,
        }
        inputs: dict[str, Any] = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        inputs |= {"g": torch.zeros(1, T, gate.HV, K), "beta": torch.zeros(1, T, gate.HV)}
        inputs |= {"A": torch.zeros(1, T, gate.HV, BT, dtype=dtype), "scale": K**-0.5, "chunk_size": BT}
        with HostPasses() as passes:
            op(**inputs)
    finally:
        JITFunction.run = run
    return launches, passes.cost.scaled(per)


def _spec(kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any], per: int) -> KernelSpec:
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    scalars: dict[str, int] = {}
    for parameter in kernel.params:
        name, value = parameter.name, values.get(parameter.name, parameter.default)
        if isinstance(value, torch.Tensor):
            signature[name] = pointer(str(value.dtype).removeprefix("torch."))
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = CONSTEXPR, value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            scalars |= {} if isinstance(value, float) else {name: int(value)}
    options = {name: value for name, value in kwargs.items() if name in OPTION_FLAGS}
    blocks = (grid(values) if callable(grid) else grid)[0]
    stage = kernel.__name__.removeprefix("chunk_kda_bwd_kernel_").removesuffix("_npu")
    return KernelSpec(
        "peer", stage, "captured:launch", tuple(signature.items()), tuple(constants.items()),
        options=tuple(options.items()), scalars=tuple(scalars.items()), per=per, blocks=blocks,
    )  # fmt: skip


def theirs(target: Target, dtype: torch.dtype) -> list[Counted]:
    """Cost per stage. Raises RuntimeError for a kernel of theirs that does not compile here."""
    found = []
    with toolchain.stand_in_driver(target), tempfile.TemporaryDirectory() as name:
        launches, passes = captured(target, dtype)
        for i, (kernel, spec) in enumerate(launches):
            folder = Path(name) / str(i)
            report = compile_kernel(
                kernel, dict(spec.signature), dict(spec.constants), target, folder, dict(spec.options)
            )
            if report.stopped_in is not None:
                raise RuntimeError(f"{spec.stage} does not compile for {target.name}: {report.error}")
            found.append(cost_report.counted_in(folder, spec))
    return [*cost_report.by_stage(found), Counted("host passes", passes)]


def ours(target: Target, dtype: str) -> list[Counted]:
    return cost_report.measure(list(gate.specs(cost_report.cost_config(dtype), target)), target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=",".join(TARGETS), help="comma-separated; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=list(TRITON_TYPES)[:3])
    parser.add_argument("--write", metavar="DIR", help="write ascend_peer_cost.json there")
    args = parser.parse_args()
    missing = toolchain.missing() or (NEEDED if importlib.util.find_spec("fla") is None else None)
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module="fla")
    found = []
    for name in args.target.split(","):
        target = target_named(name)
        sides = {"ours": ours(target, args.dtype), "fla-core": theirs(target, getattr(torch, args.dtype))}
        bounds = {side: cost_report.op_bound(counted, target) for side, counted in sides.items()}
        for side, counted in sides.items():
            print(
                f"{side}, {name}, {args.dtype} K{K} V{V} BT{BT}: at least {bounds[side] * 1e9:.1f} ns per (chunk, head)"
            )
            print(f"{table(cost_report.HEADER, cost_report.rows(counted, target))}\n")
        print(f"{name}: bound of ours / theirs = {bounds['ours'] / bounds['fla-core']:.3f}\n", flush=True)
        found += [{"side": side, "dtype": args.dtype, **cost_report.as_json(c, target)} for side, c in sides.items()]
    print(f"{cost_report.NOTE}\nBoth sides compiled with triton-ascend {importlib.metadata.version('triton-ascend')}.")
    if args.write:
        versions = {**toolchain.versions(), "fla-core": importlib.metadata.version("fla-core")}
        path = Path(args.write) / "ascend_peer_cost.json"
        path.write_text(json.dumps({"note": cost_report.NOTE, "versions": versions, "reports": found}, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
