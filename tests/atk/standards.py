"""When an output passes: Ascend's dual benchmark beside this package's own limits.

Per output, in this order; the first five over all elements, the rest over valid ones (no padding, no structural zero):

1. shape and dtype are the contract's;
2. non-finite values stand exactly where the golden, rounded to the output's dtype, has the same ones;
3. structural zeros are exactly 0;
4. repeated runs agree bit for bit;
5. RMS ratio and mixed tolerance against the float64 golden (``mindspeed_kda.testing.metrics``);
6. dual benchmark: MARE, MERE and RMSE, each divided by that of the same-precision control run, at most 5 / 1.5 / 1.5.

A ratio of two errors means something only under conditions, and they are stated here instead of excused afterwards:

* A control error can be 0 or a single rounding by luck: the divisor is at least what a few roundings of the output's
  dtype give (``FLOOR``).
* The relative error of an element that is small beside its tensor measures the cancellation in the golden, not the
  kernel, and one such element outweighs all others: MARE and MERE are taken over elements of at least ``NORMAL`` times
  the golden's rms. The smaller ones are in RMSE, RMS ratio and mixed tolerance, which are absolute there.
* Two samples of the same error differ by about 1 / sqrt(n): the limits on n elements are those above times
  1 + ``SPREAD`` / sqrt(n), and outputs of fewer than ``FEW`` elements have no dual benchmark.
* A float32 output can be a difference of float32 numbers that nearly cancel (dg of a one-token chunk, dA_log of a small
  call). Its RMS ratio then measures the conditioning of the case: its limit is at least RMSE's times the control's.
  In 16 bits that goes for float32 outputs of fewer than ``FEW`` elements alone, without the spread: one number, as
  dA_log of one head or dg of one token and channel, where plain PyTorch in bfloat16 is off by 0.1 and 0.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mindspeed_kda.testing.metrics import RMS_LIMIT, Errors, measure

RATIO_LIMITS = {"mare": 5.0, "mere": 1.5, "rmse": 1.5}
NORMAL = 2.0**-4
SPREAD = 4.0
FEW = 16
FLOOR = {"mare": 16.0, "mere": 4.0, "rmse": 4.0}
"""Least divisor, in units of the output dtype's rounding error (eps / 2), RMSE's also times the rms of the golden."""


@dataclass
class OutputVerdict:
    """One output of one case. ``ratios`` are the device under test's errors over the control's."""

    name: str
    errors: Errors | None = None
    control: Errors | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)


def non_finite_mismatch(got: Tensor, golden: Tensor) -> int:
    """Elements whose kind (finite, nan, +inf, -inf) differs from the golden's once rounded to ``got``'s dtype."""
    ref = golden.to(got.dtype)
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    different = torch.zeros_like(got, dtype=torch.bool)
    for kind in kinds:
        different |= kind(got) ^ kind(ref)
    return int(different.sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: NaN equals NaN of the same bits, +0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def ratios(errors: Errors, control: Errors, out_dtype: torch.dtype) -> dict[str, float]:
    """MARE, MERE and RMSE of the device under test over those of the control, each divisor at least its floor."""
    unit = torch.finfo(out_dtype).eps / 2
    floors = {n: f * unit * (errors.rms_ref if n == "rmse" else 1.0) for n, f in FLOOR.items()}
    out = {}
    for name, floor in floors.items():
        error, divisor = getattr(errors, name), max(getattr(control, name), floor)
        out[name] = error / divisor if divisor > 0 else (0.0 if error == 0 else float("inf"))
    return out


def judge(
    name: str,
    runs: Sequence[Tensor],
    golden: Tensor,
    control: Tensor,
    main: torch.dtype,
    out_dtype: torch.dtype,
    valid: Tensor | None,
    *,
    dual: bool = True,
) -> OutputVerdict:
    """The verdict on one output; ``runs`` are the results of the repeats, ``valid`` a mask that broadcasts or None.

    ``dual=False`` leaves out the dual benchmark, for shapes that are held to the RMS ratio.
    """
    verdict, got = OutputVerdict(name), runs[0]
    if got.shape != golden.shape or got.dtype != out_dtype:
        verdict.misses.append(
            f"expected {out_dtype} {list(golden.shape)}, got {got.dtype} {list(got.shape)}".replace("torch.", "")
        )
        return verdict
    if n := non_finite_mismatch(got, golden):
        verdict.misses.append(f"{n} elements are non-finite where the golden is not, or the other way round")
    mask = torch.ones_like(got, dtype=torch.bool) if valid is None else valid.expand_as(got)
    if n := int((got[~mask] != 0).sum()):
        verdict.misses.append(f"{n} structural zeros are not 0")
    if not all(same_bits(got, other) for other in runs[1:]):
        verdict.misses.append(f"{len(runs)} runs differ in their bits")
    finite = mask & torch.isfinite(golden.to(out_dtype))
    errors = verdict.errors = measure(got, golden, main, finite)
    whole = verdict.control = measure(control, golden, main, finite)
    n = int(finite.sum())
    limits = {metric: limit * (1 + SPREAD / max(n, 1) ** 0.5) for metric, limit in RATIO_LIMITS.items()}
    rms_limit = RMS_LIMIT[main]
    if dual and main == torch.float32:
        rms_limit = max(rms_limit, limits["rmse"] * whole.rms_ratio)
    elif dual and out_dtype == torch.float32 and n < FEW:
        rms_limit = max(rms_limit, RATIO_LIMITS["rmse"] * whole.rms_ratio)
    verdict.misses += errors.misses(main, rms_limit)
    if dual and n >= FEW:
        normal = finite & (golden.abs() >= NORMAL * errors.rms_ref)
        relative = ratios(measure(got, golden, main, normal), measure(control, golden, main, normal), out_dtype)
        verdict.ratios = {**relative, "rmse": ratios(errors, whole, out_dtype)["rmse"]}
        for metric, limit in limits.items():
            if not verdict.ratios[metric] <= limit:
                text = f"{verdict.ratios[metric]:.2f} times the control's > {limit:.2f} (n = {n})"
                verdict.misses.append(f"{metric.upper()} is {text}")
    return verdict
