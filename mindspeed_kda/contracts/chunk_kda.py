"""Contract of ``chunk_kda``: arguments, checks, the call as backends see it, and what a backend must provide.

The table of shapes and dtypes stands in the public function's docstring (``mindspeed_kda.api``).

**Backend protocol.** ``Backend.load()`` returns an object (a module will do) with the functions of ``ChunkKdaImpl``:

* ``forward(call) -> (o, final_state | None, saved)``: o in the main dtype, final_state (``wide`` dtype, state layout of
  the call) where ``call.output_final_state``; ``saved`` is a tuple of tensors handed back to ``backward``, empty where
  ``call.needs_grad`` is False. Outputs and saved tensors never alias an input.
* ``backward(call, saved, do, dht) -> ChunkKdaGrads``: ``do`` has o's shape and dtype, any strides; ``dht`` is the
  gradient of the final state or None. Each gradient has its input's shape; its dtype may be wider (the autograd
  function casts); None exactly where the input is absent. ``call`` equals the one of ``forward``.
* ``saved_specs(call)``: shape and dtype of each saved tensor, a function of shapes, dtypes and flags only (under
  ``torch.compile`` it is asked with fake tensors).

Memory policy: by default a backend saves at most A and Aqk in the main dtype and per-row norms, and recomputes the
rest from the inputs; ``call.disable_recompute`` allows more. No call may synchronise with the device: the number of
chunks of packed sequences is bounded from shapes (``ChunkKdaCall.NT``), and chunks past the last sequence hold no row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts import checks
from mindspeed_kda.contracts.wy_dqkg import MAIN_DTYPES, wide

OP = "chunk_kda"
PREGATED, SOFTPLUS, LOWER_BOUND = "pregated", "softplus", "lower_bound"
"""Values of ``ChunkKdaCall.gate``: g is the decay itself, or the raw input of one of the two gates (section 2)."""

Spec = tuple[tuple[int, ...], torch.dtype]


class ChunkKdaGrads(NamedTuple):
    """Gradients in the order of the inputs; None where the input is absent."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dh0: Tensor | None


class Recurrence(NamedTuple):
    """What the recurrence of the backward (K2) leaves, named as the op of docs/kda_math.md, section 5, takes it: in the
    main dtype or wider.

    h, dh [B, NT, HV, K, V]: the state at each chunk's start, the gradient of the one at its end; v_new, dv [B, T, HV,
    V]; dh0 as initial_state, None where there is none.
    """

    h: Tensor
    v_new: Tensor
    dh: Tensor
    dv: Tensor
    dh0: Tensor | None


