"""Softmax attention in plain eager torch, with all scores at once, and the judge of ``flash_attention``'s results.

The bar, per tensor, in RMS: twice the error of eager torch in the same dtype on the same inputs, plus one rounding.

The rounding is of the tensor itself and, for dq and dk, of what cancels in them. dS = P * (dP - r) is a difference of
two sums of DV products each, added up in the wide dtype, and r's come from the stored o, which was rounded to the main
one. With a single key dS is 0, eager's p * (dp - p dp) is 0 too, and only these roundings are left. So to 2 x eager

    u max(rms(dq), rms(scale (P * dP) K)) + 2 u_wide rms(scale (P * |dO| |V|^T) K)

is added, and the same with Q for dk; u is half of eps. lse, with a single key the score itself, is a sum of D products,
whose rounding u_wide rms(scale |Q| |K|^T) depends on the order that they are added up in, and has its place there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_kda.contracts.wy_dqkg import wide as wide_dtype

NAMES = ("o", "lse", "dq", "dk", "dv")
Results = dict[str, Tensor]


class Truth(NamedTuple):
    """Float64 results, and in RMS what is rounded in the main dtype and in the wide one, by name."""

    results: Results
    main: dict[str, float]
    wide: dict[str, float]


def mask(tq: int, tk: int, causal: bool, window: tuple[int | None, int | None], device: torch.device) -> Tensor:
    """[tq, tk]: which keys a query sees."""
    at = torch.arange(tq, device=device)[:, None] + (tk - tq)
    j = torch.arange(tk, device=device)
    seen = torch.ones(tq, tk, dtype=torch.bool, device=device)
    left, right = window
    if causal:
        seen &= j <= at
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    return seen


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    held: bool = False,
) -> tuple[Tensor, Tensor]:
    """o and lse, every operation in the tensors' own dtype. ``held``: no gradient through lse."""
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "held": held}
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        bounds = [list(itertools.pairwise(cu.tolist())) for cu in (cu_seqlens_q, cu_seqlens_k)]
        parts = [eager(q[:, a:b], k[:, c:d], v[:, c:d], **options) for (a, b), (c, d) in zip(*bounds, strict=True)]
        used = int(cu_seqlens_q[-1])
        o = q.new_zeros((*q.shape[:3], v.shape[3]))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
        return (
            torch.cat((*(p[0] for p in parts), o[:, used:]), 1),
            torch.cat((*(p[1] for p in parts), lse[..., used:]), 2),
        )
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    seen = mask(q.shape[2], k.shape[2], causal, window, q.device)
    if k.shape[2] == 0:
        return (s @ v).transpose(1, 2), s.new_full(s.shape[:3], -torch.inf)
    some = seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen & some, -torch.inf)  # a row without a key keeps its scores, for a softmax that exists
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.exp(s - lse.detach()) if held else s.softmax(-1)
    o = p.masked_fill(~some, 0) @ v
    return o.transpose(1, 2), lse.masked_fill(~some, -torch.inf)[..., 0]


def results(fn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> Results:
    """o, lse, dq, dk, dv of a function that returns (o, lse)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = fn(*leaves, **options)
    return dict(zip(NAMES, (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


def truth(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> Truth:
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    exact = results(eager, q, k, v, do, **options)
    main = {name: rms(x) for name, x in exact.items()}
    held = results(eager, q, k, v, do, held=True, **options)
    products = results(eager, q, k, v.abs(), do.abs(), held=True, **options)
    for name in ("dq", "dk"):
        main[name] = max(main[name], rms(held[name]))
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    keys = k.abs().mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    wide = dict.fromkeys(NAMES, 0.0) | {name: 2 * rms(products[name]) for name in ("dq", "dk")}
    wide["lse"] = abs(scale) * rms((q.abs() * keys).sum(-1))
    return Truth(exact, main, wide)


def rms(x: Tensor) -> float:
    """Over the finite elements; 0 without one."""
    x = x[torch.isfinite(x)].double()
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def misses(got: Results, beside: Results, want: Truth) -> list[str]:
    """What fails the bar, each with figure and limit; ``beside`` is eager's result in the same dtype."""
    out = []
    dtype = beside["o"].dtype
    for name in NAMES:
        x, ref = got[name], want.results[name]
        expected = wide_dtype(dtype) if name == "lse" else dtype
        if x.shape != ref.shape or x.dtype != expected:
            out.append(f"{name}: {x.dtype} {list(x.shape)}, expected {expected} {list(ref.shape)}")
            continue
        if x.isnan().any() or not torch.equal(x.isinf(), ref.isinf()):
            out.append(f"{name}: not finite where the reference is, or the other way round")
            continue
        u, u_wide = torch.finfo(x.dtype).eps / 2, torch.finfo(wide_dtype(dtype)).eps / 2
        error, eagers = rms(x.double() - ref), rms(beside[name].double() - ref)
        limit = 2 * eagers + u * want.main[name] + u_wide * want.wide[name]
        if not error <= limit:
            out.append(
                f"{name}: error {error:.3e} > {limit:.3e} (eager's {eagers:.3e}, reference {want.main[name]:.3e})"
            )
    return out
