"""Contract of ``chunk_kda``: every error by its type and text, what is accepted, and what backends are told."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import mindspeed_kda
from mindspeed_kda import chunk_kda
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.kda_inputs import kda_inputs


def arguments(**changes: Any) -> dict[str, Any]:
    """A good call with B 2, T 20, H 1, HV 2, K 8, V 6, and the softplus gate; then the changes."""
    return {**kda_inputs(B=2, T=20, H=1, HV=2, K=8, V=6, BT=16, gate="softplus").arguments, **changes}


def packed(cu_seqlens: object, **changes: Any) -> dict[str, Any]:
    x = kda_inputs(T=20, H=1, HV=2, K=8, V=6, BT=16, gate="softplus", states=False).arguments
    return {**x, "cu_seqlens": cu_seqlens, **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


ON_META = torch.device("meta")
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("q no tensor", arguments(q=1.0), TypeError, "q: expected a torch.Tensor, got float"),
    ("A_log no tensor", arguments(A_log=0.0), TypeError, "A_log: expected a torch.Tensor, got float"),
    ("q rank", arguments(q=zeros(2, 20, 8)), ValueError, "q: expected 4 dimensions [B, T, H, K], got 3"),
    ("v rank", arguments(v=zeros(2, 20, 6)), ValueError, "v: expected 4 dimensions [B, T, HV, V], got 3"),
    ("k shape", arguments(k=zeros(2, 20, 1, 7)), ValueError, "k: expected shape [B, T, H, K] = [2, 20, 1, 8], got"),
    ("v tokens", arguments(v=zeros(2, 19, 2, 6)), ValueError, "v: expected shape [B, T, HV, V] = [2, 20, 2, 6], got"),
    ("g heads", arguments(g=zeros(2, 20, 1, 8)), ValueError, "g: expected shape [B, T, HV, K] = [2, 20, 2, 8], got"),
    ("g rank", arguments(g=zeros(2, 20, 2)), ValueError, "g: expected 4 dimensions [B, T, HV, K], got 3"),
    ("beta", arguments(beta=zeros(2, 20, 1)), ValueError, "beta: expected shape [B, T, HV] = [2, 20, 2], got"),
    (
        "HV",
        arguments(q=zeros(2, 20, 3, 8)),
        ValueError,
        "v: expected HV to be a positive multiple of H = 3, got HV = 2",
    ),
    ("K", arguments(q=zeros(2, 20, 1, 257)), ValueError, "q: expected K from 1 to 256, got 257"),
    ("V", arguments(v=zeros(2, 20, 2, 0)), ValueError, "v: expected V from 1 to 256, got 0"),
    (
        "q dtype",
        arguments(q=zeros(2, 20, 1, 8, dtype=torch.int32)),
        TypeError,
        "q: expected dtype float16 or bfloat16 or",
    ),
    ("k dtype", arguments(k=zeros(2, 20, 1, 8).half()), TypeError, "k: expected dtype float32, got float16"),
    ("g dtype", arguments(g=zeros(2, 20, 2, 8).double()), TypeError, "g: expected dtype float32"),
    ("beta dtype", arguments(beta=zeros(2, 20, 2).half()), TypeError, "beta: expected dtype float32"),
    ("A_log dtype", arguments(A_log=zeros(2).half()), TypeError, "A_log: expected dtype float32, got float16"),
    ("A_log shape", arguments(A_log=zeros(1)), ValueError, "A_log: expected shape [HV] = [2], got [1]"),
    ("A_log rank", arguments(A_log=zeros(1, 2)), ValueError, "A_log: expected 1 dimensions [HV], got 2"),
    ("bias", arguments(dt_bias=zeros(8)), ValueError, "dt_bias: expected shape [HV, K] or [HV * K] = [2, 8], got [8]"),
    ("bias dtype", arguments(dt_bias=zeros(2, 8).half()), TypeError, "dt_bias: expected dtype float32, got float16"),
    ("no A_log", arguments(A_log=None), ValueError, "A_log: expected a tensor [HV] with use_gate_in_kernel, got None"),
    ("gate off", arguments(use_gate_in_kernel=False), ValueError, "A_log: expected None without use_gate_in_kernel"),
    (
        "gate off, bias",
        arguments(use_gate_in_kernel=False, A_log=None),
        ValueError,
        "dt_bias: expected None without use_gate_in_kernel",
    ),
    ("safe gate", arguments(safe_gate=True), ValueError, "lower_bound: expected a number below 0 with safe_gate"),
    ("bound 0", arguments(lower_bound=0.0), ValueError, "lower_bound: expected a finite number below 0, got 0.0"),
    ("bound inf", arguments(lower_bound=-float("inf")), ValueError, "lower_bound: expected a finite number below 0"),
    ("bound text", arguments(lower_bound="-5"), TypeError, "lower_bound: expected a float or None, got str"),
    (
        "bound, gate off",
        arguments(use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=-5.0),
        ValueError,
        "lower_bound: expected None without use_gate_in_kernel",
    ),
    ("scale", arguments(scale="1"), TypeError, "scale: expected a float or None, got str"),
    ("chunk size", arguments(chunk_size=48), ValueError, "chunk_size: expected 16, 32, 64, got 48"),
    ("chunk type", arguments(chunk_size=64.0), TypeError, "chunk_size: expected an int, got float"),
    ("flag", arguments(use_qk_l2norm_in_kernel=1), TypeError, "use_qk_l2norm_in_kernel: expected True or False, got 1"),
    ("flag None", arguments(state_v_first=None), TypeError, "state_v_first: expected True or False, got None"),
    (
        "state",
        arguments(initial_state=zeros(1, 2, 8, 6)),
        ValueError,
        "initial_state: expected shape [N, HV, K, V] = [2, 2, 8, 6], got [1, 2, 8, 6]",
    ),
    (
        "state layout",
        arguments(state_v_first=True),
        ValueError,
        "initial_state: expected shape [N, HV, V, K] = [2, 2, 6, 8], got [2, 2, 8, 6]",
    ),
    (
        "state dtype",
        arguments(initial_state=zeros(2, 2, 8, 6).bfloat16()),
        TypeError,
        "initial_state: expected dtype float32, got bfloat16",
    ),
    ("device", arguments(k=zeros(2, 20, 1, 8).to(ON_META)), ValueError, "k: expected device cpu (that of q), got meta"),
    ("cu batch", arguments(cu_seqlens=torch.tensor([0, 20])), ValueError, "cu_seqlens: expected B = 1"),
    ("cu list", packed([0, 20]), TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    (
        "cu dtype",
        packed(torch.tensor([0.0, 20.0])),
        TypeError,
        "cu_seqlens: expected dtype int32 or int64, got float32",
    ),
    ("cu start", packed(torch.tensor([1, 20])), ValueError, "cu_seqlens: expected to start at 0, got 1"),
    (
        "cu order",
        packed(torch.tensor([0, 9, 8])),
        ValueError,
        "cu_seqlens: expected non-decreasing values, got 9 then 8",
    ),
    ("cu end", packed(torch.tensor([0, 21])), ValueError, "cu_seqlens: expected to end within T = 20, got 21"),
    (
        "cu states",
        packed(torch.tensor([0, 5, 20]), initial_state=zeros(1, 2, 8, 6)),
        ValueError,
        "initial_state: expected shape [N, HV, K, V] = [2, 2, 8, 6], got [1, 2, 8, 6]",
    ),
    ("backend", arguments(backend="tensorflow"), ValueError, "backend: expected one of"),
]


@pytest.mark.parametrize(("call", "error", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_argument_is_named_before_anything_runs(
    call: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_kda.reference.chunk_kda.forward", lambda call: pytest.fail("a kernel ran"))
    with pytest.raises(error, match=re.escape(text)):
        chunk_kda(**call)


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="head_first"):
        chunk_kda(**arguments(head_first=True))


def test_only_the_first_five_are_positional() -> None:
    x = arguments()
    with pytest.raises(TypeError, match="positional"):
        chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], 1.0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("cp_context", object()),
        ("cu_seqlens_cpu", torch.tensor([0, 20])),
        ("use_graph", True),
        ("max_num_seqs", 4),
        ("return_intermediate_states", True),
    ],
)
def test_foreign_keywords_are_declined_with_the_reason(keyword: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{keyword}: expected \w+, got .*: \w+"):
        chunk_kda(**arguments(**{keyword: value}))


def test_foreign_keywords_are_accepted_at_their_defaults() -> None:
    defaults = {"cp_context": None, "cu_seqlens_cpu": None, "use_graph": False, "max_num_seqs": None}
    expected, got = chunk_kda(**arguments()), chunk_kda(**arguments(**defaults, return_intermediate_states=False))
    assert torch.equal(expected[0], got[0])


def test_transpose_state_layout_is_state_v_first() -> None:
    x = arguments()
    x["initial_state"] = x["initial_state"].mT
    o, final_state = chunk_kda(**x, transpose_state_layout=True)
    expected, state = chunk_kda(**{**x, "state_v_first": True})
    assert torch.equal(o, expected)
    assert final_state is not None
    assert state is not None
    assert torch.equal(final_state, state)


def test_gate_modes() -> None:
    raw = arguments()
    given = {**raw, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None}

    def gate(x: dict[str, Any], **changes: Any) -> tuple[str, float | None]:
        x = {**x, **changes}
        call = contract.check(**x)
        return call.gate, call.lower_bound

    assert gate(given) == (contract.PREGATED, None)
    assert gate(given, safe_gate=True) == (contract.PREGATED, None)
    assert gate(given, safe_gate=True, lower_bound=-5) == (contract.PREGATED, None)
    assert gate(raw) == (contract.SOFTPLUS, None)
    assert gate(raw, lower_bound=-5) == (contract.LOWER_BOUND, -5.0)
    assert gate(raw, lower_bound=-8.0, safe_gate=True) == (contract.LOWER_BOUND, -8.0)


def test_bias_in_one_dimension_and_no_bias() -> None:
    x = arguments()
    flat = chunk_kda(**{**x, "dt_bias": x["dt_bias"].flatten()})[0]
    assert torch.equal(flat, chunk_kda(**x)[0])
    none = chunk_kda(**{**x, "dt_bias": None})[0]
    assert torch.equal(none, chunk_kda(**{**x, "dt_bias": torch.zeros(2, 8)})[0])


@pytest.mark.parametrize("output_final_state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_shapes_and_dtypes_of_the_specs(dtype: torch.dtype, output_final_state: bool) -> None:
    x = kda_inputs(B=2, T=20, H=1, HV=2, K=8, V=6, BT=16, dtype=dtype, state_v_first=True).arguments
    x["output_final_state"] = output_final_state
    o, final_state = chunk_kda(**x)
    specs = contract.output_specs(contract.check(**x))
    assert (tuple(o.shape), o.dtype) == specs[0]
    if output_final_state:
        assert final_state is not None
        assert (tuple(final_state.shape), final_state.dtype) == specs[1] == ((2, 2, 6, 8), x["initial_state"].dtype)
    else:
        assert final_state is None


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("lengths", [None, [0, 17, 2, 0]])
def test_every_backend_saves_what_its_specs_say(
    disable_recompute: bool, needs_grad: bool, lengths: list[int] | None
) -> None:
    x = kda_inputs(T=20, H=1, HV=2, K=8, V=6, BT=16, lengths=lengths, disable_recompute=disable_recompute).arguments
    call = contract.check(**x, needs_grad=needs_grad)
    for name, backend in REGISTRY.of(contract.OP).items():
        if backend.supports(call) is not None:
            continue
        impl = backend.load()
        saved = impl.forward(call)[2]
        assert [(tuple(t.shape), t.dtype) for t in saved] == list(impl.saved_specs(call)), name
        assert needs_grad or not saved, name


def test_the_public_signature_is_the_contract() -> None:
    """The public function, the check and ``arguments`` name the same options; defaults agree."""
    public = inspect.signature(chunk_kda).parameters
    check = inspect.signature(contract.check).parameters
    own = [n for n in check if n != "needs_grad"]
    assert [n for n in public if n in check] == own
    foreign = list(inspect.signature(contract.decline_foreign).parameters)
    assert set(public) - set(own) == {"backend", "transpose_state_layout", *foreign}
    for n in own:
        assert public[n].default == check[n].default
    call = contract.check(**arguments())
    assert set(contract.arguments(call)) == set(own) - {"safe_gate"}
    assert "chunk_kda" in mindspeed_kda.__all__


def test_arguments_make_the_same_call_again() -> None:
    for x in (arguments(lower_bound=-3.0, allow_neg_eigval=True, scale=0.4), packed(torch.tensor([0, 5, 20]))):
        call = contract.check(**x)
        again = contract.check(**contract.arguments(call))
        for field in contract.ChunkKdaCall.__dataclass_fields__:
            assert getattr(call, field) is getattr(again, field) or getattr(call, field) == getattr(again, field), field


def test_bytes_moved_counts_each_tensor_once() -> None:
    x = arguments(dt_bias=None, initial_state=None, output_final_state=False)
    q, v, g, beta, A_log = 2 * 20 * 8, 2 * 20 * 2 * 6, 2 * 20 * 2 * 8, 2 * 20 * 2, 2
    inputs = 4 * (2 * q + v + g + beta + A_log)
    assert contract.bytes_moved(contract.check(**x)) == (inputs + 4 * v, 2 * inputs + 4 * v)


@pytest.mark.parametrize("lengths", [[], [0, 0], [5], [1, 1, 1], [16, 17, 0, 31], [64, 64]])
@pytest.mark.parametrize("BT", [16, 32, 64])
def test_the_bound_on_chunks_holds(lengths: list[int], BT: int) -> None:
    T = sum(lengths) + 3
    x = kda_inputs(T=T, H=1, K=4, V=4, BT=BT, lengths=lengths).arguments
    call = contract.check(**x)
    assert sum(-(-n // BT) for n in lengths) <= call.NT <= -(-T // BT) + len(lengths)
