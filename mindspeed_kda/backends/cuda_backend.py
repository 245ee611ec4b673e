"""Backend ``cuda``: the native library of cuda_kernels, for NVIDIA GPUs of compute capability 8.0 and later."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import config
from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.contracts.chunk_kda import ChunkKdaCall
from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads
from mindspeed_kda.registry import Backend, Registry

NAME = "cuda"
LIBRARY = "libmindspeed_kda_cuda.so"
MIN_TORCH = (2, 10)
"""The first torch with the stable ABI that the library is built on."""
MIN_CAPABILITY = (8, 0)
MAX_HEAD_SIZE = 128
MAX_ROW = 2**31 // 64
"""Elements of a token's row (HV times the larger head size): offsets inside a chunk are 32-bit."""
MAX_BLOCKS = 2**31 - 1
"""CTAs of a launch: one for each chunk and value head."""
WIDE_SHARED_BYTES = 147 << 10
"""Shared memory of a CTA for fp32 with K or V over 64, or not 64 both (cuda_kernels/common/tiles.h)."""
SHARED_BYTES = 92 << 10
"""And otherwise."""
KDA_SHARED_BYTES = {64: 81 << 10, 128: 130 << 10}
"""Shared memory of a CTA of ``chunk_kda``'s kernels, at least, by each K = V that they serve."""


def library_path() -> Path:
    """Where the library is looked for; it need not exist."""
    chosen = config.CUDA_LIBRARY.read()
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("mindspeed_kda.cuda_kernels")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / LIBRARY if folders else Path(LIBRARY)


def available() -> str | None:
    path = library_path()
    if not path.is_file():
        return (
            f"the native library is not there ({path.name}): the package was installed without a CUDA compiler; "
            f"install it again with {config.BUILD_CUDA.name}=1, which says what is missing"
        )
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        return f"torch: expected {MIN_TORCH[0]}.{MIN_TORCH[1]} or later, got {torch.__version__}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None


@functools.cache
def _usable() -> bool:
    """Whether ``available`` said yes; a yes is remembered, since it costs a look at the disk."""
    reason = available()
    if reason is not None:
        raise LookupError(reason)
    return True


@functools.cache
def _unfit_device(index: int | None) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return f"device: expected compute capability {'.'.join(map(str, MIN_CAPABILITY))} or later, got " + ".".join(
            map(str, capability)
        )
    return None


@functools.cache
def _shared_bytes(index: int | None) -> int:
    properties: Any = torch.cuda.get_device_properties(index)  # a field that its stub does not know
    return int(properties.shared_memory_per_block_optin)


def _unfit(q: Tensor) -> str | None:
    """Why no kernel of the library can run where ``q`` lies, or None."""
    if not q.is_cuda:
        return f"tensors: expected device cuda, got {q.device.type}"
    try:
        _usable()
    except LookupError as error:
        return str(error)
    return _unfit_device(q.get_device())


def supports(call: WyDqkgCall) -> str | None:
    q = call.q
    dtype, K, V = q.dtype, call.K, call.V
    if dtype is torch.float64:
        return "q: expected float16, bfloat16 or float32, got float64"
    reason = _unfit(q)
    if reason is not None:
        return reason
    index = q.get_device()
    if K > MAX_HEAD_SIZE or V > MAX_HEAD_SIZE:
        return f"q, v: expected K and V up to {MAX_HEAD_SIZE}, got K = {K} and V = {V}"
    if call.HV * max(K, V, call.BT) > MAX_ROW:
        return f"v: expected HV * max(K, V) up to {MAX_ROW}, got HV = {call.HV}"
    need = WIDE_SHARED_BYTES if dtype is torch.float32 and not K == V == 64 else SHARED_BYTES
    if _shared_bytes(index) < need:
        return f"device: expected {need} bytes of shared memory a block for this call, got {_shared_bytes(index)}"
    return None


_wy_dqkg_op: Callable[..., tuple[Any, ...]] | None = None
"""The operator, once the library is loaded."""


@functools.cache
def _load_wy_dqkg() -> Callable[[WyDqkgCall], WyDqkgGrads]:
    global _wy_dqkg_op
    torch.ops.load_library(str(library_path()))
    op = torch.ops.mindspeed_kda_cuda.wy_dqkg.default

    @torch.library.register_fake("mindspeed_kda_cuda::wy_dqkg")
    def _(
        q: Any, k: Any, v: Any, v_new: Any, g: Any, beta: Any, A: Any, h: Any, d_o: Any, dh: Any, dv: Any,
        cu_seqlens: Any, chunk_indices: Any, scale: Any, chunk_size: int, state_v_first: bool, checked: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        (B, T, _, K), (HV, V), wide = q.shape, v.shape[2:], torch.float32
        return (
            q.new_empty((B, T, HV, K), dtype=wide),
            q.new_empty((B, T, HV, K), dtype=wide),
            q.new_empty((B, T, HV, V)),
            q.new_empty((B, T, HV), dtype=wide),
            q.new_empty((B, T, HV, K), dtype=wide),
            q.new_empty((B, T, HV, chunk_size), dtype=wide),
        )

    def run(c: WyDqkgCall) -> WyDqkgGrads:
        cu, indices = c.cu_seqlens, c.chunk_indices
        return WyDqkgGrads._make(
            op(
                c.q.contiguous(), c.k.contiguous(), c.v.contiguous(), c.v_new.contiguous(), c.g.contiguous(),
                c.beta.contiguous(), c.A.contiguous(), c.h.contiguous(), c.do.contiguous(), c.dh.contiguous(),
                c.dv.contiguous(), None if cu is None else cu.contiguous(),
                None if indices is None else indices.contiguous(), c.scale, c.BT, c.state_v_first, True,
            )
        )  # fmt: skip

    _wy_dqkg_op = op
    return run


def _repeat_wy_dqkg(*arguments: Any) -> WyDqkgGrads | None:
    """Serves a call with the signature of one that was checked; the operator knows those. None for any other."""
    if _wy_dqkg_op is None:
        return None
    try:
        out = _wy_dqkg_op(*arguments, False)
    except NotImplementedError:  # the dispatcher has no kernel for these kinds of tensors; the checks say what is wrong
        return None
    return None if out[0] is None else WyDqkgGrads._make(out)


def supports_chunk_kda(call: ChunkKdaCall) -> str | None:
    q, K, V = call.q, call.K, call.V
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q: expected float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    reason = _unfit(q)
    if reason is not None:
        return reason
    if K != V or K not in KDA_SHARED_BYTES:
        return f"q, v: expected K = V = 64 or 128, got K = {K} and V = {V}"
    if (call.B * (call.T // 64 + 1) + call.N) * call.HV > MAX_BLOCKS:
        return f"v: expected chunks of 64 tokens times HV up to {MAX_BLOCKS}, got T = {call.T} and HV = {call.HV}"
    need, there = KDA_SHARED_BYTES[K], _shared_bytes(q.get_device())
    return None if there >= need else f"device: expected {need} bytes of shared memory a block, got {there}"


def _load_chunk_kda() -> Any:
    from mindspeed_kda.cuda_kernels.chunk_kda import plan

    plan.load_operators(library_path())
    return plan


def register(registry: Registry) -> None:
    for op, predicate, load, repeat in (
        (wy_dqkg.OP, supports, _load_wy_dqkg, _repeat_wy_dqkg),
        (chunk_kda.OP, supports_chunk_kda, _load_chunk_kda, None),
    ):
        registry.register(
            Backend(op, NAME, predicate, load, available=available, priority={"cuda": 100}, repeat=repeat)
        )
