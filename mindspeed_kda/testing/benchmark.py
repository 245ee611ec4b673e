"""Timed cases of the public ops: every backend and peer on the same inputs, each result checked before it is timed.

``bench`` and the scripts in benchmarks/ call ``measure_all``. Inputs are random (``testing.inputs``), never zero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.judge import FORWARD, SUBJECTS, Call, Results, Subject, Verdict
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.timing import Timing, copy_speed, device_name, median_time

OPS = {"wy_dqkg": SUBJECTS[wy_dqkg.OP], "chunk_kda": SUBJECTS[chunk_kda.OP], "chunk_kda_fwd": FORWARD}
"""What can be timed: the fused op; the whole layer forward and backward; its forward alone."""
EAGER = "torch"
"""The backend that ``times_eager`` compares with."""


@dataclass(frozen=True)
class Case:
    """Sizes and dtypes of one call of ``what``, a key of OPS; ``state_dtype`` None means float32."""

    what: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int
    dtype: torch.dtype
    state_dtype: torch.dtype | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        heads = f"{self.H}" if self.HV == self.H else f"{self.H}/{self.HV}"
        return f"{self.B}x{self.T}x{heads}x{self.K}x{self.V} BT{self.BT}{'' if self.lengths is None else ' packed'}"

    @property
    def dtype_name(self) -> str:
        main = str(self.dtype).removeprefix("torch.")
        return main if self.state_dtype is None else f"{main}, states too"

    def inputs(self, device: torch.device, seed: int = 0) -> Call:
        """Drawn on ``device``: on the CPU in float64 the draw of a training shape takes longer than all its timings."""
        sizes = (self.B, self.T, self.H, self.K, self.V, self.BT)
        lengths = None if self.lengths is None else list(self.lengths)
        if OPS[self.what].op == wy_dqkg.OP:
            return wy_inputs(
                *sizes, HV=self.HV, dtype=self.dtype, state_dtype=self.state_dtype, lengths=lengths,
                device=device, seed=seed, on_device=True,
            )  # fmt: skip
        # as training calls the layer: gate, q/k norm and sigmoid inside, the lower-bounded gate at -5, no states
        drawn = kda_inputs(
            *sizes, HV=self.HV, dtype=self.dtype, gate=LOWER_BOUND, wide_beta_and_g=False, states=False,
            lengths=lengths, device=device, seed=seed, on_device=True, safe_gate=True,
        )  # fmt: skip
        return {**drawn.arguments, "do": drawn.do}


@dataclass(frozen=True)
class Measurement:
    """One backend on one case: a timing, or the limits that its result misses, or the reason why it did not run.

    A peer is timed although it misses our limits, so long as it computes the same thing; ``note`` says what it misses.
    """

    case: Case
    backend: str
    nbytes: int
    copy_speed: float
    timing: Timing | None = None
    misses: list[str] = field(default_factory=list)
    reason: str | None = None
    eager: float | None = None
    note: str = ""

    @property
    def speed(self) -> float:
        """Bytes a second, counting each input and output once."""
        return 0.0 if self.timing is None else self.nbytes / self.timing.median

    @property
    def of_copy(self) -> float:
        return self.speed / self.copy_speed

    @property
    def times_eager(self) -> float | None:
        return None if self.timing is None or self.eager is None else self.eager / self.timing.median

    def as_dict(self) -> dict[str, Any]:
        case = {
            k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in asdict(self.case).items()
        }
        return {
            "case": case,
            "backend": self.backend,
            "seconds": None if self.timing is None else asdict(self.timing),
            "bytes": self.nbytes,
            "bytes_per_second": self.speed,
            "of_copy": self.of_copy,
            "times_eager": self.times_eager,
            "misses": self.misses,
            "reason": self.reason,
            "note": self.note,
        }


@dataclass(frozen=True)
class Result:
    """All measurements on one device. ``cannot``: why a backend that was required cannot run, or None."""

    what: str
    device: str
    torch: str
    copy_speed: float
    rows: list[Measurement]
    cannot: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "device": self.device,
            "torch": self.torch,
            "copy_bytes_per_second": self.copy_speed,
            "rows": [m.as_dict() for m in self.rows],
        }


@dataclass(frozen=True)
class Peer:
    """Another library's function: why it cannot run on a device, and by key of OPS a callable for one call."""

    why_not: Callable[[torch.device], str | None]
    bind: dict[str, Callable[[Call], Callable[[], Results]]]


def _fla_why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"flash-linear-attention's kernels are Triton for a GPU, and the device is {device.type}"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed: pip install flash-linear-attention"
    return None


