"""What the tests of chunk_kda beside this file run inside the interpreter's process."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_kda import chunk_kda
from mindspeed_kda.contracts import checks
from mindspeed_kda.testing.kda_inputs import KdaInputs
from mindspeed_kda.testing.oracle import gradients


def step(inputs: KdaInputs) -> dict[str, Tensor]:
    """o, final state and every gradient on the Triton backend; values of cu_seqlens are not to be read on the host."""
    with mock.patch.object(checks, "values_readable", return_value=False):
        return gradients(chunk_kda, inputs.arguments | {"backend": "triton"}, inputs.do, inputs.dht)


def as_on_cuda(inputs: KdaInputs) -> dict[str, Tensor]:
    """With the choices of an NVIDIA GPU that do not need one: anchors gathered, rows and columns in one launch."""
    from mindspeed_kda.contracts import chunk_kda as contract
    from mindspeed_kda.npu_kernels.chunk_kda import plan, specs

    on_cuda = specs.pair_parts(dataclasses.replace(plan.sizes_of(contract.check(**inputs.arguments)), target="cuda"))
    with (
        mock.patch.object(specs.Sizes, "gathers", True),
        mock.patch.object(plan, "pair_parts", return_value=on_cuda),
    ):
        return step(inputs)


def forward_only(inputs: KdaInputs) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        return chunk_kda(**inputs.arguments, backend="triton")


def saved_bytes(inputs: KdaInputs) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """Bytes that forward saves besides the inputs, their shapes and dtypes, and what saved_specs says."""
    from mindspeed_kda.contracts import chunk_kda as contract
    from mindspeed_kda.npu_kernels.chunk_kda import plan

    call = contract.check(**inputs.arguments)
    saved = plan.forward(call)[2]
    found = tuple((tuple(t.shape), t.dtype) for t in saved)
    return sum(t.numel() * t.element_size() for t in saved), found, plan.saved_specs(call)
