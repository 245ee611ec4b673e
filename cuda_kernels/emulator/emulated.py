"""Calls the kernels of an emulated library (``build.build_emulator``) on CPU tensors.

Inputs are copied, and outputs lie, in memory of the emulator's own: an access outside of a tensor ends the launch, and
what a kernel leaves unwritten is NaN. One launch at a time in a process.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND, PREGATED, SOFTPLUS, ChunkKdaCall
from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads, output_specs
from mindspeed_kda.cuda_kernels.chunk_kda.layout import image, num_chunks

__all__ = ["FORWARD", "REVERSE", "Emulated", "EmulationError", "array_specs", "image", "num_chunks"]

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


_GATE = {PREGATED: 0, SOFTPLUS: 1, LOWER_BOUND: 2}
_KDA_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "do", "dht")
_KDA_ARRAYS = (
    *("A", "Aqk", "o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0", "chunks", "first_chunk"),
    *("w", "u", "qd", "kr", "decay", "h", "dh", "v_new", "dv_new", "dq_head", "dk_head"),
    *("dA_log_part", "ddt_bias_part"),
)


class KdaParams(ctypes.Structure):
    """kda::KdaParams of chunk_kda/params.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_KDA_INPUTS, *_KDA_ARRAYS)),
        *((name, ctypes.c_int64) for name in ("B", "T", "NT")),
        *((name, ctypes.c_int32) for name in ("N", "H", "HV", "K", "V")),
        *((name, ctypes.c_float) for name in ("scale", "lower_bound", "beta_scale")),
        *((name, ctypes.c_int) for name in ("main", "gate")),
        *((n, ctypes.c_bool) for n in ("g_f32", "beta_f32", "v_first", "qk_l2norm", "beta_sigmoid", "cu_i64")),
    ]


