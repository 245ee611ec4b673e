"""Tokens to padded chunks and back, for dense batches and packed sequences alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_kda import chunks


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Where the rows of each chunk lie along T.

    index: [NT, BT] token of each row, 0 where the row is padding; valid: [NT, BT] bool; last: [NT] last valid row (0
    where a chunk has none); dense: whether index is simply 0..T-1 in order, padded.
    """

    index: Tensor
    valid: Tensor
    last: Tensor
    dense: bool

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, NT, H, BT, ...]; padding rows are exactly 0, whatever the memory there holds.

        Always contiguous, so that products over it are the same to the last bit whatever x's strides were.
        """
        if x.shape[1] == 0:
            return x.new_zeros((x.shape[0], self.index.shape[0], x.shape[2], self.index.shape[1], *x.shape[3:]))
        rows = x[:, self.index.flatten()].unflatten(1, self.index.shape)
        rows.masked_fill_(~self.valid.view(*self.valid.shape, *([1] * (x.dim() - 2))), 0.0)
        return rows.transpose(2, 3).contiguous()

    def scatter(self, y: Tensor, tokens: int) -> Tensor:
        """[B, NT, H, BT, ...] -> [B, T, H, ...]; tokens of no sequence are exactly 0."""
        rows = y.transpose(2, 3).flatten(1, 2)
        if self.dense:
            return rows[:, :tokens].contiguous()
        out = y.new_zeros((y.shape[0], tokens + 1, *rows.shape[2:]))
        out.index_copy_(1, torch.where(self.valid, self.index, tokens).flatten(), rows)
        return out[:, :tokens].contiguous()


def chunk_layout(
    tokens: int,
    chunk_size: int,
    num_chunks: int,
    device: torch.device,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
) -> ChunkLayout:
    row = torch.arange(chunk_size, device=device)
    if cu_seqlens is None:
        start = torch.arange(num_chunks, device=device) * chunk_size
        rows = (tokens - start).clamp(max=chunk_size)
    else:
        if indices is None:
            indices = chunks.chunk_indices(cu_seqlens, chunk_size, num_chunks)
        start, rows = chunks.chunk_spans(cu_seqlens, indices, chunk_size)
    valid = row < rows[:, None]
    index = torch.where(valid, start[:, None] + row, 0)
    return ChunkLayout(index, valid, (rows - 1).clamp(min=0), cu_seqlens is None)
