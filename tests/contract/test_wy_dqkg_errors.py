"""Every error of the op's contract: its type, its words, and that no backend ran."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.testing.inputs import cu_seqlens_of, wy_inputs

B, T, H, HV, K, V, BT, NT = 1, 40, 2, 4, 8, 12, 16, 3
TENSORS = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv")
AXES = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    **dict.fromkeys(("v", "v_new", "do", "dv"), "[B, T, HV, V]"),
    "g": "[B, T, HV, K]",
    "beta": "[B, T, HV]",
    "A": "[B, T, HV, BT]",
    **dict.fromkeys(("h", "dh"), "[B, NT, HV, K, V]"),
}


def inputs(**kwargs):
    return wy_inputs(B, T, H, K, V, BT, HV=HV, dtype=torch.float16, **kwargs)


def packed(**kwargs):
    """Sequences of 0, 17, 1 and 20 tokens in T = 40: chunks 0 + 2 + 1 + 2."""
    return inputs(lengths=[0, 17, 1, 20], **kwargs)


@pytest.fixture
def raises(spy):
    """Asserts one call's error, whole text, and that the backend was not reached."""

    def check(kwargs, error, text):
        with pytest.raises(error, match=f"^{re.escape(text)}$") as caught:
            op(**{"backend": "spy", **kwargs})
        assert type(caught.value) is error
        assert spy.calls == 0

    return check


def test_a_right_call_reaches_the_backend(spy):
    op(**inputs(), backend="spy")
    op(**packed(), backend="spy")
    assert spy.calls == 2


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [None, 1.5, [[1.0]], np.ones((2, 2))], ids=lambda v: type(v).__name__)
def test_not_a_tensor(raises, name, value):
    raises({**inputs(), name: value}, TypeError, f"{name}: expected a torch.Tensor, got {type(value).__name__}")


@pytest.mark.parametrize("name", TENSORS)
def test_a_sparse_tensor(raises, name):
    kwargs = inputs()
    raises(
        {**kwargs, name: kwargs[name].to_sparse()},
        TypeError,
        f"{name}: expected layout torch.strided, got torch.sparse_coo",
    )


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_rank(raises, name):
    kwargs = inputs()
    bad = kwargs[name].unsqueeze(0)
    axes = AXES[name]
    raises(
        {**kwargs, name: bad},
        ValueError,
        f"{name}: expected {bad.dim() - 1} dimensions {axes}, got {bad.dim()} (shape {list(bad.shape)})",
    )


SHAPES = [(name, axis) for name in TENSORS[1:] for axis in range(AXES[name].count(",") + 1)]


@pytest.mark.parametrize(("name", "axis"), SHAPES)
def test_wrong_size_of_any_axis(raises, name, axis):
    """One element more along one axis. The axes that define a size (v's HV and V, A's BT) have words of their own."""
    kwargs = inputs()
    good = kwargs[name]
    bad = torch.cat((good, good.narrow(axis, 0, 1)), dim=axis)
    text = f"{name}: expected shape {AXES[name]} = {list(good.shape)}, got {list(bad.shape)}"
    if (name, axis) == ("v", 2):
        text = f"v: expected HV to be a positive multiple of H = {H}, got HV = {HV + 1}"
    elif (name, axis) == ("v", 3):
        text = f"v_new: expected shape [B, T, HV, V] = {list(bad.shape)}, got {list(good.shape)}"
    elif (name, axis) == ("A", 3):
        text = f"chunk_size: expected A.shape[-1] = {BT + 1}, got {BT}"
    raises({**kwargs, name: bad}, ValueError, text)


def test_state_in_the_other_layout(raises):
    raises(
        inputs() | {"state_v_first": True},
        ValueError,
        f"h: expected shape [B, NT, HV, V, K] = {[B, NT, HV, V, K]}, got {[B, NT, HV, K, V]}",
    )


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8), (257, 8), (8, 257)])
def test_head_size_out_of_range(raises, sizes):
    k, v = sizes
    name, axis, size = ("q", "K", k) if not 1 <= k <= 256 else ("v", "V", v)
    kwargs = inputs()
    kwargs |= {n: torch.zeros(B, T, H, k, dtype=torch.float16) for n in ("q", "k")}
    kwargs |= {n: torch.zeros(B, T, HV, v, dtype=torch.float16) for n in ("v", "v_new", "do", "dv")}
    raises(kwargs, ValueError, f"{name}: expected {axis} from 1 to 256, got {size}")


