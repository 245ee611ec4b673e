"""chunk_kda of the native library on an NVIDIA GPU: against float64, and what a training loop asks of it besides.

With CUDA_FORCE_PTX_JIT=1 the same file judges the library's PTX for compute_80, which serves GPUs before and after
Hopper.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mindspeed_kda import chunk_kda
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.ops import chunk_kda_bwd_inputs, chunk_kda_bwd_recurrence
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.kda_cases import (
    CASES,
    LIMIT,
    PER_TOKEN,
    assert_large_offsets,
    assert_repeats,
    assert_results,
    assert_right,
    judged,
)
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import gradients

pytestmark = pytest.mark.gpu
NATIVE = {"backend": "cuda"}
SIZES = (64, 128)
SERVED = [n for n, case in CASES.items() if case.options.get("K", 64) == case.options.get("V", 64)
          and case.options.get("K", 64) in SIZES]  # fmt: skip
DECLINED = [n for n in CASES if n not in SERVED]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
sizes = pytest.mark.parametrize("size", SIZES)


def drawn(size: int = 64, **options: Any) -> KdaInputs:
    return kda_inputs(**{"K": size, "V": size, "dtype": torch.bfloat16, "device": "cuda", **options})


def step(inputs: KdaInputs, **changed: Any) -> dict[str, torch.Tensor]:
    return gradients(chunk_kda, inputs.arguments | NATIVE | changed, inputs.do, inputs.dht)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, x in expected.items() if not torch.equal(x, got[name])] == []


@dtypes
@pytest.mark.parametrize("name", SERVED)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    assert_right(CASES[name].inputs(dtype, "cuda"), "cuda")


@pytest.mark.parametrize("name", DECLINED)
def test_other_head_sizes_are_declined_and_served_by_another(name: str) -> None:
    call = contract.check(**CASES[name].inputs(torch.bfloat16, "cuda").arguments)
    with pytest.raises(RuntimeError, match="q, v: expected K = V = 64 or 128, got K = "):
        REGISTRY.choose(contract.OP, call, "cuda", "cuda")
    assert REGISTRY.choose(contract.OP, call, "cuda").name in ("triton", "torch")


def test_it_is_the_first_choice() -> None:
    call = contract.check(**drawn(T=8).arguments)
    assert REGISTRY.choose(contract.OP, call, "cuda").name == "cuda"
    wide = contract.check(**drawn(T=8, dtype=torch.float32).arguments)
    assert "q: expected float16 or bfloat16, got float32" in str(REGISTRY.of(contract.OP)["cuda"].why_not(wide))


@dtypes
@sizes
@pytest.mark.parametrize("lengths", [None, [500, 0, 1, 130]], ids=["dense", "packed"])
def test_fifty_runs_are_bitwise_equal_and_none_synchronises(
    size: int, dtype: torch.dtype, lengths: list[int] | None
) -> None:
    assert_repeats(drawn(size, T=640, H=4, HV=8, gate="softplus", lengths=lengths, dtype=dtype), "cuda", 49)


@dtypes
@sizes
def test_a_packed_call_equals_one_call_per_sequence(size: int, dtype: torch.dtype) -> None:
    lengths = [0, 65, 1, 0, 63, 64, 300, 0]
    inputs = drawn(size, T=500, HV=4, gate="lower_bound", lengths=lengths, dtype=dtype)
    x, dht, packed = inputs.arguments, inputs.dht, step(inputs)
    assert dht is not None
    for n, (begin, end) in enumerate(itertools.pairwise(x["cu_seqlens"].tolist())):
        if begin == end:
            assert torch.equal(packed["final_state"][n], x["initial_state"][n])
            assert torch.equal(packed["dinitial_state"][n], dht[n])
            continue
        one = {name: x[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        one |= {"initial_state": x["initial_state"][n : n + 1], "cu_seqlens": None}
        alone = gradients(chunk_kda, x | one | NATIVE, inputs.do[:, begin:end], dht[n : n + 1])
        for name in PER_TOKEN:
            assert torch.equal(packed[name][:, begin:end], alone[name]), (n, name)
        for name in ("final_state", "dinitial_state"):
            assert torch.equal(packed[name][n], alone[name][0]), (n, name)


def test_many_short_sequences() -> None:
    lengths = [(7 * i) % 5 for i in range(700)]
    assert_right(drawn(T=sum(lengths) + 3, H=1, gate="softplus", lengths=lengths, states=False), "cuda")


@pytest.mark.parametrize("options", [{"T": 5, "lengths": [0, 0]}, {"T": 0}, {"T": 0, "lengths": [0, 0]}], ids=str)
def test_no_sequence_has_a_token(options: dict[str, Any]) -> None:
    inputs = drawn(H=2, gate="softplus", **options)
    got = step(inputs)
    assert torch.equal(got["final_state"], inputs.arguments["initial_state"])
    assert torch.equal(got["dinitial_state"], inputs.dht)
    assert all((got[name] == 0).all() for name in (*PER_TOKEN, "dA_log", "ddt_bias"))


@sizes
@pytest.mark.parametrize("first", [1, 64, 100, 192])
def test_what_comes_later_changes_nothing_before(size: int, first: int) -> None:
    inputs = drawn(size, T=200, gate="lower_bound", states=False)
    x = inputs.arguments | NATIVE
    o, _ = chunk_kda(**x)
    other = {n: torch.cat((t[:, :first], t[:, first:].flip(1)), 1) for n, t in x.items() if n in ("q", "k", "v", "g")}
    assert torch.equal(chunk_kda(**x | other)[0][:, :first], o[:, :first])
    short = {n: x[n][:, :first] for n in ("q", "k", "v", "g", "beta")}
    assert torch.equal(chunk_kda(**x | short)[0], o[:, :first])


def test_strided_and_misaligned_inputs() -> None:
    inputs = drawn(T=70, gate="softplus")
    clean, x = step(inputs), inputs.arguments
    odd = torch.empty(x["v"].numel() + 1, dtype=x["v"].dtype, device="cuda")[1:].view(x["v"].shape)
    odd.copy_(x["v"])
    strided = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "g", "beta")}
    wide = inputs.do.repeat(1, 1, 1, 2)[..., : inputs.do.shape[-1]]
    assert_same(gradients(chunk_kda, x | strided | {"v": odd} | NATIVE, wide, inputs.dht), clean)


@pytest.mark.parametrize("lengths", [None, [63, 0, 130]], ids=["dense", "packed"])
def test_a_cuda_graph_replays_a_training_step_on_other_data(lengths: list[int] | None) -> None:
    options = {"size": 128, "T": 200, "HV": 4, "gate": "lower_bound", "lengths": lengths}
    inputs, other = drawn(**options), drawn(**options, seed=1)
    expected = step(other)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = step(inputs)
    for x in got.values():
        x.fill_(float("nan"))
    for name, x in other.arguments.items():
        if torch.is_tensor(x):
            inputs.arguments[name].copy_(x)
    inputs.do.copy_(other.do)
    inputs.dht.copy_(other.dht)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, expected)


def test_a_side_stream() -> None:
    inputs = drawn(128, T=300, gate="softplus")
    expected, stream = step(inputs), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # so that work on another stream would come too early
        late = inputs._replace(arguments={n: x + 0 if n in ("q", "k", "v") else x for n, x in inputs.arguments.items()})
        got = step(late)
    stream.synchronize()
    assert_same(got, expected)


def test_torch_compile_keeps_one_graph_forward_and_backward() -> None:
    inputs = drawn(T=70, gate="softplus")
    compiled = torch.compile(lambda **x: chunk_kda(**x), fullgraph=True)
    assert_same(gradients(compiled, inputs.arguments | NATIVE, inputs.do, inputs.dht), step(inputs))


@pytest.mark.parametrize("lengths", [None, [33, 0, 37]], ids=["dense", "packed"])
def test_the_operators_have_fakes(lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(T=72, HV=4, gate="softplus", lengths=lengths)
    seen: dict[str, tuple[Any, ...]] = {}
    plan = REGISTRY.of(contract.OP)["cuda"].load()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            class Packet:
                @staticmethod
                def default(*args: Any) -> Any:
                    seen[name] = args
                    return getattr(torch.ops.mindspeed_kda_cuda, name).default(*args)

            return Packet

    monkeypatch.setattr(plan, "_ops", Watched())
    step(inputs)
    given = inputs.arguments | NATIVE
    chunk_kda_bwd_inputs(inputs.do, chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **given), **given)
    assert len(seen) == 4
    for name, args in seen.items():
        plain = tuple(x.detach() if torch.is_tensor(x) else x for x in args)
        op = getattr(torch.ops.mindspeed_kda_cuda, name).default
        torch.library.opcheck(op, plain, test_utils=("test_schema", "test_faketensor"))


@dtypes
@pytest.mark.parametrize("lengths", [None, [65, 0, 1, 130]], ids=["dense", "packed"])
def test_k2_then_k1_is_the_backward(dtype: torch.dtype, lengths: list[int] | None) -> None:
    inputs = drawn(128, T=200, HV=4, gate="softplus", lengths=lengths, dtype=dtype, state_v_first=True)
    whole, given = step(inputs), inputs.arguments | NATIVE
    r = chunk_kda_bwd_recurrence(inputs.do, inputs.dht, **given)
    grads = chunk_kda_bwd_inputs(inputs.do, r, **given)._asdict()
    grads["dinitial_state"] = grads.pop("dh0")
    for name, x in grads.items():
        assert torch.equal(x, whole[name]), name
    if lengths is None:
        double = {n: t.double() if torch.is_tensor(t) else t for n, t in inputs.arguments.items()}
        expected = chunk_kda_bwd_recurrence(inputs.do.double(), inputs.dht.double(), **double, backend="torch")
        for name, x in r._asdict().items():
            assert_accurate(name, x, getattr(expected, name), dtype, rms_limit=LIMIT[dtype])


def test_the_formula_of_the_radial_part() -> None:
    """Identity 6 of docs/kda_math.md at the size that 16-bit outputs resolve: x . dx is 0 to rounding."""
    inputs = drawn(128, T=256, gate="lower_bound", dtype=torch.float16)
    got = step(inputs)
    for name in ("q", "k"):
        x, dx = inputs.arguments[name].double(), got[f"d{name}"].double()
        radial = (x * dx).sum(-1) / (x.norm(dim=-1) * dx.norm(dim=-1))
        assert radial.square().mean().sqrt() < 2e-4


def held_after_forward(inputs: KdaInputs) -> int:
    """Bytes that a forward keeps for its backward, beyond o and the final state."""
    leaves = {n: x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
              for n, x in inputs.arguments.items()}  # fmt: skip
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, final_state = chunk_kda(**leaves, **NATIVE)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - sum(x.numel() * x.element_size() for x in (o, final_state))


def test_memory() -> None:
    """Kept: A and Aqk. Inside backward: five tiles and two 16-bit states for 64 tokens, in one allocation."""
    T, H, K = 2048, 8, 128
    inputs = drawn(K, T=T, H=H, gate="lower_bound", wide_beta_and_g=False)
    raw = sum(x.numel() * x.element_size() for n, x in inputs.arguments.items() if n in ("q", "k", "v", "g", "beta"))
    kept = held_after_forward(inputs)
    assert kept == 2 * T * H * 64 * 2
    assert kept <= 0.25 * raw
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = step(inputs)
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in grads.values())
    tiles, states = 5 * T * H * K * 2, 2 * (T // 64) * H * K * K * 2
    assert torch.cuda.max_memory_allocated() - before <= kept + outputs + tiles + states + (4 << 20)


def test_without_gradients_nothing_is_kept() -> None:
    inputs = drawn(128, T=300, gate="lower_bound")
    with torch.no_grad():
        o, final_state = chunk_kda(**inputs.arguments, **NATIVE)
    expected = step(inputs)
    assert torch.equal(o, expected["o"])
    assert torch.equal(final_state, expected["final_state"])


def test_a_wrong_result_is_noticed() -> None:
    """The judge of this file on results that are slightly off."""
    inputs = drawn(T=70, H=16, gate="softplus")
    expected, got = judged(inputs), step(inputs)
    assert_results(inputs, got, expected)
    for name in expected:
        with pytest.raises(AssertionError, match=name):
            assert_results(inputs, got | {name: got[name] * 1.02}, expected)


@pytest.mark.whole_gpu
def test_more_elements_than_int32_counts() -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 110 << 30:
        pytest.skip("needs 110 GB of free device memory")
    assert_large_offsets("cuda", 128, 128)
