"""Error measures and limits, the same everywhere.

RMS ratio: rms(err) / rms(ref); where rms(ref) < 1e-12 the largest |err| is held to 1e-12 in float64 and to 1e-6 in
lower precision instead. Mixed tolerance: |err| <= atol * max(1, rms(ref)) + rtol * |ref| for at least 99% of the valid
elements. Shape, dtype and finiteness are compared first. MARE / MERE / RMSE are the measures of Ascend's dual-benchmark
standard: the largest and the mean relative error, and the root mean square error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

RMS_LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
MIXED = {
    torch.float64: (2.0**-40, 2.0**-40),
    torch.float32: (2.0**-10, 2.0**-16),
    torch.float16: (2.0**-9, 2.0**-9),
    torch.bfloat16: (2.0**-6, 2.0**-6),
}
"""(rtol, atol) of the mixed tolerance by main dtype."""
MIXED_SHARE = 0.99
TINY_RMS = 1e-12
RELATIVE_FLOOR = 1e-7
"""Denominator floor of the relative errors MARE and MERE."""


@dataclass(frozen=True)
class Errors:
    """Errors of one tensor against its float64 reference. ``mixed`` is the share of elements inside the tolerance."""

    rms_ratio: float
    max_abs: float
    rmse: float
    mare: float
    mere: float
    mixed: float
    rms_ref: float
    finite: bool

    def as_dict(self) -> dict[str, float | bool]:
        return asdict(self)

    def misses(self, dtype: torch.dtype, rms_limit: float | None = None) -> list[str]:
        """Limits missed for this main dtype, each with figure and limit; empty where all hold."""
        limit = RMS_LIMIT[dtype] if rms_limit is None else rms_limit
        out = []
        if not self.finite:
            out.append("non-finite values where the reference is finite")
        if self.rms_ref < TINY_RMS:
            floor = 1e-12 if dtype == torch.float64 else 1e-6
            if not self.max_abs <= floor:
                out.append(f"max |err| {self.max_abs:.2e} > {floor:.0e} (reference is 0)")
        else:
            if not self.rms_ratio <= limit:
                out.append(f"RMS ratio {self.rms_ratio:.2e} > {limit:.0e}")
            if not self.mixed >= MIXED_SHARE:
                out.append(f"mixed tolerance {self.mixed:.4f} < {MIXED_SHARE}")
        return out


def measure(got: Tensor, ref: Tensor, dtype: torch.dtype, valid: Tensor | None = None) -> Errors:
    """Errors of ``got`` against ``ref`` over ``valid`` elements (a mask that broadcasts; None: all).

    ``dtype`` is the main dtype of the call, which picks the mixed tolerance. Raises ValueError on a shape mismatch.
    """
    if got.shape != ref.shape:
        raise ValueError(f"got: expected shape {list(ref.shape)}, got {list(got.shape)}")
    a, r = got.detach().double(), ref.detach().double().to(got.device)
    if valid is not None:
        mask = valid.to(got.device).expand_as(r)
        a, r = a[mask], r[mask]
    if r.numel() == 0:
        return Errors(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, True)
    err = (a - r).abs()
    finite = bool(torch.isfinite(a).all())
    rms_ref = float(r.square().mean().sqrt())
    rmse = float(err.square().mean().sqrt())
    relative = err / r.abs().clamp(min=RELATIVE_FLOOR)
    rtol, atol = MIXED[dtype]
    inside = err <= atol * max(1.0, rms_ref) + rtol * r.abs()
    return Errors(
        rms_ratio=rmse / rms_ref if rms_ref >= TINY_RMS else (0.0 if rmse == 0 else float("inf")),
        max_abs=float(err.max()),
        rmse=rmse,
        mare=float(relative.max()),
        mere=float(relative.mean()),
        mixed=float(inside.double().mean()),
        rms_ref=rms_ref,
        finite=finite,
    )


def assert_accurate(
    name: str,
    got: Tensor,
    ref: Tensor,
    dtype: torch.dtype,
    *,
    rms_limit: float | None = None,
    valid: Tensor | None = None,
) -> Errors:
    """Raises AssertionError with every limit that ``got`` misses against its float64 reference."""
    errors = measure(got, ref, dtype, valid)
    misses = errors.misses(dtype, rms_limit)
    assert not misses, f"{name}: {'; '.join(misses)} ({errors})"
    return errors
