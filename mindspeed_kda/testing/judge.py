"""The float64 judge: one call of a public op, the right answer for it, and a verdict on each output of a backend.

Used by ``verify``, ``demo``, ``doctor`` and ``bench``; tests take ``metrics.assert_accurate`` directly. The judge is
the reference in float64, which tests hold against a token recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mindspeed_kda
from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.registry import Backend
from mindspeed_kda.testing.inputs import to_float64, valid_elements, wy_inputs
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

    ``check`` makes the contract's call of it, for predicates; ``run`` returns every output by name; ``valid`` masks
    structural zeros out; ``limit`` is the RMS ratio allowed for an output in a main dtype; ``probe`` makes a small
    random call.
    """

    op: str
    check: Callable[[Call], Any]
    run: Callable[[Call, str], Results]
    valid: Callable[[str, Tensor, Call], Tensor | None]
    limit: Callable[[str, torch.dtype], float]
    probe: Callable[[torch.dtype], Call]

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
            errors = measure(results[name].to(want.device), want, dtype, self.valid(name, want, judged))
            limit = self.limit(name, dtype)
            found.append(Verdict(name, errors, limit, errors.misses(dtype, limit)))
        return found


def judge_device(call: Call) -> torch.device:
    """Where the judge computes: NPUs have no float64."""
    device: torch.device = call["q"].device
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def to_device(call: Call, device: torch.device) -> Call:
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in call.items()}


def _run_wy(call: Call, backend: str) -> Results:
    return mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**call, backend=backend)._asdict()


KDA_LIMIT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GATE_PARAMETERS = ("dA_log", "ddt_bias")
GATE_PARAMETER_LIMIT = 8e-3
"""Of dA_log and ddt_bias in 16-bit: sums over every token of terms that cancel."""


def _kda_limit(name: str, dtype: torch.dtype) -> float:
    return GATE_PARAMETER_LIMIT if name in GATE_PARAMETERS and dtype.itemsize == 2 else KDA_LIMIT[dtype]


def _check_kda(call: Call) -> Any:
    return chunk_kda.check(**{n: v for n, v in call.items() if n not in ("do", "dht")})


def _run_kda(call: Call, backend: str) -> Results:
    arguments = {n: v for n, v in call.items() if n not in ("do", "dht")}
    leaves = {}
    for name, gradient in zip(chunk_kda.ChunkKdaTensors._fields, chunk_kda.ChunkKdaGrads._fields, strict=False):
        if arguments.get(name) is not None:
            arguments[name] = leaves[gradient] = arguments[name].detach().clone().requires_grad_()
    arguments["output_final_state"] = True
    with torch.enable_grad():
        o, final_state = mindspeed_kda.chunk_kda(**arguments, backend=backend)
        assert final_state is not None
        outputs, gradients = [o], [call["do"]]
        if call.get("dht") is not None:
            outputs, gradients = [o, final_state], [call["do"], call["dht"]]
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(leaves, found, strict=True))}


def _probe_kda(dtype: torch.dtype) -> Call:
    gen = torch.Generator().manual_seed(0)
    q, k, v, g, do = (torch.randn(1, 80, 1, 64, generator=gen).to(dtype) for _ in range(5))
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": torch.randn(1, 80, 1, generator=gen).to(dtype), "do": do,
        "A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 64), "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip


SUBJECTS = {
    wy_dqkg.OP: Subject(
        wy_dqkg.OP,
        check=lambda call: wy_dqkg.check(**call),
        run=_run_wy,
        valid=valid_elements,
        limit=lambda name, dtype: RMS_LIMIT[dtype],
        probe=lambda dtype: wy_inputs(B=1, T=80, H=1, K=64, V=64, BT=64, dtype=dtype),
    ),
    chunk_kda.OP: Subject(
        chunk_kda.OP,
        check=_check_kda,
        run=_run_kda,
        valid=lambda name, reference, call: None,
        limit=_kda_limit,
        probe=_probe_kda,
    ),
}
"""By op. An op without a subject is listed by ``doctor`` and not judged."""
