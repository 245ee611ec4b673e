"""Executor of ``chunk_kda``, forward and backward: inputs, float64 golden, same-precision control, device under test.

Outputs are o, final_state (where asked for) and the gradient of every tensor given, from do and dht.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

if (root := str(Path(__file__).resolve().parents[3])) not in sys.path:  # ATK loads this file by its path
    sys.path.insert(0, root)

from mindspeed_kda import chunk_kda
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.contracts.wy_dqkg import wide
from mindspeed_kda.reference import chunk_kda as reference
from mindspeed_kda.testing.inputs import kda_inputs, to_float64, valid_elements
from mindspeed_kda.testing.oracle import DIFFERENTIABLE, gradients
from tests.atk.plugin import DTYPES, lay_out, register_executor
from tests.atk.records import Spec

OP = contract.OP
FUNCTION = chunk_kda
PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")


def build(spec: Spec, device: torch.device) -> dict[str, Any]:
    """``arguments`` of the call, do and dht, every tensor already rounded to the dtype that the op receives."""
    arguments, do, dht = kda_inputs(
        spec["B"], spec["T"], spec["H"], spec["K"], spec["V"], spec["chunk_size"],
        HV=spec["HV"],
        dtype=DTYPES[spec["dtype"]],
        g_dtype=DTYPES[spec["g_dtype"]],
        beta_dtype=DTYPES[spec["beta_dtype"]],
        lengths=spec["lengths"],
        cu_dtype=DTYPES[spec["cu_dtype"]],
        state_v_first=spec["state_v_first"],
        decay=spec["decay"],
        gate=spec["gate"],
        dt_bias=spec["dt_bias"],
        qk_l2norm=spec["qk_l2norm"],
        beta_sigmoid=spec["beta_sigmoid"],
        allow_neg_eigval=spec["allow_neg_eigval"],
        initial_state=spec["initial_state"],
        output_final_state=spec["output_final_state"],
        device=device,
        seed=spec["seed"],
    )  # fmt: skip
    x: dict[str, Any] = dict(arguments)
    for name in ("q", "k", "v", "g"):
        x[name] = lay_out(x[name], spec["layout"])
    return {"arguments": x | {"scale": spec["scale"]}, "do": lay_out(do, spec["layout"]), "dht": dht}


def arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``FUNCTION``."""
    out: dict[str, Any] = inputs["arguments"]
    return out


def golden(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The chunked definition in float64 (tests hold it against the token recurrence), on the rounded inputs."""
    dht = inputs["dht"]
    return gradients(
        partial(chunk_kda, backend="torch"),
        to_float64(inputs["arguments"]),
        inputs["do"].double(),
        None if dht is None else dht.double(),
    )


def control(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The same formulas in plain PyTorch with every tensor and every step in the main dtype."""
    with mock.patch.object(reference, "wide", lambda main: main):
        return run(inputs, "torch")


def run(inputs: dict[str, Any], backend: str | None) -> dict[str, Tensor]:
    return gradients(partial(chunk_kda, backend=backend), inputs["arguments"], inputs["do"], inputs["dht"])


def dtypes(inputs: dict[str, Any]) -> dict[str, torch.dtype]:
    x = inputs["arguments"]
    out = {"o": x["q"].dtype, "final_state": wide(x["q"].dtype)}
    return out | {f"d{name}": x[name].dtype for name in DIFFERENTIABLE if x.get(name) is not None}


def valid(name: str, golden: Tensor, inputs: dict[str, Any]) -> Tensor | None:
    return valid_elements(name, golden, inputs["arguments"]) if name in PER_TOKEN else None


register_executor(sys.modules[__name__])
