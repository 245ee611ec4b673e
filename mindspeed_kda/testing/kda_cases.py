"""Accuracy cases of ``chunk_kda``, the same for every backend, and their judge: the reference in float64, which
tests/reference holds to the token recurrence within 1e-10."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import chunk_kda
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import Errors, measure
from mindspeed_kda.testing.oracle import gradients

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GATE_PARAMETERS = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}
"""Limit of dA_log and ddt_bias: sums over all tokens, which cancel."""
PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
"""Outputs with a row for each token."""


@dataclass(frozen=True)
class Case:
    """Options of ``kda_inputs`` (all but dtype and device), and a change of the inputs in place."""

    options: dict[str, Any]
    change: Callable[[KdaInputs], None] | None = None

    def inputs(self, dtype: torch.dtype, device: torch.device | str) -> KdaInputs:
        made = kda_inputs(**{"H": 2, "dtype": dtype, "device": device, **self.options})
        if self.change is not None:
            self.change(made)
        return made


def _forget(inputs: KdaInputs) -> None:
    inputs.arguments["g"][:, 3::7] = -1000.0


def _zero_beta(inputs: KdaInputs) -> None:
    """Tokens that write nothing, or next to nothing, have a right dbeta all the same."""
    beta = inputs.arguments["beta"]
    beta[:, ::3] = 0.0
    beta[:, 1::6] = 1e-3


def _packed(bounds: list[int], **options: Any) -> dict[str, Any]:
    """Three tokens past the last sequence."""
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    return {"T": bounds[-1] + 3, "HV": 4, "lengths": lengths, "gate": "softplus", "state_v_first": True, **options}


GATES: dict[str, dict[str, Any]] = {
    "logsigmoid / 0.1": {"gate_divisor": 0.1, "B": 4},
    "logsigmoid": {},
    "logsigmoid / 10": {"gate_divisor": 10.0},
    "-0.05": {"decay": -0.05},
    "-1": {"decay": -1.0},
    "-5": {"decay": -5.0},
    "-10": {"decay": -10.0},
    "lower bound": {"gate": "lower_bound"},
    "lower bound at its end": {"gate": "lower_bound", "decay": -5.0},
    "lower bound -8 at its end": {"gate": "lower_bound", "lower_bound": -8.0, "decay": -8.0},
    "lower bound, A_log 20": {"gate": "lower_bound", "A_log": 20.0},
    "softplus": {"gate": "softplus"},
    "softplus, A_log 20": {"gate": "softplus", "A_log": 20.0},
}
_WIDE = {"T": 500, "HV": 4, "K": 128, "V": 128}
# Many heads or batches where few tokens carry a gradient: one that a token carries alone has that one's error, which
# may be four times the usual. Under a strong decay the final state's gradient reaches the last tokens alone: over six
# draws of T 64 with two heads bf16's RMS ratio of dbeta is 1.5e-3 to 1.0e-2 (benchmarks/dbeta_roundings.py).
CASES: dict[str, Case] = {
    **{f"T {T}": Case({"T": T, "H": 16, "gate": "softplus"}) for T in (1, 15, 63, 64, 65, 2048)},
    **{f"T {T}": Case({"T": T, "gate": "softplus"}) for T in (500, 8192)},
    **{f"gate {name}": Case(_WIDE | options) for name, options in GATES.items()},
    "tokens that forget everything": Case({"T": 500, "H": 1, "HV": 2, "K": 128, "V": 128}, _forget),
    "beta of zero": Case({"T": 500, "raw": False}, _zero_beta),
    "beta of zero, negative eigenvalues": Case({"T": 500, "raw": False, "neg_eigval": True}, _zero_beta),
    **{f"size {n}": Case({"T": 200, "H": 8, "K": n, "V": n, "gate": "lower_bound"}) for n in (60, 64, 100, 128, 256)},
    "packed": Case(_packed([0, 15, 100, 300, 1200, 2000])),
    "packed, an empty sequence": Case(_packed([0, 65, 65, 128])),
    "packed, K 128, empty ends": Case(
        _packed([0, 0, 64, 193, 194, 194], K=128, V=128, cu_dtype=torch.int64, state_v_first=False)
    ),
    **{
        f"chunk {n}": Case({"T": 200, "H": 8, "BT": n, "gate": "softplus", "disable_recompute": True}) for n in (16, 32)
    },
    "32 heads, ready-made inputs": Case(
        {"T": 200, "H": 32, "raw": False, "neg_eigval": True, "states": False, "wide_beta_and_g": False}
    ),
    "raw inputs in the main dtype": Case(
        _WIDE | {"B": 2, "gate": "lower_bound", "wide_beta_and_g": False, "neg_eigval": True, "scale": 0.3}
    ),
    "no dt_bias": Case({"T": 130, "gate": "softplus", "dt_bias": False, "states": False}),
}


def judged(inputs: KdaInputs) -> dict[str, Tensor]:
    """o, final_state and every gradient in float64, on the inputs' device."""
    double = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.arguments.items()}
    dht = None if inputs.dht is None else inputs.dht.double()
    return gradients(chunk_kda, double | {"backend": "torch"}, inputs.do.double(), dht)


