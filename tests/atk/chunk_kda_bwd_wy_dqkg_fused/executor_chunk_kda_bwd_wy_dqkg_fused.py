"""Executor of ``chunk_kda_bwd_wy_dqkg_fused``: inputs, float64 golden, same-precision control, device under test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if (root := str(Path(__file__).resolve().parents[3])) not in sys.path:  # ATK loads this file by its path
    sys.path.insert(0, root)

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused, chunks
from mindspeed_kda.contracts import wy_dqkg as contract
from mindspeed_kda.reference.wy_dqkg import wy_dqkg_in
from mindspeed_kda.testing.inputs import to_float64, valid_elements, wy_inputs
from tests.atk.plugin import DTYPES, lay_out, register_executor
from tests.atk.records import Spec

OP = contract.OP
FUNCTION = chunk_kda_bwd_wy_dqkg_fused
TOKEN_TENSORS = ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv")


def build(spec: Spec, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the call, every tensor already rounded to the dtype that the op receives."""
    x: dict[str, Any] = wy_inputs(
        spec["B"], spec["T"], spec["H"], spec["K"], spec["V"], spec["chunk_size"],
        HV=spec["HV"],
        dtype=DTYPES[spec["dtype"]],
        state_dtype=DTYPES[spec["state_dtype"]],
        beta_dtype=DTYPES[spec["beta_dtype"]],
        lengths=spec["lengths"],
        cu_dtype=DTYPES[spec["cu_dtype"]],
        state_v_first=spec["state_v_first"],
        decay=spec["decay"],
        cumsum=spec["cumsum"],
        device=device,
        seed=spec["seed"],
    )  # fmt: skip
    for name in ("v", "do", "h"):
        x[name] = x[name] * spec["magnitude"]
    for name in TOKEN_TENSORS:
        if x[name].dim() == 4 or spec["layout"] != "sliced":
            x[name] = lay_out(x[name], spec["layout"])
    if spec["chunk_indices"]:
        cu = x["cu_seqlens"]
        x["chunk_indices"] = chunks.chunk_indices(cu, spec["chunk_size"], x["h"].shape[1])
    x["scale"] = spec["scale"]
    return x


def arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``FUNCTION``."""
    return inputs


def golden(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The definition in float64 on the rounded inputs, on their device."""
    return chunk_kda_bwd_wy_dqkg_fused(**to_float64(inputs), backend="torch")._asdict()  # type: ignore[arg-type]


def control(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The same formulas in plain PyTorch with every tensor in the main dtype (g's decays alone in float32)."""
    call = contract.check(**inputs)
    return wy_dqkg_in(call, call.dtype)._asdict()


def run(inputs: dict[str, Any], backend: str | None) -> dict[str, Tensor]:
    return chunk_kda_bwd_wy_dqkg_fused(**inputs, backend=backend)._asdict()


def dtypes(inputs: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: dtype for name, _, dtype in contract.output_specs(contract.check(**inputs))}


def valid(name: str, golden: Tensor, inputs: dict[str, Any]) -> Tensor | None:
    return valid_elements(name, golden, inputs)


register_executor(sys.modules[__name__])
