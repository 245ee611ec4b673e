"""Tiles and states as the kernels keep them in memory (params.h), and back."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall

CHUNK = 64
STORED_SCALE = {torch.float16: 256.0, torch.bfloat16: 1.0}
"""What w and qd are stored times (kStoredScale of common/tiles.h)."""


def num_chunks(c: ChunkKdaCall) -> int:
    """KdaParams.NT, chunks of all sequences together, from shapes alone; for packed sequences a bound."""
    return c.T // CHUNK + c.N if c.cu_seqlens is not None else c.B * -(-c.T // CHUNK)


def image(x: Tensor) -> Tensor:
    """[..., rows, D] 16-bit from its plain order to that of a shared-memory tile, and back: 8 elements, 16 bytes, a
    piece; piece i of 8 neighbours lies at i xor (row modulo 8)."""
    *lead, rows, D = x.shape
    pieces = x.reshape(*lead, rows, D // 64, 8, 8)
    at = torch.arange(8, device=x.device) ^ (torch.arange(rows, device=x.device)[:, None] % 8)
    index = at.view(*[1] * len(lead), rows, 1, 8, 1).expand(pieces.shape)
    return torch.gather(pieces, -2, index).reshape(x.shape)


def states(c: ChunkKdaCall, images: Tensor) -> Tensor:
    """[B, NT, HV, K, V], NT that of the call, from the images [KdaParams.NT, HV, K, V]."""
    return image(images[: c.B * c.NT]).view(c.B, c.NT, *images.shape[1:])


def state_images(c: ChunkKdaCall, plain: Tensor) -> Tensor:
    """The way back, in the main dtype; zeros in chunks past those of the call."""
    out = plain.new_zeros((num_chunks(c), *plain.shape[2:]), dtype=c.dtype)
    out[: c.B * c.NT] = image(plain.to(c.dtype)).flatten(0, 1)
    return out


def tokens(c: ChunkKdaCall, tiles: Tensor) -> Tensor:
    """[B, T, HV, D] from tiles [KdaParams.NT, HV, 64, D]; zeros at tokens of no sequence."""
    token, there = _rows(c)
    rows = image(tiles).transpose(1, 2).flatten(0, 1)
    out = rows.new_zeros((c.B * c.T + 1, *rows.shape[1:]))
    out.index_copy_(0, torch.where(there, token, c.B * c.T).flatten(), rows)
    return out[:-1].view(c.B, c.T, *rows.shape[1:])


def tiles(c: ChunkKdaCall, x: Tensor) -> Tensor:
    """The way back, in the main dtype; rows past a chunk's last are zero."""
    token, there = _rows(c)
    rows = x.to(c.dtype).flatten(0, 1)[token.flatten()].unflatten(0, token.shape)
    return image(rows.masked_fill(~there.view(*there.shape, 1, 1), 0.0).transpose(1, 2).contiguous())


def _rows(c: ChunkKdaCall) -> tuple[Tensor, Tensor]:
    """[KdaParams.NT, 64]: the token of each row of each tile, counted over [B, T], and whether there is one."""
    row = torch.arange(CHUNK, device=c.device)
    if c.cu_seqlens is None:
        at = torch.arange(c.NT, device=c.device)[:, None] * CHUNK + row
        token, there = at + torch.arange(c.B, device=c.device).view(-1, 1, 1) * c.T, (at < c.T).expand(c.B, -1, -1)
        token, there = token.flatten(0, 1), there.flatten(0, 1)
    else:
        start, count = chunks.chunk_spans(c.cu_seqlens, chunks.chunk_indices(c.cu_seqlens, CHUNK, num_chunks(c)), CHUNK)
        token, there = start[:, None] + row, row < count[:, None]
    return torch.where(there, token, 0), there
