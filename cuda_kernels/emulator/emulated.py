"""Calls the kernels of an emulated library (``build.build_emulator``) on CPU tensors.

Inputs are copied, and outputs lie, in memory of the emulator's own: an access outside of a tensor ends the launch, and
what a kernel leaves unwritten is NaN. One launch at a time in a process.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads, output_specs

FORWARD, REVERSE = 0, 1
"""Which lane, warp and CTA runs next: the following or the preceding one."""

_MAIN = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_INPUTS = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv", "cu_seqlens", "chunk_indices")
_OUTPUTS = ("dq", "dk", "dv_out", "db", "dg", "dA")


class WyParams(ctypes.Structure):
    """kda::WyParams of common/params.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_INPUTS, *_OUTPUTS)),
        *((name, ctypes.c_int64) for name in ("B", "T", "NT")),
        *((name, ctypes.c_int32) for name in ("N", "H", "HV", "K", "V", "BT")),
        ("scale", ctypes.c_float),
        ("main", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("state_f32", "beta_f32", "v_first", "cu_i64", "indices_i64")),
    ]


class EmulationError(RuntimeError):
    """A launch did what a GPU leaves undefined, or never ended; the message says what."""


class Emulated:
    """A loaded library of emulated kernels."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.kda_emulator_message.restype = ctypes.c_char_p
        self.library.kda_emulator_allocate.restype = ctypes.c_void_p
        self.library.kda_emulator_allocate.argtypes = (ctypes.c_size_t,)
        self.library.kda_emulator_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.library.kda_emulator_wy_params_bytes.restype = ctypes.c_size_t
        theirs, ours = self.library.kda_emulator_wy_params_bytes(), ctypes.sizeof(WyParams)
        if theirs != ours:
            raise RuntimeError(f"WyParams: expected the {theirs} bytes of common/params.h, got {ours} in emulated.py")

    def wy_dqkg(self, call: WyDqkgCall, schedule: int = FORWARD, aligned: bool | None = None) -> WyDqkgGrads:
        """One call. ``aligned``: None asks the pointers, as the binding does; False takes the general instance."""
        held: list[tuple[int, int]] = []

        def allocate(nbytes: int) -> int:
            p = self.library.kda_emulator_allocate(nbytes)
            if not p:
                raise MemoryError(f"{nbytes} bytes")
            held.append((p, nbytes))
            return int(p)

        try:
            p = WyParams()
            pointers = []
            for name in _INPUTS:
                x = getattr(call, name)
                if x is None:
                    continue
                at = allocate(x.numel() * x.element_size())
                setattr(p, name, at)
                _view(at, x.shape, x.dtype).copy_(x)
                if name not in ("cu_seqlens", "chunk_indices"):
                    pointers.append(at)
            out = []
            for name, (_, shape, dtype) in zip(_OUTPUTS, output_specs(call), strict=True):
                at = allocate(math.prod(shape) * dtype.itemsize)
                setattr(p, name, at)
                out.append(_view(at, shape, dtype))
            p.B, p.T, p.NT, p.H, p.HV, p.K, p.V, p.BT = (
                call.B, call.T, call.NT, call.H, call.HV, call.K, call.V, call.BT,
            )  # fmt: skip
            p.N = 0 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
            p.scale, p.main, p.v_first = call.scale, _MAIN[call.dtype], call.state_v_first
            p.state_f32 = call.h.dtype is torch.float32
            p.beta_f32 = call.beta.dtype is torch.float32
            p.cu_i64 = call.cu_seqlens is not None and call.cu_seqlens.dtype is torch.int64
            p.indices_i64 = call.chunk_indices is not None and call.chunk_indices.dtype is torch.int64
            if aligned is None:
                aligned = all(at % 16 == 0 for at in pointers)
            self.library.kda_emulator_schedule(schedule)
            status = self.library.kda_emulator_wy_dqkg(ctypes.byref(p), int(aligned))
            if status != 0:
                message = self.library.kda_emulator_message().decode()
                raise EmulationError(message or f"the library has no kernel for {call.dtype} (status {status})")
            return WyDqkgGrads._make(x.clone() for x in out)
        finally:
            for at, nbytes in held:
                self.library.kda_emulator_free(at, nbytes)


def _view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    n = math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
