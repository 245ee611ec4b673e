"""Schemas and fake implementations for ``torch.compile``: one opaque operator per public op.

Eager calls do not pass through here (a Python operator costs tens of microseconds a call); ``api`` takes this way only
while Dynamo traces, so that no graph break occurs. The backend is chosen when the operator runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kda.contracts import wy_dqkg as wy
from mindspeed_kda.registry import REGISTRY


@torch.library.custom_op("mindspeed_kda::chunk_kda_bwd_wy_dqkg_fused", mutates_args=())
def chunk_kda_bwd_wy_dqkg_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    chunk_indices: Tensor | None,
    state_v_first: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = wy.check(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices, state_v_first
    )
    return tuple(REGISTRY.choose(wy.OP, call, call.device.type, backend).load()(call))


@chunk_kda_bwd_wy_dqkg_fused.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(wy.empty_outputs(wy.check(*arguments[:-1])))  # all but backend
