"""``fused_recurrent_kda`` by its definition, one token after the other (docs/kda_math.md, sections 2 and 3).

All sequences of a dense batch step together; packed ones are one walk over the tokens, each reading and writing its own
sequence's state. Nothing is read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall
from mindspeed_kda.contracts.wy_dqkg import wide
from mindspeed_kda.reference import transforms
from mindspeed_kda.reference.products import without_autocast


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """S and S^T q after one token: state [N, HV, K, V]; q, k, decay [N, HV, K]; v [N, HV, V]; b [N, HV]."""
    state = state * decay.unsqueeze(-1)
    d = b.unsqueeze(-1) * (v - (state * k.unsqueeze(-1)).sum(-2))
    state = state + k.unsqueeze(-1) * d.unsqueeze(-2)
    return state, (state * q.unsqueeze(-1)).sum(-2)


@without_autocast
def fused_recurrent_kda(call: ChunkKdaCall) -> tuple[Tensor, Tensor | None]:
    c, compute, group = call, wide(call.dtype), call.HV // call.H

    def by_head(x: Tensor) -> Tensor:
        return x.to(compute).transpose(1, 2)

    def keys(x: Tensor) -> Tensor:
        x = by_head(x)
        x = x * transforms.inverse_norm(x) if c.qk_l2norm else x
        return x.repeat_interleave(group, dim=1)

    q, k, v = keys(c.q), keys(c.k), by_head(c.v)
    decay = transforms.log_decay(c, by_head(c.g)).exp()
    b = transforms.write_strength(c, by_head(c.beta))
    state = torch.zeros((c.N, c.HV, c.K, c.V), dtype=compute, device=c.device)
    if c.initial_state is not None:
        state = (c.initial_state.mT if c.state_v_first else c.initial_state).to(compute)
    o = torch.zeros((c.B, c.T, c.HV, c.V), dtype=c.dtype, device=c.device)
    if c.cu_seqlens is None:
        for t in range(c.T):
            state, y = _step(state, q[:, :, t], k[:, :, t], v[:, :, t], decay[:, :, t], b[:, :, t])
            o[:, t] = (c.scale * y).to(c.dtype)
    else:
        # tokens of no sequence step a state of their own, which is thrown away
        token = torch.arange(c.T, device=c.device)
        sequence = torch.searchsorted(c.cu_seqlens[1:].long().contiguous(), token, right=True)
        state = torch.cat((state, state.new_zeros(1, c.HV, c.K, c.V)))
        for t in range(c.T):
            at = sequence[t : t + 1]
            new, y = _step(state.index_select(0, at), q[:, :, t], k[:, :, t], v[:, :, t], decay[:, :, t], b[:, :, t])
            state.index_copy_(0, at, new)
            o[:, t] = torch.where((at == c.N).view(1, 1, 1), 0.0, c.scale * y).to(c.dtype)
        state = state[: c.N]
    final = (state.mT if c.state_v_first else state).clone(memory_format=torch.contiguous_format)
    return o, final if c.output_final_state else None