def test_heads(raises):
    kwargs = inputs()
    none = {n: kwargs[n][:, :, :0] for n in ("q", "k")}
    raises(kwargs | none, ValueError, "q: expected at least one head H, got 0")
    raises(
        kwargs | {n: kwargs[n][:, :, :0] for n in ("v", "v_new", "do", "dv")},
        ValueError,
        "v: expected HV to be a positive multiple of H = 2, got HV = 0",
    )
    raises(
        kwargs | {n: kwargs[n][:, :, :3] for n in ("v", "v_new", "do", "dv")},
        ValueError,
        "v: expected HV to be a positive multiple of H = 2, got HV = 3",
    )


DTYPES = [
    ("q", torch.int32, "float16 or bfloat16 or float32 or float64"),
    *((name, torch.float32, "float16") for name in ("k", "v", "v_new", "A", "do", "dv")),
    *((name, torch.bfloat16, "float16") for name in ("k", "v", "v_new", "A", "do", "dv")),
    ("g", torch.float16, "float32"),
    ("g", torch.float64, "float32"),
    ("beta", torch.bfloat16, "float32 or float16"),
    ("beta", torch.float64, "float32 or float16"),
    ("h", torch.bfloat16, "float32 or float16"),
    ("dh", torch.float64, "float32 or float16"),
]


@pytest.mark.parametrize(("name", "dtype", "expected"), DTYPES)
def test_wrong_dtype(raises, name, dtype, expected):
    kwargs = inputs()
    raises(
        {**kwargs, name: kwargs[name].to(dtype)},
        TypeError,
        f"{name}: expected dtype {expected}, got {str(dtype).removeprefix('torch.')}",
    )


def test_states_of_two_dtypes(raises):
    kwargs = inputs()
    raises({**kwargs, "dh": kwargs["dh"].half()}, TypeError, "dh: expected h's dtype float32, got float16")


@pytest.mark.parametrize("name", ["g", "beta", "h", "dh"])
def test_float64_calls_are_float64_throughout(raises, name):
    kwargs = wy_inputs(B, T, H, K, V, BT, HV=HV, dtype=torch.float64)
    raises({**kwargs, name: kwargs[name].float()}, TypeError, f"{name}: expected dtype float64, got float32")


@pytest.mark.parametrize("name", TENSORS[1:])
def test_two_devices(raises, name):
    kwargs = inputs()
    raises({**kwargs, name: kwargs[name].to("meta")}, ValueError, f"{name}: expected device cpu (that of q), got meta")


@pytest.mark.parametrize("name", ["cu_seqlens", "chunk_indices"])
def test_two_devices_of_the_indices(raises, name):
    kwargs = packed()
    kwargs["chunk_indices"] = torch.tensor([[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]])
    raises({**kwargs, name: kwargs[name].to("meta")}, ValueError, f"{name}: expected device cpu (that of q), got meta")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, "chunk_size: expected 16, 32, 64, got 0"),
        (-16, ValueError, "chunk_size: expected 16, 32, 64, got -16"),
        (17, ValueError, "chunk_size: expected 16, 32, 64, got 17"),
        (128, ValueError, "chunk_size: expected 16, 32, 64, got 128"),
        (32, ValueError, "chunk_size: expected A.shape[-1] = 16, got 32"),
        (16.0, TypeError, "chunk_size: expected an int, got float"),
        (True, TypeError, "chunk_size: expected an int, got bool"),
        (None, TypeError, "chunk_size: expected an int, got NoneType"),
    ],
)
def test_chunk_size(raises, value, error, text):
    raises(inputs() | {"chunk_size": value}, error, text)


def test_the_default_chunk_size_is_checked_against_a(raises):
    kwargs = inputs()
    del kwargs["chunk_size"]
    raises(kwargs, ValueError, "chunk_size: expected A.shape[-1] = 16, got 64")


