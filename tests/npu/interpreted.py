"""What the tests beside this file run inside the interpreter's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.contracts import checks

Outputs = tuple[torch.Tensor, ...]


def run(kwargs: dict[str, Any]) -> Outputs:
    """The op on the Triton backend."""
    return tuple(op(**kwargs, backend="triton"))


def run_unread(kwargs: dict[str, Any]) -> Outputs:
    """The same where the values of cu_seqlens may not be read, as on a device."""
    with mock.patch.object(checks, "values_readable", return_value=False):
        return run(kwargs)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def repeats(kwargs: dict[str, Any], times: int) -> bool:
    """Whether ``times`` runs give the same bits."""
    first = run(kwargs)
    return all(same_bits(a, b) for _ in range(times - 1) for a, b in zip(run(kwargs), first, strict=True))


def inputs_stay(kwargs: dict[str, Any]) -> bool:
    """Whether every input has the same bits after a run as before."""
    before = {name: t.clone() for name, t in kwargs.items() if isinstance(t, torch.Tensor)}
    run(kwargs)
    return all(same_bits(kwargs[name], t) for name, t in before.items())


def run_with_address_check(kwargs: dict[str, Any]) -> tuple[Outputs, list[str]]:
    """The op, and every kind of access that left the tensors handed to its kernel."""
    from mindspeed_kda.npu_kernels.wy_dqkg import plan

    launch = plan.launch
    with address_check() as (watch, faults):

        def watched(kernel: Any, device: Any, tasks: int, args: dict[str, Any], *rest: Any, **more: Any) -> None:
            watch(args.values())
            launch(kernel, device, tasks, args, *rest, **more)

        with mock.patch.object(plan, "launch", watched):
            return run(kwargs), sorted(set(faults))


def address_check_of_a_bad_kernel() -> list[str]:
    """What the check says of a kernel that reads one element before its tensor."""
    import bad_kernels

    x, y = torch.zeros(40)[8:24], torch.zeros(16)
    with address_check() as (watch, faults):
        watch((x, y))
        bad_kernels.reads_before_its_tensor[(1,)](x, y, BLOCK=16)
        return sorted(set(faults))


@contextlib.contextmanager
def address_check() -> Iterator[tuple[Callable[..., None], list[str]]]:
    """Watches the interpreter's loads and stores: all unmasked lanes lie in one of the watched tensors, and the first
    lane of a tile does so too, masked or not (some hardware touches it anyway)."""
    from triton.runtime.interpreter import InterpreterBuilder

    spans: list[tuple[int, int]] = []
    faults: list[str] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watch(values: Any) -> None:
        tensors = [t for t in values if isinstance(t, torch.Tensor)]
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]

    def inside(addresses: np.ndarray) -> bool:
        return any(addresses.min() >= begin and addresses.max() < end for begin, end in spans)

    def check(kind: str, pointers: Any, mask: Any) -> None:
        addresses, lanes = np.asarray(pointers.data).ravel(), np.asarray(mask.data).ravel().astype(bool)
        if lanes.any() and not inside(addresses[lanes]):
            faults.append(f"{kind}: unmasked lanes outside their tensor")
        if not inside(addresses[:1]):
            faults.append(f"{kind}: the tile starts outside its tensor")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", checked_store),
    ):
        yield watch, faults
