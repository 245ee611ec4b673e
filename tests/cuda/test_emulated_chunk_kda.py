"""The native training step whole, run on this processor: plan.py, its operators' schemas and every kernel, against
float64. The emulator stands for the binding alone."""

from __future__ import annotations

import re

import pytest
import torch
from sources import KERNELS, build, emulated

from mindspeed_kda import chunk_kda
from mindspeed_kda.backends import cuda_backend
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.cuda_kernels.chunk_kda import plan
from mindspeed_kda.ops import chunk_kda_bwd_inputs, chunk_kda_bwd_recurrence
from mindspeed_kda.registry import REGISTRY, Backend
from mindspeed_kda.testing import kda_cases
from mindspeed_kda.testing.kda_cases import LIMIT, assert_right, judged
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

NAMESPACE = "mindspeed_kda_cuda"


SCHEDULES = (emulated.FORWARD, emulated.REVERSE)


def schemas():
    """The operators' schemas as the binding defines them."""
    text = (KERNELS / "bind/chunk_kda.cpp").read_text(encoding="utf-8")
    found = ["".join(re.findall(r'"([^"]*)"', body)) for body in re.findall(r"m\.def\((.*?)\);", text, flags=re.S)]
    return {schema.split("(")[0]: schema for schema in found}


class Operators:
    """The four operators on CPU tensors."""

    def __init__(self, kernels):
        self.kernels, self.schedule = kernels, emulated.FORWARD

    def run(self, stages, call, given):
        return self.kernels.chunk_kda(["plan", *stages], call, given, self.schedule)

    def call(self, tensors, h0, cu_seqlens, options, v_first=False, final=False, keep=True):
        q, k, v, g, beta, A_log, dt_bias = tensors
        scale, gate, lower_bound, beta_sigmoid, beta_scale, qk_l2norm = options
        return contract.check(
            q, k, v, g, beta, scale=scale, initial_state=h0, output_final_state=final, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=qk_l2norm, use_gate_in_kernel=gate != plan.GATES[contract.PREGATED],
            lower_bound=lower_bound if gate == plan.GATES[contract.LOWER_BOUND] else None,
            use_beta_sigmoid_in_kernel=beta_sigmoid, allow_neg_eigval=beta_scale == 2.0, state_v_first=v_first,
            cu_seqlens=cu_seqlens, needs_grad=keep,
        )  # fmt: skip

    @staticmethod
    def taken(out, *names):
        return tuple(out[n] if n in out else torch.empty(0) for n in names)

    def chunk_kda_forward(self, *args):
        *options, v_first, final, keep = args[9:]
        call = self.call(args[:7], *args[7:9], options, v_first, final, keep)
        out = self.run(["prepare_forward", "scan_forward", "tail_forward"], call, {})
        return self.taken(out, "o", "ht", "A", "Aqk")

    def _recurrence(self, args):
        *options, v_first = args[13:]
        A, Aqk, do, dht = args[9:13]
        given = {"A": A, "Aqk": Aqk, "do": do, **({} if dht is None else {"dht": dht})}
        return self.call(args[:7], *args[7:9], options, v_first), given

    def chunk_kda_backward(self, *args):
        call, given = self._recurrence(args)
        out = self.run(["prepare_backward", "scan_backward", "grads", "reduce", "tail_backward"], call, given)
        return self.taken(out, *GRADS, "dh0")

    def chunk_kda_bwd_recurrence(self, *args):
        call, given = self._recurrence(args)
        out = self.run(["prepare_backward", "scan_backward"], call, given)
        return self.taken(out, "h", "v_new", "dh", "dv_new", "dh0")

    def chunk_kda_bwd_inputs(self, *args):
        names = ("A", "do", "h", "v_new", "dh", "dv_new")
        out = self.run(
            ["grads", "reduce", "tail_backward"],
            self.call(args[:7], None, args[7], args[14:]),
            dict(zip(names, args[8:14], strict=True)),
        )
        return self.taken(out, *GRADS)


GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")
NAME = "emulated"


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    sources = tuple(s for s in build.KERNEL_SOURCES if s.startswith("chunk_kda/"))
    try:
        library = build.build_emulator(tmp_path_factory.mktemp("emulated") / "kernels.so", sources=sources)
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")
    of_torch, operators = torch.library.Library(NAMESPACE, "FRAGMENT"), Operators(emulated.Emulated(library))
    for name, schema in schemas().items():
        if not hasattr(getattr(torch.ops, NAMESPACE), name):  # the native library defines them where it is loaded
            of_torch.define(schema)
        of_torch.impl(name, getattr(operators, name), "CPU")
    REGISTRY.register(Backend(contract.OP, NAME, supports=lambda call: None, load=lambda: plan))
    yield operators
    REGISTRY.unregister(contract.OP, NAME)
    of_torch._destroy()


