"""Real inputs: what a training step hands to ``chunk_kda`` and to ``chunk_kda_bwd_wy_dqkg_fused``.

How to use it, with ``step`` one forward and backward of any model that calls ``mindspeed_kda.chunk_kda``::

    calls = capture(lambda: model(x).backward(), dtype=torch.bfloat16)     # one per chunk_kda call, last layer first
    grads = chunk_kda_bwd_wy_dqkg_fused(**calls[0], backend="triton")

or, to keep the raw inputs::

    with record_calls() as calls:
        model(x).backward()
    kwargs = op_inputs(calls[0], dtype=torch.float16, state_dtype=torch.float32)

The op's tensors (A, v_new, h, dh, dv and the rest) are computed by the reference from the raw inputs, in float32 or
float64, and rounded once to the dtypes asked for. Whichever backend ran the step, its inputs and do are what is
recorded. The backward passes of every thread are seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import autograd, chunks
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.contracts.wy_dqkg import wide
from mindspeed_kda.reference import chunk_kda as reference


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One ``chunk_kda`` call of a training step: its keyword arguments (copies), do, and dht or None."""

    arguments: dict[str, Any]
    do: Tensor
    dht: Tensor | None


@contextlib.contextmanager
def record_calls() -> Iterator[list[RecordedCall]]:
    """Within the block, each backward of ``chunk_kda`` appends its raw inputs and output gradients, in that order."""
    calls: list[RecordedCall] = []

    def hook(call: kda.ChunkKdaCall, do: Tensor, dht: Tensor | None) -> None:
        kept = {n: t.detach().clone() if isinstance(t, Tensor) else t for n, t in kda.arguments(call).items()}
        calls.append(RecordedCall(kept, do.detach().clone(), None if dht is None else dht.detach().clone()))

    autograd.BACKWARD_HOOKS.append(hook)
    try:
        yield calls
    finally:
        autograd.BACKWARD_HOOKS.remove(hook)


def op_inputs(
    recorded: RecordedCall,
    *,
    dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    state_v_first: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of ``chunk_kda_bwd_wy_dqkg_fused`` for this call.

    ``dtype`` is the main dtype (None: the call's own); h and dh are in ``state_dtype`` (None: float32, or float64 with
    a float64 main), in the layout asked for. The reference computes in float64 where the main dtype is float64.
    """
    arguments = dict(recorded.arguments)
    main = arguments["q"].dtype if dtype is None else dtype
    if main == torch.float64:
        arguments = {n: t.double() if isinstance(t, Tensor) and n != "cu_seqlens" else t for n, t in arguments.items()}
    call = kda.check(**arguments)
    dht = None if recorded.dht is None else recorded.dht.to(wide(call.dtype))
    out: dict[str, Any] = reference.op_inputs(call, recorded.do.to(call.dtype), dht)
    NT = call.NT if call.cu_seqlens is None else chunks.count_chunks(call.cu_seqlens.tolist(), call.BT)
    for name, t in out.items():
        if name in ("h", "dh"):
            out[name] = (t[:, :NT].mT if state_v_first else t[:, :NT]).to(state_dtype or wide(main)).contiguous()
        else:
            out[name] = t.to(wide(main) if name == "g" else main)
    out.update(scale=call.scale, chunk_size=call.BT, state_v_first=state_v_first)
    if call.cu_seqlens is not None:
        out["cu_seqlens"] = call.cu_seqlens
    return out


def capture(step: Callable[[], Any], **options: Any) -> list[dict[str, Any]]:
    """Runs ``step`` and returns the op's inputs of each ``chunk_kda`` call, in the order of their backward passes.

    ``options`` go to ``op_inputs``. Raises RuntimeError where no backward of ``chunk_kda`` ran.
    """
    with record_calls() as calls:
        step()
    if not calls:
        raise RuntimeError("capture: expected the step to run a backward of mindspeed_kda.chunk_kda, got none")
    return [op_inputs(call, **options) for call in calls]
