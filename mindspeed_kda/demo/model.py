"""The model: byte embedding, blocks of a KDA layer and an MLP, tied output.

The layer is ``mindspeed_kda.nn.KimiDeltaAttention``. With ``zero_kda`` its output is exactly zero, which leaves a model
that sees one byte at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_kda.nn import KdaState, KimiDeltaAttention

VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    """Sizes of the model. ``main``: float32, or bfloat16 by autocast, with parameters in float32 either way."""

    width: int = 128
    layers: int = 2
    heads: int = 2
    value_heads: int = 2
    key_size: int = 32
    value_size: int = 32
    mlp: int = 256
    chunk_size: int = 32
    main: torch.dtype = torch.float32
    backend: str | None = None
    zero_kda: bool = False


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.zero_kda = c.zero_kda
        self.norm_kda = nn.RMSNorm(c.width, eps=1e-5)
        self.kda = KimiDeltaAttention(
            hidden_size=c.width, head_dim=c.key_size, expand_v=c.value_size / c.key_size, num_heads=c.heads,
            num_v_heads=c.value_heads, chunk_size=c.chunk_size, backend=c.backend,
        )  # fmt: skip
        self.norm_mlp = nn.RMSNorm(c.width, eps=1e-5)
        self.up = nn.Linear(c.width, 2 * c.mlp, bias=False)
        self.down = nn.Linear(c.mlp, c.width, bias=False)

    def forward(self, x: Tensor, state: KdaState | None, keep: bool) -> tuple[Tensor, KdaState | None]:
        after = None
        if not self.zero_kda:
            y, after = self.kda(self.norm_kda(x), state, keep_state=keep)
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
        self, tokens: Tensor, states: Sequence[KdaState | None] | None = None, keep: bool = False
    ) -> tuple[Tensor, list[KdaState | None]]:
        """tokens [B, T] to logits [B, T, 256] in float32, and each layer's state where ``keep``."""
        main = self.config.main
        after: list[KdaState | None] = []
        with torch.autocast(tokens.device.type, dtype=main, enabled=main != torch.float32):
            x = self.embedding(tokens)
            for i, block in enumerate(self.blocks):
                x, state = block(x, None if states is None else states[i], keep)
                after.append(state)
            return F.linear(self.norm(x), self.embedding.weight).float(), after

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean nats a byte."""
        logits, _ = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
