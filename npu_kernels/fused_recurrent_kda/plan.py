"""One call of ``fused_recurrent_kda``: outputs and one launch. Nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall, output_specs
from mindspeed_kda.npu_kernels.chunk_kda.plan import sizes_of
from mindspeed_kda.npu_kernels.fused_recurrent_kda.specs import STAGE, constants
from mindspeed_kda.npu_kernels.launch import launch, on_device


def run(call: ChunkKdaCall) -> tuple[Tensor, Tensor | None]:
    """o and the final state (None where it is not asked for). The call is checked."""
    c = call
    sizes = sizes_of(c, final=c.output_final_state)
    (o_shape, o_dtype), (ht_shape, ht_dtype) = output_specs(c)
    # rows of no sequence are zero, and only a packed call can have some
    make = torch.empty if c.cu_seqlens is None else torch.zeros
    with torch.no_grad(), on_device(c.device):
        o = make(o_shape, dtype=o_dtype, device=c.device)
        ht = torch.empty(ht_shape, dtype=ht_dtype, device=c.device) if c.output_final_state else None
        given = {"q": c.q, "k": c.k, "v": c.v, "x": c.g, "beta": c.beta, "dt_bias": c.dt_bias}
        given |= {"h0": c.initial_state, "cu_seqlens": c.cu_seqlens}
        # exp(A_log) for every channel: a row for the kernel, since Ascend reads a lone fp32 scalar element by element
        given["rates"] = None if c.A_log is None else c.A_log.exp().unsqueeze(1).expand(-1, c.K)
        values: dict[str, Any] = {n: None if t is None else t.contiguous() for n, t in given.items()}
        values |= {"o": o, "ht": ht, "scale": c.scale, "bound": c.lower_bound or 0.0, "beta_scale": c.beta_scale}
        values |= {"T": c.T, "n_seqs": c.N}
        tile = sizes.tile(STAGE.name)
        tasks = c.N * c.HV * chunks.cdiv(c.V, tile.BV)
        launch(STAGE.kernel, c.device, tasks, STAGE.pick(values), constants(sizes), tile, cube=STAGE.cube)
    return o, ht
