"""The float64 judge: one call of a public op, the right answer for it, and a verdict on each output of a backend.

Used by ``verify``, ``demo``, ``doctor`` and ``bench``; tests take ``metrics.assert_accurate`` directly. The judge is
the reference in float64, which tests hold against a token recurrence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mindspeed_kda
from mindspeed_kda.contracts import chunk_kda, fused_recurrent_kda, wy_dqkg
from mindspeed_kda.contracts.chunk_kda import SOFTPLUS
from mindspeed_kda.registry import Backend
from mindspeed_kda.testing.inputs import to_float64, valid_elements, wy_inputs
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import RMS_LIMIT, Errors, measure

Call = dict[str, Any]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Errors of one output against float64, and the limits that it misses (none where it is right)."""

    output: str
    errors: Errors
    limit: float
    misses: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {"output": self.output, **self.errors.as_dict(), "rms_limit": self.limit, "misses": self.misses}


@dataclass(frozen=True)
class Subject:
    """How a public op is judged. A call is the op's keyword arguments (for ``chunk_kda`` with do and dht added).

    ``check`` makes the contract's call of it, for predicates; ``bind`` returns a function that runs it on a backend and
    returns every output by name; ``valid`` masks structural zeros out; ``limit`` is the RMS ratio allowed for an output
    in a main dtype; ``nbytes`` counts each input and output once; ``probe`` makes a small random call.
    """

    op: str
    check: Callable[[Call], Any]
    bind: Callable[[Call, str], Callable[[], Results]]
    valid: Callable[[str, Tensor, Call], Tensor | None]
    limit: Callable[[str, torch.dtype], float]
    nbytes: Callable[[Any], int]
    probe: Callable[[torch.dtype], Call]

    def run(self, call: Call, backend: str) -> Results:
        return self.bind(call, backend)()

    def why_not(self, backend: Backend, call: Call) -> str | None:
        """None, or why this backend cannot run this call here."""
        return backend.available() or backend.why_not(self.check(call))

    def float64(self, call: Call) -> Results:
        """The right answer for these very inputs, on the call's device where it has float64, else on the CPU."""
        return self.run(to_float64(to_device(call, judge_device(call))), "torch")

    def verdicts(self, call: Call, results: Results, reference: Results | None = None) -> list[Verdict]:
        """One for each output. ``reference`` saves computing it again."""
        reference = self.float64(call) if reference is None else reference
        judged = to_device(call, judge_device(call))
        dtype = call["q"].dtype
        found = []
        for name, want in reference.items():
            got, valid = results[name].to(want.device), self.valid(name, want, judged)
            limit = self.limit(name, dtype)
            errors = measure(got, want, dtype, valid)
            misses = errors.misses(dtype, limit)
            if valid is not None and bool(got.masked_fill(valid, 0).ne(0).any()):
                misses.append("elements outside every sequence, or dA's upper triangle, are not 0")
            found.append(Verdict(name, errors, limit, misses))
        return found


def judge_device(call: Call) -> torch.device:
    """Where the judge computes: NPUs have no float64."""
    device: torch.device = call["q"].device
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def to_device(call: Call, device: torch.device) -> Call:
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in call.items()}


def _bind_wy(call: Call, backend: str) -> Callable[[], Results]:
    return lambda: mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**call, backend=backend)._asdict()


KDA_LIMIT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GATE_PARAMETERS = ("dA_log", "ddt_bias")
GATE_PARAMETER_LIMIT = 8e-3
"""Of dA_log and ddt_bias in 16-bit: sums over every token of terms that cancel."""


def _kda_limit(name: str, dtype: torch.dtype) -> float:
    return GATE_PARAMETER_LIMIT if name in GATE_PARAMETERS and dtype.itemsize == 2 else KDA_LIMIT[dtype]


def _arguments(call: Call) -> Call:
    return {**{n: v for n, v in call.items() if n not in ("do", "dht")}, "output_final_state": True}


def _forward(function: str, *unknown: str) -> Callable[[Call, str], Callable[[], Results]]:
    """The binding of a public function that returns (o, final_state), without the keywords that it does not know."""

    def bind(call: Call, backend: str) -> Callable[[], Results]:
        arguments = {n: v for n, v in _arguments(call).items() if n not in unknown}

        def run() -> Results:
            with torch.no_grad():
                o, final_state = getattr(mindspeed_kda, function)(**arguments, backend=backend)
            return {"o": o, "final_state": final_state}

        return run

    return bind


def _bind_training(call: Call, backend: str) -> Callable[[], Results]:
    arguments, leaves = _arguments(call), {}
    for name, gradient in zip(chunk_kda.ChunkKdaTensors._fields, chunk_kda.ChunkKdaGrads._fields, strict=False):
        if arguments.get(name) is not None:
            arguments[name] = leaves[gradient] = arguments[name].detach().clone().requires_grad_()
    do, dht = call["do"], call.get("dht")

    def run() -> Results:
        with torch.enable_grad():
            o, final_state = mindspeed_kda.chunk_kda(**arguments, backend=backend)
            assert final_state is not None
            outputs, gradients = ([o], [do]) if dht is None else ([o, final_state], [do, dht])
            found = torch.autograd.grad(outputs, list(leaves.values()), gradients)
        return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(leaves, found, strict=True))}

    return run


def _valid_kda(name: str, reference: Tensor, call: Call) -> Tensor | None:
    """Tokens of a sequence, for the outputs that have tokens."""
    cu_seqlens, tokens = call.get("cu_seqlens"), call["q"].shape[1]
    if cu_seqlens is None or reference.dim() < 3 or reference.shape[:2] != (1, tokens):
        return None
    inside = torch.arange(tokens, device=reference.device) < int(cu_seqlens[-1])
    return inside.view(1, tokens, *([1] * (reference.dim() - 2)))


def _probe_kda(dtype: torch.dtype) -> Call:
    drawn = kda_inputs(B=1, T=80, H=1, K=64, V=64, BT=64, gate=SOFTPLUS, dtype=dtype)
    return {**drawn.arguments, "do": drawn.do, "dht": drawn.dht}


FORWARD = Subject(
    chunk_kda.OP,
    check=lambda call: chunk_kda.check(**_arguments(call), needs_grad=False),
    bind=_forward("chunk_kda"),
    valid=_valid_kda,
    limit=_kda_limit,
    nbytes=lambda checked: chunk_kda.bytes_moved(checked)[0],
    probe=_probe_kda,
)
"""``chunk_kda`` without a backward."""
SUBJECTS = {
    wy_dqkg.OP: Subject(
        wy_dqkg.OP,
        check=lambda call: wy_dqkg.check(**call),
        bind=_bind_wy,
        valid=valid_elements,
        limit=lambda name, dtype: RMS_LIMIT[dtype],
        nbytes=wy_dqkg.bytes_moved,
        probe=lambda dtype: wy_inputs(B=1, T=80, H=1, K=64, V=64, BT=64, dtype=dtype),
    ),
    chunk_kda.OP: dataclasses.replace(
        FORWARD,
        check=lambda call: chunk_kda.check(**_arguments(call)),
        bind=_bind_training,
        nbytes=lambda checked: sum(chunk_kda.bytes_moved(checked)),
    ),
    fused_recurrent_kda.OP: dataclasses.replace(
        FORWARD,
        op=fused_recurrent_kda.OP,
        bind=_forward("fused_recurrent_kda", "chunk_size", "disable_recompute", "safe_gate"),
    ),
}
"""By op, ``chunk_kda`` forward and backward. An op without a subject is listed by ``doctor`` and not judged."""
