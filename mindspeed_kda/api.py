"""Public functions: check, choose, call. No tensor mathematics and no backend names here."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mindspeed_kda import ops
from mindspeed_kda.autograd import ChunkKda, FlashAttention
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.contracts import flash_attention as attention
from mindspeed_kda.contracts import fused_recurrent_kda as recurrent
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.contracts.flash_attention import FlashAttentionGrads
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.registry import REGISTRY, current_request


def _traced_request(argument: str | None) -> str | None:
    """While ``torch.compile`` traces: the request becomes a constant of the graph, one for forward and backward."""
    return current_request(argument)


# This is all that torch.compiler.assume_constant_result does; calling it would import torch._dynamo, and that triton.
_traced_request._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    h, dh          [B, NT, HV, K, V], or         float32 or main, the same for both; state at a chunk's start,
                   [B, NT, HV, V, K] with        gradient of the state at its end
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
    Inputs may have any strides and are never written; results repeat bit for bit. Float32 outputs may share one
    allocation, which lives as long as any of them.

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
    arguments = (q, k, v, v_new, g, beta, A, h, do, dh, dv, cu_seqlens, chunk_indices, scale, chunk_size, state_v_first)
    if wy_dqkg.plain(*arguments):
        repeat = REGISTRY.repeat(wy_dqkg.OP, q.device.type, backend)
        grads = None if repeat is None else repeat(*arguments)
        if grads is not None:
            return cast(WyDqkgGrads, grads)
    call = wy_dqkg.check(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices, state_v_first
    )
    return REGISTRY.choose(wy_dqkg.OP, call, call.device.type, backend).load()(call)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    disable_recompute: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    cp_context: object = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    return_intermediate_states: bool = False,
    transpose_state_layout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over a sequence, in chunks: ``(o, final_state or None)``, differentiable.

    Per head, with S a K x V state, a_t the log decay of token t and b_t its write strength::

        S <- diag(exp(a_t)) S;   S <- S + b_t k_t (v_t - S^T k_t)^T;   o_t = scale * S^T q_t

    B batch, T tokens, H query/key heads, HV value heads (a multiple of H; head hv reads query/key head
    ``hv // (HV // H)``), K and V head sizes (1 to 256), N sequences (B, or those of cu_seqlens).

    ============== ============================= ==========================================================
    argument       shape                         dtype
    ============== ============================= ==========================================================
    q, k           [B, T, H, K]                  main: float16, bfloat16 or float32 (float64: `torch` only)
    v              [B, T, HV, V]                 main
    g              [B, T, HV, K]                 main or float32; **natural-log** decay per token (<= 0), or
                                                 the gate's raw input x with use_gate_in_kernel
    beta           [B, T, HV]                    main or float32; in (0, 1) or (0, 2), or logits with
                                                 use_beta_sigmoid_in_kernel
    A_log          [HV]                          float32; with use_gate_in_kernel only
    dt_bias        [HV, K] or [HV * K]           float32; optional, with use_gate_in_kernel only
    initial_state  [N, HV, K, V], or             float32
                   [N, HV, V, K] with
                   state_v_first
    cu_seqlens     [N+1]                         int32 or int64; B must be 1
    o              [B, T, HV, V]                 main; exact zeros for tokens at or beyond ``cu_seqlens[-1]``
    final_state    as initial_state              float32, with output_final_state; else None
    ============== ============================= ==========================================================

    With float64 inputs, float32 above reads float64. Gradients reach q, k, v, g, beta, A_log, dt_bias and
    initial_state, from o and from the final state; each has its input's shape and dtype.

    * ``scale=None`` means K^-0.5; ``chunk_size`` is 16, 32 or 64 and changes speed, not results.
    * ``use_qk_l2norm_in_kernel``: q and k are divided by sqrt(sum x^2 + 1e-6).
    * ``use_gate_in_kernel``: a = -exp(A_log) * softplus(x + dt_bias); with ``lower_bound`` (a number below 0) instead
      a = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)). ``safe_gate`` asks for the latter and needs
      ``lower_bound``; without use_gate_in_kernel it is a promise that g is bounded below, and changes nothing.
    * ``use_beta_sigmoid_in_kernel``: b = sigmoid(beta), or 2 * sigmoid(beta) with ``allow_neg_eigval`` (which has no
      effect on a beta given as such).
    * ``disable_recompute``: keep more for backward, for speed.
    * ``backend``: "torch", "triton", "cuda"; None takes ``use_backend``, then ``MINDSPEED_KDA_BACKEND``, then the best
      that can run the call. The same backend runs backward.
    * ``cp_context``, ``cu_seqlens_cpu``, ``use_graph``, ``max_num_seqs`` and ``return_intermediate_states`` are
      flash-linear-attention's; any value but the default raises NotImplementedError with the reason.
      ``transpose_state_layout`` is its older name of ``state_v_first``.

    Inputs may have any strides and are never written; results repeat bit for bit. Raises ValueError or TypeError naming
    the argument, before any kernel runs, and RuntimeError with the reason where the backend asked for cannot run the
    call. Formulas: docs/kda_math.md, sections 2 to 7.
    """
    kda.decline_foreign(
        cp_context=cp_context,
        cu_seqlens_cpu=cu_seqlens_cpu,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
        return_intermediate_states=return_intermediate_states,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    if transpose_state_layout:
        state_v_first = True
    if torch.compiler.is_compiling():
        o, final_state, _ = ops.chunk_kda_fwd(
            *inputs, cu_seqlens,
            scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, safe_gate, lower_bound, disable_recompute, state_v_first, chunk_size, needs_grad,
            _traced_request(backend),
        )  # fmt: skip
        return o, final_state if output_final_state else None
    call = kda.check(
        q, k, v, g, beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        disable_recompute=disable_recompute,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        needs_grad=needs_grad,
    )  # fmt: skip
    impl = REGISTRY.choose(kda.OP, call, call.device.type, backend).load()
    if not call.needs_grad:
        return impl.forward(call)[:2]
    return ChunkKda.apply(call, impl, *call.tensors)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_kda`` token by token, for generation: ``(o, final_state or None)``, without gradients.

    Shapes, dtypes, flags and results are those of ``chunk_kda``; the order of the arguments is
    flash-linear-attention's. A sequence may be fed in pieces: pass the final state of one call as the initial state of
    the next. The cost grows with T, so ``chunk_kda`` serves prompts.

    Inputs are never written. Raises what ``chunk_kda`` raises, and RuntimeError where a gradient would be wanted (a
    tensor that requires one, outside ``torch.no_grad``). Formulas: docs/kda_math.md, sections 2 and 3.
    """
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    call = recurrent.check(
        q, k, v, g, beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        needs_grad=torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs),
    )  # fmt: skip
    return REGISTRY.choose(recurrent.OP, call, call.device.type, backend).load()(call)


def flash_attention(
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
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention without a Tq x Tk tensor, differentiable: ``o``, or ``(o, lse)`` with ``return_lse``.

    B batch, H query heads, HK key/value heads (a divisor of H; query head h reads key head ``h // (H // HK)``), D and
    DV head sizes (1 to 256).

    ============== ============================= ==========================================================
    argument       shape                         dtype
    ============== ============================= ==========================================================
    q              [B, Tq, H, D]                 main: float16, bfloat16 or float32 (float64: `torch` only)
    k              [B, Tk, HK, D]                main
    v              [B, Tk, HK, DV]               main
    cu_seqlens_q   [N+1]                         int32 or int64; both or neither; B must be 1
    cu_seqlens_k
    o              [B, Tq, H, DV]                main
    lse            [B, H, Tq]                    float32 (float64 with float64 inputs); no gradient through it
    ============== ============================= ==========================================================

    * Query i stands at key i + Tk - Tq of its sequence. ``causal``: it sees no key after that place. ``window``:
      (left, right), how many keys before and after it are seen, None for no bound; ``causal`` makes right 0.
    * ``softcap`` c: scores become c * tanh(s / c), with s scaled already; 0 is none. ``scale=None`` means D^-0.5.
    * ``deterministic``: gradients repeat bit for bit. False allows a backend to add into dq in any order.
    * ``backend``: "torch", "library", "triton"; None takes ``use_backend``, then ``MINDSPEED_KDA_BACKEND``, then the
      best that can run the call. The same backend runs backward.

    A query that sees no key, and one that belongs to no sequence, has o = 0, lse = -inf and gradients 0. Inputs may
    have any strides and are never written. Raises ValueError or TypeError naming the argument, before any kernel runs,
    and RuntimeError with the reason where the backend asked for cannot run the call. Page: docs/flash_attention.md.
    """
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v))
    if torch.compiler.is_compiling():
        left, right = window
        both = ops.flash_attention_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k,
            causal, left, right, softcap, scale, deterministic, needs_grad, _traced_request(backend),
        )  # fmt: skip
        return both if return_lse else both[0]
    call = attention.check(
        q, k, v,
        causal=causal, window=window, softcap=softcap, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, deterministic=deterministic, needs_grad=needs_grad,
    )  # fmt: skip
    impl = REGISTRY.choose(attention.OP, call, call.device.type, backend).load()
    o, lse = FlashAttention.apply(call, impl, q, k, v) if call.needs_grad else impl.forward(call)
    return (o, lse) if return_lse else o


def flash_attention_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = True,
    backend: str | None = None,
) -> FlashAttentionGrads:
    """The backward of ``flash_attention`` on its own: dq, dk, dv, each with its input's shape and dtype.

    ``o`` and ``lse`` are what ``flash_attention(..., return_lse=True)`` gave for the same q, k, v and options; ``do``
    is the gradient of o, with its shape and dtype. Raises what ``flash_attention`` raises.
    """
    call = attention.check(
        q, k, v,
        causal=causal, window=window, softcap=softcap, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, deterministic=deterministic, needs_grad=True,
    )  # fmt: skip
    attention.check_backward(call, do, o, lse)
    impl = REGISTRY.choose(attention.OP, call, call.device.type, backend).load()
    with torch.no_grad():
        return impl.backward(call, o, lse, do)