JUDGED = (
    *("T 1", "T 65", "gate logsigmoid", "gate lower bound -8 at its end", "gate softplus", "beta of zero"),
    *("packed, an empty sequence", "packed, K 128, empty ends", "raw inputs in the main dtype", "no dt_bias"),
)
"""Of the cases that a GPU runs, those that take few CTAs and differ in what they ask for."""
CASES = {
    "softplus, groups": {"T": 130, "K": 64, "B": 2, "HV": 2, "gate": "softplus"},
    "packed": {
        "T": 142, "K": 64, "HV": 2, "lengths": [0, 65, 1, 0, 70, 0], "gate": "softplus", "state_v_first": True,
        "cu_dtype": torch.int64,
    },
    "packed, K 128": {"T": 75, "K": 128, "lengths": [3, 64, 5], "gate": "lower_bound"},
}  # fmt: skip


def inputs_of(name, dtype):
    options = CASES[name]
    return kda_inputs(**{"H": 1, "V": options["K"], "dtype": dtype, **options})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", JUDGED)
def test_against_float64(operators, name, dtype):
    operators.schedule = emulated.FORWARD
    assert_right(kda_cases.CASES[name].inputs(dtype, "cpu"), NAME)


@pytest.mark.parametrize("name", ["softplus, groups", "packed"])
def test_the_order_of_threads_changes_nothing(operators, name):
    inputs = inputs_of(name, torch.bfloat16)
    found = []
    for operators.schedule in SCHEDULES:
        found.append(gradients(chunk_kda, inputs.arguments | {"backend": NAME}, inputs.do, inputs.dht))
    for output, x in found[0].items():
        assert torch.equal(x, found[1][output]), output


@pytest.mark.parametrize("name", ["softplus, groups", "packed", "packed, K 128"])
def test_k1_after_k2_is_the_backward(operators, name):
    operators.schedule = emulated.FORWARD
    inputs = inputs_of(name, torch.float16)
    whole = gradients(chunk_kda, inputs.arguments | {"backend": NAME}, inputs.do, inputs.dht)
    given = inputs.arguments | {"backend": NAME}
    r = chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **given)
    grads = chunk_kda_bwd_inputs(inputs.do, r, **given)
    for output, x in grads._asdict().items():
        output = "dinitial_state" if output == "dh0" else output
        assert torch.equal(x, whole[output]), output


@pytest.mark.parametrize("size", cuda_backend.KDA_SHARED_BYTES)
@pytest.mark.parametrize("sequences", [1, 70], ids=["narrow scans", "wide scans"])
def test_shared_memory_is_what_the_predicate_asks_for(operators, size, sequences):
    operators.schedule = emulated.FORWARD
    inputs = kda_inputs(T=sequences, H=1, K=size, V=size, dtype=torch.float16, lengths=[1] * sequences)
    limit = operators.kernels.library.kda_emulator_shared_limit
    limit(cuda_backend.KDA_SHARED_BYTES[size])
    try:
        gradients(chunk_kda, inputs.arguments | {"backend": NAME}, inputs.do, inputs.dht)
        limit(cuda_backend.KDA_SHARED_BYTES[size] // 2)
        with pytest.raises(emulated.EmulationError):
            gradients(chunk_kda, inputs.arguments | {"backend": NAME}, inputs.do, inputs.dht)
    finally:
        limit(227 << 10)


def test_k2_is_that_of_the_definition(operators):
    operators.schedule = emulated.FORWARD
    inputs = kda_inputs(T=140, H=1, HV=2, gate="softplus", dtype=torch.float16, state_v_first=True)
    got = chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **inputs.arguments, backend=NAME)
    double = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.arguments.items()}
    expected = chunk_kda_bwd_recurrence(inputs.do.double(), inputs.dht.double(), **double, backend="torch")
    for field, x in got._asdict().items():
        assert_accurate(field, x, getattr(expected, field), torch.float16, rms_limit=LIMIT[torch.float16])


def test_halves_of_other_chunks_are_declined(operators):
    inputs = kda_inputs(T=32, H=1, BT=16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="chunk_size: expected 64 for K1 and K2 of backend 'cuda', got 16"):
        chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **inputs.arguments, backend=NAME)


def test_without_gradients_nothing_is_kept(operators):
    operators.schedule = emulated.FORWARD
    inputs = kda_inputs(T=70, H=1, dtype=torch.bfloat16, gate="lower_bound")
    with torch.no_grad():
        o, final_state = chunk_kda(**inputs.arguments, backend=NAME)
    expected = judged(inputs)
    assert_accurate("o", o, expected["o"], torch.bfloat16)
    assert_accurate("final_state", final_state, expected["final_state"], torch.bfloat16)
