"""The model: byte embedding, blocks of a KDA layer and an MLP, tied output.

One KDA layer, after its norm: q, k, v are projections, a causal depthwise convolution over four tokens and SiLU; the
decay comes from a projection of low rank, A_log and dt_bias; beta from a projection; the result of ``chunk_kda`` is
normalised per head, gated by a sigmoid of low rank, and projected back. With ``zero_kda`` that result is exactly zero,
which leaves a model that sees one byte at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mindspeed_kda

VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    """Sizes of the model. ``main`` is the dtype of q, k, v and beta inside ``chunk_kda``; the rest is float32."""

    width: int = 128
    layers: int = 2
    heads: int = 2
    value_heads: int = 2
    key_size: int = 32
    value_size: int = 32
    convolution: int = 4
    gate_rank: int = 32
    mlp: int = 256
    chunk_size: int = 32
    main: torch.dtype = torch.float32
    backend: str | None = None
    zero_kda: bool = False


class LayerState(NamedTuple):
    """What a layer carries from window to window: the last inputs of its convolution, and the KDA state."""

    tail: Tensor
    memory: Tensor


class KDALayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.sizes = (c.heads * c.key_size, c.heads * c.key_size, c.value_heads * c.value_size)
        decays = c.value_heads * c.key_size
        self.qkv = nn.Linear(c.width, sum(self.sizes), bias=False)
        self.taps = nn.Parameter(torch.randn(c.convolution, sum(self.sizes)) * c.convolution**-0.5)
        self.decay = nn.Sequential(
            nn.Linear(c.width, c.gate_rank, bias=False), nn.Linear(c.gate_rank, decays, bias=False)
        )
        self.beta = nn.Linear(c.width, c.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.value_heads).uniform_(1, 16).log())
        # softplus(dt_bias) is a step between 1e-3 and 1e-1, evenly in its logarithm
        step = torch.empty(decays).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = nn.RMSNorm(c.value_size, eps=1e-5)
        self.gate = nn.Sequential(
            nn.Linear(c.width, c.gate_rank, bias=False), nn.Linear(c.gate_rank, self.sizes[2], bias=True)
        )
        self.out = nn.Linear(self.sizes[2], c.width, bias=False)

    def forward(self, x: Tensor, state: LayerState | None, keep: bool) -> tuple[Tensor, LayerState | None]:
        """[B, T, width] to the same; ``keep`` asks for the state after the last token."""
        c, (B, T) = self.config, x.shape[:2]
        if c.zero_kda:
            return torch.zeros_like(x), None
        raw = self.qkv(x)
        before = raw.new_zeros(B, c.convolution - 1, raw.shape[2]) if state is None else state.tail
        padded = torch.cat((before, raw), dim=1)
        mixed = F.silu(torch.stack([self.taps[j] * padded[:, j : j + T] for j in range(c.convolution)]).sum(0))
        q, k, v = mixed.to(c.main).split(self.sizes, dim=2)
        o, memory = mindspeed_kda.chunk_kda(
            q.unflatten(2, (c.heads, c.key_size)),
            k.unflatten(2, (c.heads, c.key_size)),
            v.unflatten(2, (c.value_heads, c.value_size)),
            self.decay(x).unflatten(2, (c.value_heads, c.key_size)),
            self.beta(x),
            initial_state=None if state is None else state.memory,
            output_final_state=keep,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            chunk_size=c.chunk_size,
            backend=c.backend,
        )
        gate = self.gate(x).sigmoid()
        y = self.out(self.norm(o.float()).flatten(2) * gate)
        return y, LayerState(padded[:, T:], memory) if keep and memory is not None else None


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_kda = nn.RMSNorm(config.width, eps=1e-5)
        self.kda = KDALayer(config)
        self.norm_mlp = nn.RMSNorm(config.width, eps=1e-5)
        self.up = nn.Linear(config.width, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor, state: LayerState | None, keep: bool) -> tuple[Tensor, LayerState | None]:
        y, after = self.kda(self.norm_kda(x), state, keep)
        x = x + y
        up, gate = self.up(self.norm_mlp(x)).chunk(2, dim=2)
        return x + self.down(up * F.silu(gate)), after


class ByteModel(nn.Module):
    """Logits of the next byte. ``states`` continues a stream where the last call, with ``keep``, left it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.kda_layers = [block.kda for block in blocks]
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        for parameter in (self.embedding.weight, *(block.down.weight for block in blocks)):
            nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: Tensor, states: Sequence[LayerState | None] | None = None, keep: bool = False
    ) -> tuple[Tensor, list[LayerState | None]]:
        """tokens [B, T] to logits [B, T, 256], and each layer's state where ``keep``."""
        x = self.embedding(tokens)
        after: list[LayerState | None] = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], keep)
            after.append(state)
        return F.linear(self.norm(x), self.embedding.weight), after

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean nats a byte."""
        logits, _ = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