def errors_of(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Errors]:
    """By output. Raises AssertionError where an output is missing or one too many."""
    assert got.keys() == expected.keys()
    return {name: measure(got[name], reference, dtype) for name, reference in expected.items()}


def assert_results(inputs: KdaInputs, got: dict[str, Tensor], expected: dict[str, Tensor] | None = None) -> None:
    """Raises AssertionError with every limit missed: RMS ratio, mixed tolerance, finiteness, zeros past the end."""
    dtype = inputs.arguments["q"].dtype
    wrong = []
    for name, e in errors_of(got, judged(inputs) if expected is None else expected, dtype).items():
        limit = (GATE_PARAMETERS if name in ("dA_log", "ddt_bias") else LIMIT)[dtype]
        if misses := e.misses(dtype, limit):
            wrong.append(f"{name}: {'; '.join(misses)}")
    cu = inputs.arguments.get("cu_seqlens")
    if cu is not None:
        wrong += [f"{n}: not 0 past the last sequence" for n in PER_TOKEN if (got[n][:, int(cu[-1]) :] != 0).any()]
    assert not wrong, "\n".join(wrong)


def assert_right(inputs: KdaInputs, backend: str) -> dict[str, Tensor]:
    """The outputs and gradients of a backend, once they are within limits."""
    got = gradients(chunk_kda, inputs.arguments | {"backend": backend}, inputs.do, inputs.dht)
    assert_results(inputs, got)
    return got


def assert_repeats(inputs: KdaInputs, backend: str, runs: int) -> None:
    """On an NVIDIA GPU: that many further runs give the same bits, and none waits for the device."""
    arguments = inputs.arguments | {"backend": backend}
    first = gradients(chunk_kda, arguments, inputs.do, inputs.dht)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [gradients(chunk_kda, arguments, inputs.do, inputs.dht) for _ in range(runs)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in again:
        for name, t in first.items():
            assert torch.equal(t, run[name]), name


def assert_large_offsets(backend: str, K: int, V: int) -> None:
    """On an NVIDIA GPU, tensors of over 2^31 elements: a pack's last sequence equals the call on it alone."""
    torch.cuda.empty_cache()
    T, H, last = 525_000, 32, 200
    assert T * H * max(K, V) > 2**31
    gen = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    fixed = flags | {"A_log": torch.zeros(H, device="cuda"), "lower_bound": -5.0, "backend": backend}
    tokens = {"q": randn(1, T, H, K), "k": randn(1, T, H, K), "v": randn(1, T, H, V), "g": randn(1, T, H, K)}
    tokens["beta"], do = randn(1, T, H), randn(1, T, H, V)
    cu = torch.tensor([0, T - last, T], device="cuda", dtype=torch.int32)
    whole = gradients(chunk_kda, fixed | tokens | {"cu_seqlens": cu}, do, None)
    ends = {name: whole.pop(name)[:, -last:].clone() for name in PER_TOKEN}
    del whole
    short = {name: t[:, -last:].clone() for name, t in tokens.items()}
    alone = gradients(chunk_kda, fixed | short, do[:, -last:].clone(), None)
    for name in PER_TOKEN:
        assert torch.equal(ends[name], alone[name]), name