class ChunkKdaTensors(NamedTuple):
    """The tensors of a call in the order of ``ChunkKdaGrads``, then cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


@dataclass(slots=True, eq=False)
class ChunkKdaCall:
    """One checked call: the tensors as given (strides too), the flags and the sizes. Not to be modified.

    gate: one of PREGATED, SOFTPLUS, LOWER_BOUND; lower_bound is a number with LOWER_BOUND and None otherwise.
    beta_scale: c of section 2, 2.0 with allow_neg_eigval, where beta_sigmoid; dt_bias may be [HV, K] or [HV * K].
    needs_grad: whether a backward may follow. N sequences; NT chunks: exact for dense inputs, a bound from shapes for
    packed ones (chunks past the last sequence hold no row).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    output_final_state: bool
    qk_l2norm: bool
    gate: str
    lower_bound: float | None
    beta_sigmoid: bool
    beta_scale: float
    disable_recompute: bool
    state_v_first: bool
    needs_grad: bool
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int
    NT: int
    N: int

    @property
    def dtype(self) -> torch.dtype:
        """The main dtype."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def tensors(self) -> ChunkKdaTensors:
        return ChunkKdaTensors(
            self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.initial_state, self.cu_seqlens
        )

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> ChunkKdaCall:
        """The same call on other tensors of the same shapes and dtypes, in the order of ``tensors``; unchecked."""
        named: dict[str, Any] = dict(zip(ChunkKdaTensors._fields, tensors, strict=True))
        return dataclasses.replace(self, **named)


def arguments(call: ChunkKdaCall) -> dict[str, Any]:
    """The keyword arguments of ``mindspeed_kda.chunk_kda`` that make this call again."""
    return {
        **call.tensors._asdict(),
        "scale": call.scale,
        "output_final_state": call.output_final_state,
        "use_qk_l2norm_in_kernel": call.qk_l2norm,
        "use_gate_in_kernel": call.gate != PREGATED,
        "use_beta_sigmoid_in_kernel": call.beta_sigmoid,
        "allow_neg_eigval": call.beta_scale != 1.0,
        "lower_bound": call.lower_bound,
        "disable_recompute": call.disable_recompute,
        "state_v_first": call.state_v_first,
        "chunk_size": call.BT,
    }


class ChunkKdaImpl(Protocol):
    """What a backend's ``load()`` returns for this op (see the head of this file)."""

    def forward(self, call: ChunkKdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]: ...

    def backward(
        self, call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> ChunkKdaGrads: ...

    def saved_specs(self, call: ChunkKdaCall) -> tuple[Spec, ...]: ...


class ChunkKdaHalves(Protocol):
    """The two halves of ``backward``, of backends that have them apart; ``saved`` is what ``forward`` handed out.

    ``bwd_recurrence`` is K2. ``bwd_inputs`` is K1, from what K2 left to the gradients; its dh0 is the one given.
    """

    def bwd_recurrence(
        self, call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> Recurrence: ...

    def bwd_inputs(
        self, call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, recurrence: Recurrence
    ) -> ChunkKdaGrads: ...


def check(
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
    needs_grad: bool = True,
) -> ChunkKdaCall:
    """Validates one call. Raises ValueError or TypeError; runs no kernel and reads device values only if asked to."""
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state}
    given.update({name: t for name, t in optional.items() if t is not None})
    for name, value in given.items():
        checks.tensor(name, value)
    checks.rank("q", q, "[B, T, H, K]")
    checks.rank("v", v, "[B, T, HV, V]")
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    checks.head_size("q", "K", K)
    checks.head_size("v", "V", V)
    BT = checks.chunk_size(chunk_size)
    checks.value_heads(H, HV)
    for name, flag in (
        ("output_final_state", output_final_state),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        ("use_gate_in_kernel", use_gate_in_kernel),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
        ("safe_gate", safe_gate),
        ("disable_recompute", disable_recompute),
        ("state_v_first", state_v_first),
    ):
        checks.flag(name, flag)
    gate = _gate(use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias)

    checks.dtype("q", q, MAIN_DTYPES)
    main_only, either, wide_only = (q.dtype,), (wide(q.dtype), q.dtype), (wide(q.dtype),)
    for name, t, axes, expected, dtypes in (
        ("k", k, "[B, T, H, K]", (B, T, H, K), main_only),
        ("v", v, "[B, T, HV, V]", (B, T, HV, V), main_only),
        ("g", g, "[B, T, HV, K]", (B, T, HV, K), either),
        ("beta", beta, "[B, T, HV]", (B, T, HV), either),
    ):
        checks.rank(name, t, axes)
        checks.shape(name, t, axes, expected)
        checks.dtype(name, t, dtypes)
    for name, t in given.items():
        checks.device(name, t, q.device, "q")
    if A_log is not None:
        checks.rank("A_log", A_log, "[HV]")
        checks.shape("A_log", A_log, "[HV]", (HV,))
        checks.dtype("A_log", A_log, wide_only)
    if dt_bias is not None:
        if tuple(dt_bias.shape) not in ((HV, K), (HV * K,)):
            checks.fail_shape("dt_bias", "[HV, K] or [HV * K]", (HV, K), dt_bias.shape)
        checks.dtype("dt_bias", dt_bias, wide_only)

    N, NT = B, chunks.cdiv(T, BT)
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, B, T, q.device)
        N = cu_seqlens.shape[0] - 1
        NT = chunks.max_chunks(T, N, BT)
    if initial_state is not None:
        axes, expected = ("[N, HV, V, K]", (N, HV, V, K)) if state_v_first else ("[N, HV, K, V]", (N, HV, K, V))
        checks.rank("initial_state", initial_state, axes)
        checks.shape("initial_state", initial_state, axes, expected)
        checks.dtype("initial_state", initial_state, wide_only)
    return ChunkKdaCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        checks.scale(scale, K), output_final_state, use_qk_l2norm_in_kernel,
        gate, float(lower_bound) if gate == LOWER_BOUND and lower_bound is not None else None,
        use_beta_sigmoid_in_kernel, 2.0 if use_beta_sigmoid_in_kernel and allow_neg_eigval else 1.0,
        disable_recompute, state_v_first, needs_grad, B, T, H, HV, K, V, BT, NT, N,
    )  # fmt: skip


