"""Matrix products that keep float32's precision whatever the process has switched on.

``torch.set_float32_matmul_precision``, ``allow_tf32`` and autocast let a float32 product run in TF32 or bfloat16. They
belong to the process, not to this package, so they are left alone: where the device's float32 products are not exact,
the product runs in float64 and is rounded, and autocast is off inside the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


C = TypeVar("C", bound=_OnDevice)


def float32_is_exact(device: torch.device) -> bool:
    """Whether a float32 ``@`` on this device is a float32 product under the settings of now."""
    if device.type not in ("cpu", "cuda"):
        return True  # torch's settings reach no other device
    # torch 2.9 gave each backend a setting of its own and made the older, common one raise where the two are mixed.
    of_device = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = getattr(getattr(of_device, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("none", "ieee")


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with at least the precision of the operands' dtype."""
    if a.dtype == torch.float32 and not float32_is_exact(a.device):
        return (a.double() @ b.double()).float()
    return a @ b


def without_autocast(fn: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Runs ``fn(call, ...)`` without gradients and without autocast on the call's device."""

    @functools.wraps(fn)
    def run(call: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = call.device.type
        with torch.no_grad():
            if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
                return fn(call, *args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return fn(call, *args, **kwargs)

    return run
