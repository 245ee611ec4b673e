"""One judgement of the op's outputs: float64 on the same inputs, the contract's limits, exact structural zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.reference.wy_dqkg import wy_dqkg as reference
from mindspeed_kda.testing.inputs import to_float64, valid_elements
from mindspeed_kda.testing.metrics import Errors, assert_accurate


def judge(kwargs: dict[str, object]) -> WyDqkgGrads:
    """The op in float64 on the same rounded inputs."""
    return reference(wy_dqkg.check(**to_float64(kwargs)))  # type: ignore[arg-type]


def assert_right(got: Sequence[Tensor], kwargs: dict[str, object]) -> dict[str, Errors]:
    """Raises AssertionError where an output misses its shape, dtype, limits or structural zeros; returns the errors.

    RMS ratio and mixed tolerance are taken over the elements that are not structurally zero; those that are must be 0
    to the bit pattern's value. A sum that is empty for every token (dA where all chunks have one row) is all zeros.
    """
    call = wy_dqkg.check(**kwargs)  # type: ignore[arg-type]
    errors = {}
    for (name, shape, dtype), x, ref in zip(wy_dqkg.output_specs(call), got, judge(kwargs), strict=True):
        assert tuple(x.shape) == shape, f"{name}: expected shape {shape}, got {tuple(x.shape)}"
        assert x.dtype == dtype, f"{name}: expected {dtype}, got {x.dtype}"
        valid = valid_elements(name, ref, kwargs)
        errors[name] = assert_accurate(name, x, ref, call.dtype, valid=valid)
        padding = torch.where(valid.to(x.device).expand_as(x), torch.zeros_like(x), x)
        assert torch.equal(padding, torch.zeros_like(x)), f"{name}: structural zeros hold something else"
    return errors
