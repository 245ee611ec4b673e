"""Training, held-out loss and sampling of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kda.demo.model import ByteModel
from mindspeed_kda.demo.text import batch
from mindspeed_kda.nn import KdaState


@dataclass(frozen=True)
class Plan:
    """How long and how to train. Ends after ``steps``, or after ``seconds`` where that comes first.

    The learning rate rises over the first ``warmup`` share and then falls along a cosine to a twentieth, by the share
    of steps or of seconds that is gone, whichever is larger; so a run that time cuts short still ends annealed.
    """

    steps: int = 400
    seconds: float | None = None
    rows: int = 8
    length: int = 256
    rate: float = 4e-3
    warmup: float = 0.05
    decay: float = 0.1
    seed: int = 0

    def rate_at(self, gone: float) -> float:
        if gone < self.warmup:
            return self.rate * gone / self.warmup
        along = min((gone - self.warmup) / (1 - self.warmup), 1.0)
        return self.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along)))


@dataclass(frozen=True)
class Step:
    """One optimiser step, for a progress bar: its number, loss in nats a byte, share done, tokens a second so far."""

    number: int
    loss: float
    done: float
    tokens_per_second: float


@dataclass
class History:
    """Loss of every step; how long it took; whether time ended it before the last step."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    cut_short: bool = False


def train(model: ByteModel, tokens: Tensor, plan: Plan, report: Callable[[Step], None] = lambda step: None) -> History:
    """Trains in place on random windows of ``tokens``. Raises FloatingPointError where the loss is not finite."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(plan.seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": plan.decay}, {"params": plain, "weight_decay": 0.0}],
        lr=plan.rate,
        betas=(0.9, 0.98),
    )
    history, start = History(), time.perf_counter()
    model.train()
    for number in range(1, plan.steps + 1):
        elapsed = time.perf_counter() - start
        gone = (number - 0.5) / plan.steps
        if plan.seconds is not None:
            if elapsed >= plan.seconds and history.losses:
                history.cut_short = True
                break
            gone = max(gone, elapsed / plan.seconds)
        for group in optimiser.param_groups:
            group["lr"] = plan.rate_at(gone)
        inputs, targets = batch(tokens, plan.rows, plan.length, generator)
        loss = model.loss(inputs.to(device), targets.to(device))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        history.losses.append(loss.item())
        if not math.isfinite(history.losses[-1]):
            raise FloatingPointError(f"the loss is {history.losses[-1]} at step {number}")
        elapsed = time.perf_counter() - start
        speed = number * plan.rows * plan.length / elapsed
        report(Step(number, history.losses[-1], max(gone, number / plan.steps), speed))
        history.seconds, history.tokens_per_second = elapsed, speed
    return history


@torch.no_grad()
def held_out_loss(model: ByteModel, tokens: Tensor, *, rows: int = 16, length: int = 256) -> float:
    """Mean nats a byte over ``tokens``: read as ``rows`` streams, window after window, each state carried on."""
    device = next(model.parameters()).device
    model.eval()
    rows = max(1, min(rows, (len(tokens) - 1) // length))
    stream = (len(tokens) - 1) // rows
    inputs, targets = (tokens[i : i + rows * stream].view(rows, stream).to(device) for i in (0, 1))
    states: list[KdaState | None] | None = None
    total = 0.0
    for t in range(0, stream, length):
        logits, states = model(inputs[:, t : t + length], states, keep=True)
        total += F.cross_entropy(logits.flatten(0, 1), targets[:, t : t + length].flatten(), reduction="sum").item()
    return total / (rows * stream)


@torch.no_grad()
def sample(model: ByteModel, prompt: Tensor, count: int, *, temperature: float = 0.7, seed: int = 0) -> Iterator[int]:
    """Bytes that continue ``prompt`` [T], one at a time, each from the carried state."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    logits, states = model(prompt.view(1, -1).to(device), None, keep=True)
    for _ in range(count):
        odds = (logits[0, -1].cpu() / temperature).softmax(0)
        byte = int(torch.multinomial(odds, 1, generator=generator))
        yield byte
        logits, states = model(torch.tensor([[byte]], device=device), states, keep=True)
