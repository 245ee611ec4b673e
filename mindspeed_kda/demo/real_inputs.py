"""The op's inputs as training makes them: one forward and backward of the model over real text, every layer's call."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from mindspeed_kda.demo.model import ByteModel
from mindspeed_kda.testing.capture import RecordedCall, record_calls


def record(model: ByteModel, tokens: Tensor, targets: Tensor) -> list[RecordedCall]:
    """The ``chunk_kda`` call of each layer, first layer first, in one training step on [B, T] tokens.

    do is multiplied by a power of two that brings its RMS near 1, as loss scaling does in mixed-precision training
    (the op is linear in do, dh and dv together), so that fp16 keeps its digits.
    """
    device = next(model.parameters()).device
    with record_calls() as calls:
        model.loss(tokens.to(device), targets.to(device)).backward()
    model.zero_grad(set_to_none=True)
    if not calls:
        raise RuntimeError("record: expected a model with KDA layers, got one whose KDA output is zeroed")
    return [_scaled(call) for call in reversed(calls)]


def _scaled(call: RecordedCall) -> RecordedCall:
    rms = float(call.do.double().square().mean().sqrt())
    factor = 2.0 ** -round(math.log2(rms)) if rms > 0 else 1.0
    return dataclasses.replace(call, do=call.do * factor, dht=None if call.dht is None else call.dht * factor)


def packed(call: RecordedCall, lengths: list[int]) -> RecordedCall:
    """The same call read as packed sequences: rows of the batch laid end to end and cut at ``lengths`` instead.

    Tokens left over after the last sequence stay, and belong to none. Raises ValueError where there are too few.
    """
    q = call.arguments["q"]
    bounds = [0, *itertools.accumulate(lengths)]
    total = q.shape[0] * q.shape[1]
    if bounds[-1] > total:
        raise ValueError(f"expected lengths that sum to at most {total} tokens, got {bounds[-1]}")
    arguments = dict(call.arguments)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name].reshape(1, total, *arguments[name].shape[2:])
    arguments["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=q.device)
    arguments["initial_state"], arguments["output_final_state"] = None, False
    return RecordedCall(arguments, call.do.reshape(1, total, *call.do.shape[2:]), None)
