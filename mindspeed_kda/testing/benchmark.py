"""Timed cases of the public ops: every backend and peer on the same inputs, each result checked before it is timed.

``bench`` and the scripts in benchmarks/ call ``measure_all``. Inputs are random (``testing.inputs``), never zero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.judge import SUBJECTS, Call, Results, to_device
from mindspeed_kda.testing.timing import Timing, copy_speed, device_name, median_time

OPS = {"wy_dqkg": wy_dqkg.OP}
EAGER = "torch"
"""The backend that ``times_eager`` compares with."""


@dataclass(frozen=True)
class Case:
    """Sizes and dtypes of one call; ``state_dtype`` None means float32."""

    op: str
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

    def inputs(self, seed: int = 0) -> Call:
        return wy_inputs(
            self.B, self.T, self.H, self.K, self.V, self.BT, HV=self.HV, dtype=self.dtype,
            state_dtype=self.state_dtype, lengths=None if self.lengths is None else list(self.lengths), seed=seed,
        )  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One backend on one case: a timing, or the limits that its result misses, or the reason why it did not run."""

    case: Case
    backend: str
    nbytes: int
    copy_speed: float
    timing: Timing | None = None
    misses: list[str] = field(default_factory=list)
    reason: str | None = None
    eager: float | None = None

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
        }


@dataclass(frozen=True)
class Result:
    """All measurements on one device. ``cannot``: why a backend that was required cannot run, or None."""

    op: str
    device: str
    torch: str
    copy_speed: float
    rows: list[Measurement]
    cannot: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "device": self.device,
            "torch": self.torch,
            "copy_bytes_per_second": self.copy_speed,
            "rows": [m.as_dict() for m in self.rows],
        }


@dataclass(frozen=True)
class Peer:
    """Another library's function for the same op: why it cannot run on a device, and a callable for one call."""

    why_not: Callable[[torch.device], str | None]
    bind: Callable[[Call], Callable[[], Results]]


def _fla_why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"flash-linear-attention's kernels are Triton for a GPU, and the device is {device.type}"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed: pip install flash-linear-attention"
    return None


def _fla(call: Call) -> Callable[[], Results]:
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused

    arguments = {n: v for n, v in call.items() if n != "state_v_first"}
    arguments["scale"] = call["q"].shape[-1] ** -0.5

    def run() -> Results:
        return dict(zip(WyDqkgGrads._fields, chunk_kda_bwd_wy_dqkg_fused(**arguments), strict=True))

    return run


PEERS = {"fla": Peer(_fla_why_not, _fla)}


def measure_all(
    cases: Iterable[Case],
    backends: Iterable[str],
    device: torch.device,
    *,
    peer: str | None = None,
    seconds: float = 0.5,
    report: Callable[[float, str], None] = lambda share, said: None,
    required: bool = False,
) -> Result:
    """Checks and times every backend (and the peer) on every case; PyTorch eager first, so that all can be compared.

    With ``required`` a backend that cannot run a case ends the work there, with the reason in ``Result.cannot``.
    """
    cases, names = list(cases), sorted(backends, key=lambda name: name != EAGER)
    report(0.0, "copy speed")
    roof = copy_speed(device)
    rows: list[Measurement] = []
    total = len(cases) * (len(names) + (peer is not None))
    for case in cases:
        subject = SUBJECTS[case.op]
        call = to_device(case.inputs(), device)
        reference = subject.float64(call)
        nbytes = wy_dqkg.bytes_moved(subject.check(call))
        runs: list[tuple[str, Callable[[], Results] | None, str | None]] = []
        for name in names:
            reason = subject.why_not(REGISTRY.of(case.op)[name], call)
            if reason is not None and required:
                return Result(case.op, device_name(device), torch.__version__, roof, rows, f"{name}: {reason}")
            runs.append((name, None if reason else _bound(case.op, call, name), reason))
        if peer is not None:
            runs.append((peer, PEERS[peer].bind(call), None))
        eager: float | None = None
        for name, fn, reason in runs:
            report(len(rows) / total, f"{case.label} {case.dtype_name} {name}")
            row = Measurement(case, name, nbytes, roof, reason=reason)
            if fn is not None:
                verdicts = subject.verdicts(call, fn(), reference)
                misses = [f"{v.output}: {miss}" for v in verdicts for miss in v.misses]
                timing = None if misses else median_time(fn, device, budget=seconds)
                if name == EAGER and timing is not None:
                    eager = timing.median
                row = Measurement(case, name, nbytes, roof, timing, misses, None, eager)
            rows.append(row)
    report(1.0, "done")
    return Result(cases[0].op if cases else "", device_name(device), torch.__version__, roof, rows)


def _bound(op: str, call: Call, backend: str) -> Callable[[], Results]:
    return lambda: SUBJECTS[op].run(call, backend)
