"""Contract of ``fused_recurrent_kda``: ``chunk_kda`` without gradients, token by token.

Arguments and shapes are ``chunk_kda``'s, so its checks and its call are used; chunk size and recompute mean nothing
here. ``Backend.load()`` returns a function ``run(call) -> (o, final_state | None)``: o in the main dtype, final_state
(``wide`` dtype, state layout of the call) where ``call.output_final_state``; neither aliases an input.
"""

from __future__ import annotations

from typing import Any

from mindspeed_kda.contracts import chunk_kda
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall

OP = "fused_recurrent_kda"


def check(*tensors: Any, **options: Any) -> ChunkKdaCall:
    """Validates one call, as ``chunk_kda.check``; RuntimeError where a gradient would be wanted."""
    call = chunk_kda.check(*tensors, **options)
    if call.needs_grad:
        raise RuntimeError(
            f"{OP}: expected no tensor that requires a gradient, or torch.no_grad(): it has no backward, chunk_kda has"
        )
    return call