def _gate(
    in_kernel: bool, safe_gate: bool, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None
) -> str:
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
            raise TypeError(f"lower_bound: expected a float or None, got {type(lower_bound).__name__}")
        if not (math.isfinite(lower_bound) and lower_bound < 0):
            raise ValueError(f"lower_bound: expected a finite number below 0, got {lower_bound}")
    if not in_kernel:
        for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is not None:
                raise ValueError(
                    f"{name}: expected None without use_gate_in_kernel (g is the decay itself), got a tensor"
                )
        if lower_bound is not None and not safe_gate:
            raise ValueError(
                f"lower_bound: expected None without use_gate_in_kernel (g is the decay itself), got {lower_bound}"
            )
        return PREGATED
    if safe_gate and lower_bound is None:
        raise ValueError("lower_bound: expected a number below 0 with safe_gate and use_gate_in_kernel, got None")
    if A_log is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel, got None")
    return SOFTPLUS if lower_bound is None else LOWER_BOUND


def decline_foreign(
    *,
    cp_context: object = None,
    cu_seqlens_cpu: object = None,
    use_graph: bool = False,
    max_num_seqs: object = None,
    return_intermediate_states: bool = False,
) -> None:
    """flash-linear-attention's further keywords: served at their defaults; NotImplementedError with the reason else."""
    for name, value, default, reason in (
        ("cp_context", cp_context, None, "context parallelism over devices is not implemented"),
        (
            "cu_seqlens_cpu",
            cu_seqlens_cpu,
            None,
            "no host copy is used: chunk metadata stays on the device of cu_seqlens",
        ),
        ("use_graph", use_graph, False, "calls never synchronise, so that graph capture needs no mode of its own"),
        ("max_num_seqs", max_num_seqs, None, "the number of sequences is that of cu_seqlens"),
        ("return_intermediate_states", return_intermediate_states, False, "the states of chunks are not returned"),
    ):
        if value is not default and value != default:
            raise NotImplementedError(f"{name}: expected {default}, got {value!r}: {reason}")


def state_shape(call: ChunkKdaCall) -> tuple[int, ...]:
    """Shape of initial_state and final_state."""
    size = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    return (call.N, call.HV, *size)


def output_specs(call: ChunkKdaCall) -> tuple[Spec, Spec]:
    """Shape and dtype of o and of the final state."""
    return ((call.B, call.T, call.HV, call.V), call.dtype), (state_shape(call), wide(call.dtype))


def bytes_moved(call: ChunkKdaCall) -> tuple[int, int]:
    """Fewest bytes through device memory of forward and of backward: inputs read once, outputs written once."""
    inputs = sum(t.numel() * t.element_size() for t in call.tensors if t is not None)
    (o_shape, o_dtype), (s_shape, s_dtype) = output_specs(call)
    o = math.prod(o_shape) * o_dtype.itemsize
    state = math.prod(s_shape) * s_dtype.itemsize if call.output_final_state else 0
    grads = inputs - (0 if call.cu_seqlens is None else call.cu_seqlens.numel() * call.cu_seqlens.element_size())
    return inputs + o + state, inputs + o + state + grads
