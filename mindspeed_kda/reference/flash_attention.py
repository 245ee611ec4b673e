"""Definition of ``flash_attention``, forward and backward, in plain torch.

    S = scale * Q K^T;  S = c tanh(S / c) with softcap c;  P = exp(S - lse);  O = P V
    dPsum = rowsum(dO * O);  dP = dO V^T;  dS = P * (dP - dPsum) [* (1 - (S / c)^2)]
    dV = P^T dO;  dK = scale * dS^T Q;  dQ = scale * dS K

Each row has one interval of keys that it sees; that interval is the whole of the mask, packed or not. Rows are taken
``ROWS`` at a time and meet only the keys that one of them can see (of all keys, when packed: no length is read on the
host), so that no tensor has Tq x Tk elements. Low precision is computed in float32, and dK and dV are summed over
query heads and row blocks there, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_kda.contracts.flash_attention import FlashAttentionCall, FlashAttentionGrads, output_shapes
from mindspeed_kda.contracts.wy_dqkg import wide

ROWS = 128


def key_intervals(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
    """First key and end of the keys that each query row sees, int64 [Tq]; end <= first where it sees none."""
    i = torch.arange(call.TQ, device=call.device)
    begin, end, at = torch.zeros_like(i), torch.full_like(i, call.TK), i + (call.TK - call.TQ)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        cu_q, cu_k = call.cu_seqlens_q.long(), call.cu_seqlens_k.long()
        n = torch.searchsorted(cu_q, i, right=True)  # the row's sequence + 1; N + 1 past the last
        last = cu_q.shape[0] - 1
        following = n.clamp(max=last)
        begin, end = cu_k[(n - 1).clamp(min=0)], cu_k[following]
        end = torch.where(n > last, begin, end)
        at = i - cu_q[following] + end
    if call.left is not None:
        begin = torch.maximum(begin, at - call.left)
    if call.right is not None:
        end = torch.minimum(end, at + call.right + 1)
    return begin, end


def _blocks(call: FlashAttentionCall) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, the keys that they may see, and the mask [rows, keys] between them."""
    first, end = key_intervals(call)
    for r0 in range(0, call.TQ, ROWS):
        r1 = min(call.TQ, r0 + ROWS)
        k0, k1, shift = 0, call.TK, call.TK - call.TQ
        if not call.packed:
            if call.left is not None:
                k0 = min(max(0, r0 + shift - call.left), call.TK)
            if call.right is not None:
                k1 = max(min(call.TK, r1 + shift + call.right), k0)
        j = torch.arange(k0, k1, device=call.device)
        seen = (j >= first[r0:r1, None]) & (j < end[r0:r1, None])
        yield slice(r0, r1), slice(k0, k1), seen


def _heads(call: FlashAttentionCall, x: Tensor, rows: slice) -> Tensor:
    """[B, HK, H // HK, rows, .] of a tensor with query heads, in the wide dtype."""
    x = x[:, rows].to(wide(call.dtype))
    return x.unflatten(2, (call.HK, call.H // call.HK)).permute(0, 2, 3, 1, 4)


def _keys(call: FlashAttentionCall, x: Tensor, keys: slice) -> Tensor:
    """[B, HK, 1, keys, .] of a tensor with key heads, in the wide dtype."""
    return x[:, keys].to(wide(call.dtype)).permute(0, 2, 1, 3)[:, :, None]


def _scores(call: FlashAttentionCall, q: Tensor, k: Tensor) -> Tensor:
    s = (q @ k.mT) * call.scale
    return call.softcap * torch.tanh(s / call.softcap) if call.softcap else s


def forward(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
    """o and lse."""
    o_shape, lse_shape = output_shapes(call)
    o = call.q.new_zeros(o_shape)
    lse = call.q.new_full(lse_shape, -torch.inf, dtype=wide(call.dtype))
    for rows, keys, seen in _blocks(call):
        s = _scores(call, _heads(call, call.q, rows), _keys(call, call.k, keys)).masked_fill(~seen, -torch.inf)
        total = torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
        p = torch.exp(s - total.masked_fill(total == -torch.inf, 0))
        b_o = p @ _keys(call, call.v, keys)
        o[:, rows] = b_o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(call.dtype)
        lse[:, :, rows] = total[..., 0].flatten(1, 2)
    return o, lse


def backward(call: FlashAttentionCall, o: Tensor, lse: Tensor, do: Tensor) -> FlashAttentionGrads:
    """Gradients from the saved o and lse; P is computed again, block by block."""
    w, groups = wide(call.dtype), (call.HK, call.H // call.HK)
    dq = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
    dk = call.k.new_zeros((call.B, call.HK, call.TK, call.D), dtype=w)
    dv = call.v.new_zeros((call.B, call.HK, call.TK, call.DV), dtype=w)
    for rows, keys, seen in _blocks(call):
        q, k, v = _heads(call, call.q, rows), _keys(call, call.k, keys), _keys(call, call.v, keys)
        b_do = _heads(call, do, rows)
        p_sum = (b_do * _heads(call, o, rows)).sum(-1, keepdim=True)
        s = _scores(call, q, k)
        b_lse = lse[:, :, rows].to(w).unflatten(1, groups)[..., None]
        # masked before exp: a score outside the mask may exceed lse by any amount
        p = torch.exp((s - b_lse.masked_fill(b_lse == -torch.inf, 0)).masked_fill(~seen, -torch.inf))
        ds = p * (b_do @ v.mT - p_sum)
        if call.softcap:
            ds = ds * (1 - (s / call.softcap).square())
        dq[:, rows] = (call.scale * (ds @ k)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(call.dtype)
        dk[:, :, keys] += call.scale * (ds.mT @ q).sum(2)
        dv[:, :, keys] += (p.mT @ b_do).sum(2)
    return FlashAttentionGrads(
        dq, dk.transpose(1, 2).to(call.dtype).contiguous(), dv.transpose(1, 2).to(call.dtype).contiguous()
    )