@pytest.mark.parametrize("value", [True, "0.5", torch.tensor(0.5), 1j], ids=repr)
def test_scale(raises, value):
    raises(inputs() | {"scale": value}, TypeError, f"scale: expected a float or None, got {type(value).__name__}")


@pytest.mark.parametrize("value", [1, None, "yes"], ids=repr)
def test_state_v_first(raises, value):
    raises(inputs() | {"state_v_first": value}, TypeError, f"state_v_first: expected True or False, got {value!r}")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ([0, 40], TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
        (torch.tensor(3), ValueError, "cu_seqlens: expected 1 dimensions [N+1], got 0 (shape [])"),
        (torch.tensor([[0, 40]]), ValueError, "cu_seqlens: expected 1 dimensions [N+1], got 2 (shape [1, 2])"),
        (torch.tensor([], dtype=torch.int64), ValueError, "cu_seqlens: expected at least one element [N+1], got 0"),
        (torch.tensor([0.0, 40.0]), TypeError, "cu_seqlens: expected dtype int32 or int64, got float32"),
        (torch.tensor([0, 40], dtype=torch.int16), TypeError, "cu_seqlens: expected dtype int32 or int64, got int16"),
        (torch.tensor([1, 40]), ValueError, "cu_seqlens: expected to start at 0, got 1"),
        (torch.tensor([-1, 40]), ValueError, "cu_seqlens: expected to start at 0, got -1"),
        (
            torch.tensor([0, 20, 19, 40]),
            ValueError,
            "cu_seqlens: expected non-decreasing values, got 20 then 19 at position 2",
        ),
        (torch.tensor([0, 41]), ValueError, "cu_seqlens: expected to end within T = 40, got 41"),
        (
            torch.tensor([0, 2**40]),
            ValueError,
            f"cu_seqlens: expected to end within T = 40, got {2**40}",
        ),
    ],
)
def test_cu_seqlens(raises, value, error, text):
    raises(packed() | {"cu_seqlens": value}, error, text)


def test_cu_seqlens_with_a_batch(raises):
    kwargs = wy_inputs(2, T, H, K, V, BT, HV=HV, dtype=torch.float16) | {"cu_seqlens": torch.tensor([0, T])}
    raises(kwargs, ValueError, "cu_seqlens: expected B = 1 with packed sequences, got B = 2")


@pytest.mark.parametrize("name", ["h", "dh"])
@pytest.mark.parametrize("chunks", [4, 6])
def test_packed_state_of_another_number_of_chunks(raises, name, chunks):
    kwargs = packed()
    state = torch.zeros(B, chunks, HV, K, V)
    raises(
        kwargs | {name: state},
        ValueError,
        f"{name}: expected shape [B, NT, HV, K, V] = {[B, 5, HV, K, V]}, got {[B, chunks, HV, K, V]}",
    )


GOOD_INDICES = [[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (GOOD_INDICES, TypeError, "chunk_indices: expected a torch.Tensor, got list"),
        (torch.zeros(5, 2), TypeError, "chunk_indices: expected dtype int32 or int64, got float32"),
        (
            torch.zeros(10, dtype=torch.int64),
            ValueError,
            "chunk_indices: expected 2 dimensions [NT, 2], got 1 (shape [10])",
        ),
        (
            torch.zeros(5, 3, dtype=torch.int64),
            ValueError,
            "chunk_indices: expected shape [NT, 2] = [5, 2], got [5, 3]",
        ),
        (
            torch.tensor(GOOD_INDICES[:4]),
            ValueError,
            "chunk_indices: expected shape [NT, 2] = [5, 2], got [4, 2]",
        ),
        (
            torch.tensor([*GOOD_INDICES[:4], [0, 0]]),
            ValueError,
            "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (0, 0)",
        ),
        (
            torch.tensor([*GOOD_INDICES[:4], [4, 0]]),
            ValueError,
            "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (4, 0)",
        ),
        (
            torch.tensor([*GOOD_INDICES[:4], [1, -1]]),
            ValueError,
            "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (1, -1)",
        ),
        (
            torch.tensor([*GOOD_INDICES[:4], [1, 0]]),
            ValueError,
            "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (1, 0) twice",
        ),
    ],
)
def test_chunk_indices(raises, value, error, text):
    raises(packed() | {"chunk_indices": value}, error, text)


