"""Public functions: check, choose, call. No tensor mathematics and no backend names here."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kda import ops
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.registry import REGISTRY


def chunk_kda_bwd_wy_dqkg_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    state_v_first: bool = False,
    backend: str | None = None,
) -> WyDqkgGrads:
    """Gradients of the WY stage of KDA's chunked backward: dq, dk, dv, db, dg, dA.

    B batch, T tokens, H query/key heads, HV value heads (a multiple of H; head hv reads query/key head
    ``hv // (HV // H)``), K and V head sizes (1 to 256), BT = chunk_size (16, 32 or 64), NT chunks of all sequences.

    ============== ============================= ==========================================================
    argument       shape                         dtype
    ============== ============================= ==========================================================
    q, k           [B, T, H, K]                  main: float16, bfloat16 or float32 (float64: `torch` only)
    v, v_new       [B, T, HV, V]                 main
    do, dv         [B, T, HV, V]                 main
    beta           [B, T, HV]                    main or float32; after the sigmoid
    A              [B, T, HV, BT]                main; used as given, triangular or not
    g              [B, T, HV, K]                 float32; **log2** domain, inclusive cumsum within the chunk
    h, dh          [B, NT, HV, K, V], or         float32 or main; state at a chunk's start, gradient of the
                   [B, NT, HV, V, K] with        state at its end
                   state_v_first
    cu_seqlens     [N+1]                         int32 or int64; B must be 1
    chunk_indices  [NT, 2]                       int32 or int64; (sequence, chunk), derived when absent
    dq, dk, dg     [B, T, HV, K]                 float32, per value head
    dv             [B, T, HV, V]                 main
    db             [B, T, HV]                    float32
    dA             [B, T, HV, BT]                float32, zero outside the strict lower triangle of the chunk
    ============== ============================= ==========================================================

    With float64 inputs, float32 above reads float64. ``scale=None`` means K^-0.5. dg is the gradient of the
    **natural-log** chunk cumsum, before the reverse cumsum. Tokens at or beyond ``cu_seqlens[-1]`` get exact zeros.
    Inputs may have any strides and are never written; results repeat bit for bit.

    ``backend`` names the backend ("torch", "triton", "cuda"); None takes ``use_backend``, then
    ``MINDSPEED_KDA_BACKEND``, then the best that can run the call.

    Raises ValueError or TypeError naming the argument, before any kernel runs, and RuntimeError with the reason where
    the backend asked for cannot run the call. Formulas: docs/kda_math.md, section 5.
    """
    if torch.compiler.is_compiling():
        return WyDqkgGrads(
            *ops.chunk_kda_bwd_wy_dqkg_fused(
                q, k, v, v_new, g, beta, A, h, do, dh, dv,
                scale, cu_seqlens, chunk_size, chunk_indices, state_v_first, backend,
            )
        )  # fmt: skip
    call = wy_dqkg.check(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices, state_v_first
    )
    return REGISTRY.choose(wy_dqkg.OP, call, call.device.type, backend).load()(call)
