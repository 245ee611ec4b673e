"""What a right call gives: shapes, types, names, strides, untouched inputs, repeatability, torch.compile."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import mindspeed_kda
from mindspeed_kda import WyDqkgGrads, use_backend
from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import to_float64, wy_inputs
from mindspeed_kda.testing.metrics import assert_accurate

NAMES = ("dq", "dk", "dv", "db", "dg", "dA")
ORDER = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv", "scale", "cu_seqlens", "chunk_size")

CASES = {
    "dense": {"B": 2, "T": 37, "H": 2, "K": 8, "V": 12, "BT": 16},
    "gva": {"B": 1, "T": 33, "H": 2, "HV": 6, "K": 5, "V": 3, "BT": 32},
    "packed": {"T": 50, "H": 2, "HV": 4, "K": 8, "V": 8, "BT": 16, "lengths": [0, 17, 1, 20]},
    "v_first": {"B": 1, "T": 64, "H": 1, "K": 8, "V": 16, "BT": 64, "state_v_first": True},
}
MAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors(kwargs):
    return {n: t for n, t in kwargs.items() if isinstance(t, torch.Tensor)}


def bitwise(a, b):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("dtype", MAIN)
@pytest.mark.parametrize("case", CASES)
def test_shapes_dtypes_and_storage(case, dtype):
    kwargs = wy_inputs(**CASES[case], dtype=dtype)
    before = {n: t.clone() for n, t in tensors(kwargs).items()}
    out = op(**kwargs)
    B, T, _H, K = kwargs["q"].shape
    HV, V = kwargs["v"].shape[2:]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = {
        "dq": ([B, T, HV, K], wide),
        "dk": ([B, T, HV, K], wide),
        "dv": ([B, T, HV, V], dtype),
        "db": ([B, T, HV], wide),
        "dg": ([B, T, HV, K], wide),
        "dA": ([B, T, HV, kwargs["chunk_size"]], wide),
    }
    inputs = {t.untyped_storage().data_ptr() for t in tensors(kwargs).values()}
    seen = set()
    for name, t in zip(NAMES, out, strict=True):
        shape, want = expected[name]
        assert list(t.shape) == shape, name
        assert t.dtype == want, name
        assert t.is_contiguous(), name
        assert t.device == kwargs["q"].device
        assert not t.requires_grad
        assert torch.isfinite(t).all(), name
        seen.add(t.untyped_storage().data_ptr())
    assert len(seen) == 6, "two outputs share memory"
    assert not seen & inputs, "an output is a view of an input"
    for name, t in tensors(kwargs).items():
        assert bitwise(t, before[name]), f"{name} was written"


def test_result_is_a_plain_tuple_with_names():
    kwargs = wy_inputs(T=16, K=4, V=4, BT=16)
    out = op(**kwargs)
    assert isinstance(out, tuple)
    assert isinstance(out, WyDqkgGrads)
    assert out._fields == NAMES
    dq, dk, dv, db, dg, dA = out
    for name, t in zip(NAMES, (dq, dk, dv, db, dg, dA), strict=True):
        assert getattr(out, name) is t


def test_positional_order_and_defaults():
    parameters = inspect.signature(op).parameters
    names = list(parameters)
    assert tuple(names[:15]) == (*ORDER, "chunk_indices")
    assert names[15:] == ["state_v_first", "backend"]
    assert all(parameters[n].kind is inspect.Parameter.KEYWORD_ONLY for n in names[15:])
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "scale": None,
        "cu_seqlens": None,
        "chunk_size": 64,
        "chunk_indices": None,
        "state_v_first": False,
        "backend": None,
    }
    kwargs = wy_inputs(T=20, K=4, V=4, BT=64)
    by_name = op(**kwargs)
    by_position = op(*(kwargs[n] for n in ORDER[:11]), 4**-0.5, None, 64, None)
    assert all(bitwise(a, b) for a, b in zip(by_name, by_position, strict=True))


def test_contract_module_and_operator_have_the_signature_of_the_public_function():
    public = list(inspect.signature(op).parameters)
    assert list(inspect.signature(wy_dqkg.check).parameters) == public[:-1]
    schema = torch.ops.mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused.default._schema
    assert [a.name for a in schema.arguments] == public
    assert len(schema.returns) == len(NAMES)
    assert [f.name for f in dataclasses.fields(wy_dqkg.WyDqkgCall)][:11] == public[:11]


@pytest.mark.parametrize("scale", [0.37, 2, np.float32(0.37), np.float64(0.37)], ids=lambda s: type(s).__name__)
def test_scale(scale, spy):
    kwargs = wy_inputs(T=16, K=9, V=4, BT=16)
    op(**kwargs, backend="spy")
    assert spy.last.scale == 9**-0.5
    op(**kwargs, scale=None, backend="spy")
    assert spy.last.scale == 9**-0.5
    op(**kwargs, scale=scale, backend="spy")
    assert type(spy.last.scale) is float
    assert spy.last.scale == float(scale)


def test_scale_scales_dq_and_what_follows_from_it():
    kwargs = wy_inputs(T=33, K=9, V=4, BT=16, dtype=torch.float64)
    one, two = op(**kwargs, scale=1.0), op(**kwargs, scale=2.0)
    torch.testing.assert_close(two.dq, 2 * one.dq, rtol=1e-14, atol=0)
    torch.testing.assert_close(two.dg - one.dg, kwargs["q"] * one.dq, rtol=1e-12, atol=1e-13)
    for name in ("dk", "dv", "db", "dA"):
        assert bitwise(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("dtype", MAIN)
def test_no_tokens(dtype):
    for lengths in (None, [], [0, 0]):
        out = op(**wy_inputs(B=1 if lengths is not None else 3, T=0, K=4, V=6, BT=16, dtype=dtype, lengths=lengths))
        assert [t.numel() for t in out] == [0] * 6
        assert out.dv.dtype == dtype
        assert out.dA.shape[-1] == 16


def test_no_samples():
    assert [list(t.shape) for t in op(**wy_inputs(B=0, T=20, H=2, K=4, V=6, BT=16))] == [
        [0, 20, 2, 4],
        [0, 20, 2, 4],
        [0, 20, 2, 6],
        [0, 20, 2],
        [0, 20, 2, 4],
        [0, 20, 2, 16],
    ]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_only_empty_sequences_give_zeros(lengths):
    """T tokens of no sequence: NaN in them must not reach an output."""
    kwargs = wy_inputs(T=20, K=4, V=6, BT=16, lengths=lengths)
    for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
        kwargs[name].fill_(float("nan"))
    for t in op(**kwargs):
        assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tokens_beyond_the_last_sequence_are_exactly_zero(dtype):
    kwargs = wy_inputs(T=50, H=1, HV=2, K=8, V=8, BT=16, lengths=[5, 0, 18], dtype=dtype)
    clean = op(**kwargs)
    for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
        kwargs[name][:, 23:] = float("nan")
    out = op(**kwargs)
    for name, t, was in zip(NAMES, out, clean, strict=True):
        assert torch.equal(t[:, 23:], torch.zeros_like(t[:, 23:])), name
        assert bitwise(t, was), name


def test_columns_of_d_a_beyond_a_tail_and_its_upper_triangle_are_exactly_zero():
    kwargs = wy_inputs(T=21, H=1, K=8, V=8, BT=16)
    kwargs["A"][:, 16:, :, 5:] = float("nan")  # columns of rows that the tail chunk does not have
    out = op(**kwargs)
    assert all(torch.isfinite(t).all() for t in out)
    tail = out.dA[0, 16:, 0]
    assert torch.equal(tail[:, 5:], torch.zeros(5, 11))
    assert torch.equal(tail[:, :5].triu(), torch.zeros(5, 5))
    assert (tail[:, :5].tril(-1).abs() > 0).sum() == 10


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices_dtype", [None, torch.int32, torch.int64])
def test_index_dtypes_and_given_indices_give_the_same(cu_dtype, indices_dtype):
    base = {"T": 50, "H": 1, "K": 8, "V": 8, "BT": 16, "lengths": [0, 17, 1, 20]}
    want = op(**wy_inputs(**base))
    kwargs = wy_inputs(**base, cu_dtype=cu_dtype)
    if indices_dtype is not None:
        kwargs["chunk_indices"] = torch.tensor([[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]], dtype=indices_dtype)
    assert all(bitwise(a, b) for a, b in zip(op(**kwargs), want, strict=True))


def test_chunk_indices_in_another_order_name_the_states():
    """Row i of chunk_indices says which chunk h[:, i] and dh[:, i] belong to."""
    kwargs = wy_inputs(T=50, H=1, K=8, V=8, BT=16, lengths=[0, 17, 1, 20], dtype=torch.float64)
    want = op(**kwargs)
    order = [3, 0, 4, 2, 1]
    kwargs["chunk_indices"] = torch.tensor([[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]])[order]
    kwargs |= {n: kwargs[n][:, order] for n in ("h", "dh")}
    assert all(bitwise(a, b) for a, b in zip(op(**kwargs), want, strict=True))


STRIDE_RMS = {torch.float16: 1e-4, torch.float32: 1e-6, torch.float64: 1e-14}


def other_strides(t):
    """The same values behind a transposition, a slice of every axis, and an offset."""
    big = torch.full([2 * s + 1 for s in reversed(t.shape)], float("nan") if t.is_floating_point() else -7).to(t)
    view = big.permute(*reversed(range(t.dim())))[tuple(slice(1, 2 * s + 1, 2) for s in t.shape)]
    view.copy_(t)
    assert not view.is_contiguous() or view.numel() < 2
    return view


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_strides_do_not_matter(case, dtype):
    kwargs = wy_inputs(**CASES[case], dtype=dtype)
    want = op(**kwargs)
    moved = {n: other_strides(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    # Not bitwise: the matrix products of PyTorch round by the strides of their operands.
    for name, a, b in zip(NAMES, op(**moved), want, strict=True):
        assert a.is_contiguous()
        assert_accurate(name, a, b, dtype, rms_limit=STRIDE_RMS[a.dtype])


@pytest.mark.parametrize("name", ["q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv"])
@pytest.mark.parametrize("axis", [1, 2])
def test_expanded_inputs(name, axis):
    """One tensor at a time is the same along T (or NT) or along heads, with stride 0."""
    kwargs = wy_inputs(**CASES["gva"])
    one = kwargs[name].narrow(axis, 0, 1).expand_as(kwargs[name])
    before = one.clone()
    out = op(**{**kwargs, name: one})
    want = op(**{**kwargs, name: one.contiguous()})
    assert all(bitwise(a, b) for a, b in zip(out, want, strict=True))
    assert torch.equal(one, before)


def test_repeats_bit_for_bit():
    kwargs = wy_inputs(**CASES["packed"])
    first = op(**kwargs)
    for _ in range(5):
        assert all(bitwise(a, b) for a, b in zip(op(**kwargs), first, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode):
    kwargs = wy_inputs(T=20, K=4, V=4, BT=16)
    want = op(**kwargs)
    for t in tensors(kwargs).values():
        t.requires_grad_()
    with mode():
        out = op(**kwargs)
    assert not any(t.requires_grad for t in out)
    assert all(bitwise(a, b) for a, b in zip(out, want, strict=True))


def test_float64_is_for_the_torch_backend_alone():
    """Every other backend declines float64, by predicate and so with a reason."""
    call = wy_dqkg.check(**to_float64(wy_inputs(T=16, K=4, V=4, BT=16)))
    answers = {name: backend.why_not(call) for name, backend in REGISTRY.of(wy_dqkg.OP).items()}
    assert answers.pop("torch") is None
    assert answers
    assert all(answers.values()), answers


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("mode", ["eager", "aot_eager"])
    @pytest.mark.parametrize("case", ["gva", "packed", "v_first"])
    def test_one_graph_with_the_same_result(self, mode, case):
        kwargs = wy_inputs(**CASES[case])
        want = op(**kwargs)

        def step(kwargs):
            doubled = {**kwargs, "q": kwargs["q"] * 2}
            out = op(**doubled)
            return out, out.dq + 1

        compiled = torch.compile(step, backend=mode, fullgraph=True)
        got, dq = compiled(kwargs)
        assert isinstance(got, WyDqkgGrads)
        assert bitwise(dq, want.dq + 1)
        for name in ("dk", "dv", "db", "dA"):
            assert bitwise(getattr(got, name), getattr(want, name)), name

    def test_choice_is_made_when_the_graph_runs(self, spy):
        kwargs = wy_inputs(T=20, K=4, V=4, BT=16)
        compiled = torch.compile(lambda: op(**kwargs), backend="aot_eager", fullgraph=True)
        compiled()
        assert spy.calls == 0
        with use_backend("spy"):
            compiled()
        assert spy.calls == 1
        named = torch.compile(lambda: op(**kwargs, backend="spy"), backend="aot_eager", fullgraph=True)
        named()
        assert spy.calls == 2

    def test_other_sizes_without_a_break(self):
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        for T in (16, 33, 50, 64):
            kwargs = wy_inputs(T=T, K=8, V=8, BT=16, seed=T)
            for a, b in zip(compiled(**kwargs), op(**kwargs), strict=True):
                assert bitwise(a, b)

    def test_inputs_stay_untouched(self):
        kwargs = wy_inputs(**CASES["packed"])
        before = {n: t.clone() for n, t in tensors(kwargs).items()}
        torch.compile(op, backend="aot_eager", fullgraph=True)(**kwargs)
        assert all(bitwise(t, before[n]) for n, t in tensors(kwargs).items())

    @pytest.mark.parametrize("case", CASES)
    def test_operator_schema_fake_and_aliasing(self, case):
        kwargs = wy_inputs(**CASES[case])
        args = [kwargs.get(n) for n in inspect.signature(op).parameters]
        args[14] = None
        args[15] = kwargs["state_v_first"]
        torch.library.opcheck(
            torch.ops.mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused.default,
            tuple(args),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_outputs_of_meta_tensors_have_the_contract():
    """Shapes without data: what a fake or a planner sees."""
    kwargs = wy_inputs(**CASES["packed"])
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    call = wy_dqkg.check(**meta)
    real = op(**kwargs)
    specs = [(n, tuple(t.shape), t.dtype) for n, t in zip(NAMES, real, strict=True)]
    assert list(wy_dqkg.output_specs(call)) == specs
    assert [(n, tuple(t.shape), t.dtype) for n, t in zip(NAMES, op(**meta), strict=True)] == specs


def test_bytes_moved_counts_each_tensor_once():
    kwargs = wy_inputs(**CASES["dense"], dtype=torch.bfloat16)
    call = wy_dqkg.check(**kwargs)
    floats = [t for t in tensors(kwargs).values() if t.is_floating_point()]
    assert wy_dqkg.bytes_moved(call) == sum(t.numel() * t.element_size() for t in (*floats, *op(**kwargs)))


def test_public_names():
    for name in mindspeed_kda.__all__:
        assert hasattr(mindspeed_kda, name), name