def test_chunk_indices_without_cu_seqlens(raises):
    raises(
        inputs() | {"chunk_indices": torch.tensor([[0, 0], [0, 1], [0, 2]])},
        ValueError,
        "chunk_indices: expected None without cu_seqlens, got a tensor",
    )


def test_unread_values_are_bounded_by_what_is_known(raises):
    """On a device the values of cu_seqlens stay unread, but T and N bound the number of chunks."""
    kwargs = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in packed().items()}
    many = torch.zeros(B, 7, HV, K, V, device="meta")
    raises(
        kwargs | {"h": many, "dh": many},
        ValueError,
        "h: expected NT of at most 6 chunks for T = 40 and this cu_seqlens, got 7",
    )


class TestValidate:
    """MINDSPEED_KDA_VALIDATE decides whether values on a device are read; the CPU's always are."""

    @pytest.fixture
    def on_device(self, monkeypatch):
        """cu_seqlens reads as if it were on an accelerator; the machine needs none."""
        from mindspeed_kda.contracts import checks

        class Elsewhere(torch.Tensor):
            reads = 0

            @property
            def device(self):
                return torch.device("xpu:0") if Elsewhere.asked else torch.device("cpu")

            def tolist(self):
                Elsewhere.reads += 1
                return self.as_subclass(torch.Tensor).tolist()

        Elsewhere.asked = False
        real = checks.values_readable

        def readable(t):
            Elsewhere.asked = True
            try:
                return real(t)
            finally:
                Elsewhere.asked = False

        monkeypatch.setattr(checks, "values_readable", readable)
        return Elsewhere

    def call(self, on_device, lengths_off):
        kwargs = packed()
        kwargs["cu_seqlens"] = (cu_seqlens_of([0, 17, 1, 20]) + lengths_off).as_subclass(on_device)
        return kwargs

    def test_off_the_values_are_not_read(self, spy, on_device, monkeypatch):
        monkeypatch.delenv("MINDSPEED_KDA_VALIDATE", raising=False)
        op(**self.call(on_device, 1), backend="spy")
        assert spy.calls == 1
        assert on_device.reads == 0

    @pytest.mark.parametrize("value", ["1", "true", "on"])
    def test_on_they_are(self, raises, on_device, monkeypatch, value):
        monkeypatch.setenv("MINDSPEED_KDA_VALIDATE", value)
        raises(self.call(on_device, 1), ValueError, "cu_seqlens: expected to start at 0, got 1")
        assert on_device.reads >= 1

    def test_anything_else_is_an_error(self, raises, on_device, monkeypatch):
        monkeypatch.setenv("MINDSPEED_KDA_VALIDATE", "maybe")
        raises(self.call(on_device, 0), ValueError, "MINDSPEED_KDA_VALIDATE: expected 1 or 0, got 'maybe'")


def test_a_backend_asked_for_that_cannot(raises):
    kwargs = wy_inputs(B, T, H, K, V, BT, HV=HV, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"backend 'triton' \(asked for by backend=\) cannot run this call: "):
        op(**kwargs, backend="triton")


def test_a_backend_that_does_not_exist(raises):
    with pytest.raises(ValueError, match=r"^backend: expected one of .*torch.* got 'tpu'$"):
        op(**inputs(), backend="tpu")


@pytest.mark.parametrize("value", [3, ["torch"], torch.float32], ids=repr)
def test_a_backend_that_is_no_name(raises, value):
    raises(inputs() | {"backend": value}, TypeError, f"backend: expected the name of a backend or None, got {value!r}")


def test_unknown_and_missing_arguments(spy):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'transpose_state'"):
        op(**inputs(), transpose_state=True)
    kwargs = inputs()
    del kwargs["dv"]
    with pytest.raises(TypeError, match="'dv'"):
        op(**kwargs)
    values = inputs()
    with pytest.raises(TypeError, match="positional argument"):
        op(*(values[n] for n in TENSORS), None, None, BT, None, False)
    assert spy.calls == 0