def _fla_wy(call: Call) -> Callable[[], Results]:
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused

    arguments = {n: v for n, v in call.items() if n != "state_v_first"}
    arguments["scale"] = call["q"].shape[-1] ** -0.5
    return lambda: dict(zip(WyDqkgGrads._fields, chunk_kda_bwd_wy_dqkg_fused(**arguments), strict=True))


def _fla_arguments(call: Call) -> Call:
    """Its names are ours, but for the chunk size, which it fixes, and the names of flags at their defaults."""
    left_out = ("do", "chunk_size", "state_v_first", "allow_neg_eigval")
    return {**{n: v for n, v in call.items() if n not in left_out}, "output_final_state": True}


def _fla_forward(call: Call) -> Callable[[], Results]:
    from fla.ops.kda import chunk_kda as layer

    arguments = _fla_arguments(call)

    def run() -> Results:
        with torch.no_grad():
            return dict(zip(("o", "final_state"), layer(**arguments), strict=True))

    return run


def _fla_training(call: Call) -> Callable[[], Results]:
    from fla.ops.kda import chunk_kda as layer

    arguments, leaves = _fla_arguments(call), {}
    for name, gradient in zip(chunk_kda.ChunkKdaTensors._fields, chunk_kda.ChunkKdaGrads._fields, strict=False):
        if name in arguments:
            arguments[name] = leaves[gradient] = arguments[name].detach().clone().requires_grad_()

    def run() -> Results:
        o, final_state = layer(**arguments)
        found = torch.autograd.grad(o, list(leaves.values()), call["do"])
        return {"o": o.detach(), "final_state": final_state, **dict(zip(leaves, found, strict=True))}

    return run


PEERS = {
    "fla": Peer(_fla_why_not, {"wy_dqkg": _fla_wy, "chunk_kda": _fla_training, "chunk_kda_fwd": _fla_forward}),
}


PEER_RMS_LIMIT = 2e-2
"""RMS ratio up to which a peer's result counts as the same function, computed less exactly (TF32, 16-bit storage)."""


def measure_all(
    cases: Iterable[Case],
    backends: Iterable[str],
    device: torch.device,
    *,
    peers: Iterable[str] = (),
    seconds: float = 0.5,
    report: Callable[[float, str], None] = lambda share, said: None,
    required: bool = False,
) -> Result:
    """Checks and times every backend and peer on every case; PyTorch eager first, so that all can be compared.

    With ``required`` a backend that cannot run a case ends the work there, with the reason in ``Result.cannot``.
    """
    cases, peers, names = list(cases), list(peers), sorted(backends, key=lambda name: name != EAGER)
    report(0.0, "copy speed")
    roof = copy_speed(device)
    rows: list[Measurement] = []
    total = len(cases) * (len(names) + len(peers))
    for case in cases:
        subject = OPS[case.what]
        call = case.inputs(device)
        reference = subject.float64(call)
        blank = Measurement(case, "", subject.nbytes(subject.check(call)), roof)
        eager: float | None = None
        for name in names:
            report(len(rows) / total, f"{case.label} {case.dtype_name} {name}")
            reason = subject.why_not(REGISTRY.of(subject.op)[name], call)
            if reason is not None and required:
                return Result(case.what, device_name(device), torch.__version__, roof, rows, f"{name}: {reason}")
            row = replace(blank, backend=name, reason=reason, eager=eager)
            if reason is None:
                fn = subject.bind(call, name)
                misses = _misses(subject.verdicts(call, fn(), reference))
                row = replace(row, misses=misses, timing=None if misses else median_time(fn, device, budget=seconds))
            if name == EAGER and row.timing is not None:
                eager = row.timing.median
                row = replace(row, eager=eager)
            rows.append(row)
        for name in peers:
            report(len(rows) / total, f"{case.label} {case.dtype_name} {name}")
            rows.append(_peer(replace(blank, backend=name, eager=eager), subject, call, reference, device, seconds))
    report(1.0, "done")
    return Result(cases[0].what if cases else "", device_name(device), torch.__version__, roof, rows)


def _misses(verdicts: list[Verdict]) -> list[str]:
    return [f"{v.output}: {miss}" for v in verdicts for miss in v.misses]


def _peer(
    row: Measurement, subject: Subject, call: Call, reference: Results, device: torch.device, seconds: float
) -> Measurement:
    try:
        fn = PEERS[row.backend].bind[row.case.what](call)
        verdicts = subject.verdicts(call, fn(), reference)
    except Exception as error:  # another library's failure is its row, not the end of ours
        return replace(row, reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    wrong = [v for v in verdicts if not v.errors.finite or not v.errors.rms_ratio <= PEER_RMS_LIMIT]
    if wrong:
        return replace(row, reason="computes something else: " + "; ".join(_misses(wrong)))
    return replace(row, timing=median_time(fn, device, budget=seconds), note="; ".join(_misses(verdicts)))