def array_specs(call: ChunkKdaCall) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every array of KdaParams that a stage writes for this call; see chunk_kda/params.h."""
    c, NT, main, f32 = call, num_chunks(call), call.dtype, torch.float32
    states = (c.N, c.HV, c.V, c.K) if c.state_v_first else (c.N, c.HV, c.K, c.V)
    key_tile, value_tile, state = (NT, c.HV, 64, c.K), (NT, c.HV, 64, c.V), (NT, c.HV, c.K, c.V)
    out: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **dict.fromkeys(("A", "Aqk"), ((c.B, c.T, c.HV, 64), main)),
        **dict.fromkeys(("o", "dv"), ((c.B, c.T, c.HV, c.V), main)),
        **dict.fromkeys(("dq", "dk"), ((c.B, c.T, c.H, c.K), main)),
        **dict.fromkeys(("w", "qd", "kr"), (key_tile, main)),
        **dict.fromkeys(("u", "v_new", "dv_new"), (value_tile, main)),
        **dict.fromkeys(("h", "dh"), (state, main)),
        **dict.fromkeys(("decay", "ddt_bias_part"), ((NT, c.HV, c.K), f32)),
        "dg": (tuple(c.g.shape), c.g.dtype),
        "dbeta": (tuple(c.beta.shape), c.beta.dtype),
        "chunks": ((NT, 2), torch.int64),
        "first_chunk": ((c.N + 1,), torch.int32),
        "dA_log_part": ((NT, c.HV), f32),
    }
    if c.output_final_state:
        out["ht"] = (states, f32)
    if c.initial_state is not None:
        out["dh0"] = (states, f32)
    if c.A_log is not None:
        out["dA_log"] = ((c.HV,), f32)
    if c.dt_bias is not None:
        out["ddt_bias"] = ((c.HV, c.K), f32)
    if c.HV > c.H:
        out |= dict.fromkeys(("dq_head", "dk_head"), ((c.B, c.T, c.HV, c.K), f32))
    return out


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
        self.library.kda_emulator_chunk_kda_params_bytes.restype = ctypes.c_size_t
        for theirs, mirror in (
            (self.library.kda_emulator_wy_params_bytes(), WyParams),
            (self.library.kda_emulator_chunk_kda_params_bytes(), KdaParams),
        ):
            if theirs != ctypes.sizeof(mirror):
                raise RuntimeError(f"{mirror.__name__}: expected {theirs} bytes, got {ctypes.sizeof(mirror)} here")

    def wy_dqkg(
        self, call: WyDqkgCall, schedule: int = FORWARD, aligned: bool | None = None, hopper: int = 0
    ) -> WyDqkgGrads:
        """One call. ``aligned``: None asks the pointers, as the binding does; False takes the general instance.

        ``hopper``: multiprocessors of the Hopper GPU to be, whose own kernel then serves what it can; 0: an older one.
        """
        self.library.kda_emulator_hopper(hopper)
        with _Memory(self.library) as memory:
            p = WyParams()
            pointers = []
            for name in _INPUTS:
                x = getattr(call, name)
                if x is None:
                    continue
                at = memory.copy(x)
                setattr(p, name, at)
                if name not in ("cu_seqlens", "chunk_indices"):
                    pointers.append(at)
            out = []
            for name, (_, shape, dtype) in zip(_OUTPUTS, output_specs(call), strict=True):
                at = memory.allocate(math.prod(shape) * dtype.itemsize)
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
            self._launched(lambda: self.library.kda_emulator_wy_dqkg(ctypes.byref(p), int(aligned)), schedule)
            return WyDqkgGrads._make(x.clone() for x in out)

    def chunk_kda(
        self,
        stages: Sequence[str],
        call: ChunkKdaCall,
        given: Mapping[str, Tensor],
        schedule: int = FORWARD,
    ) -> dict[str, Tensor]:
        """Runs stages of chunk_kda/launch.h ("plan", "prepare_forward", "prepare_backward", "scan_forward",
        "scan_backward", "grads", "reduce", "tail_forward", "tail_backward") one after another.

        given: do and dht where a stage reads them, and arrays of KdaParams that stages before these would have written
        (tiles and states as images). Returns every array of ``array_specs`` as the stages leave it, NaN (integers: all
        bits set) where none wrote.
        """
        with _Memory(self.library) as memory:
            p = KdaParams()
            for name in _KDA_INPUTS:
                x = given.get(name) if name in ("do", "dht") else getattr(call, name)
                if x is not None:
                    setattr(p, name, memory.copy(x))
            out = {}
            for name, (shape, dtype) in array_specs(call).items():
                at = memory.allocate(math.prod(shape) * dtype.itemsize)
                setattr(p, name, at)
                out[name] = _view(at, shape, dtype)
                if name in given:
                    if given[name].shape != shape or given[name].dtype is not dtype:
                        raise ValueError(
                            f"{name}: expected {shape} {dtype}, got {given[name].shape} {given[name].dtype}"
                        )
                    out[name].copy_(given[name])
            p.B, p.T, p.NT, p.N, p.H, p.HV, p.K, p.V = (
                call.B, call.T, num_chunks(call), call.N, call.H, call.HV, call.K, call.V,
            )  # fmt: skip
            p.scale, p.lower_bound, p.beta_scale = call.scale, call.lower_bound or 0.0, call.beta_scale
            p.main, p.gate = _MAIN[call.dtype], _GATE[call.gate]
            p.g_f32, p.beta_f32 = call.g.dtype is torch.float32, call.beta.dtype is torch.float32
            p.v_first, p.qk_l2norm, p.beta_sigmoid = call.state_v_first, call.qk_l2norm, call.beta_sigmoid
            p.cu_i64 = call.cu_seqlens is not None and call.cu_seqlens.dtype is torch.int64
            for stage in stages:
                self._launched(
                    functools.partial(self.library.kda_emulator_chunk_kda, ctypes.byref(p), stage.encode()), schedule
                )
            return {name: x.clone() for name, x in out.items()}

    def _launched(self, launch: Callable[[], int], schedule: int) -> None:
        self.library.kda_emulator_schedule(schedule)
        status = launch()
        if status != 0:
            message = self.library.kda_emulator_message().decode()
            raise EmulationError(message or f"the library has no such kernel (status {status})")


class _Memory:
    """Memory of the emulator's own, freed at the end of the block."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.held: list[tuple[int, int]] = []

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        for at, nbytes in self.held:
            self.library.kda_emulator_free(at, nbytes)

    def allocate(self, nbytes: int) -> int:
        p = self.library.kda_emulator_allocate(nbytes)
        if not p:
            raise MemoryError(f"{nbytes} bytes")
        self.held.append((p, nbytes))
        return int(p)

    def copy(self, x: Tensor) -> int:
        at = self.allocate(x.numel() * x.element_size())
        _view(at, tuple(x.shape), x.dtype).copy_(x)
        return at


def _view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    n = math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
