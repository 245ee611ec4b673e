"""The six stages against float64, in Triton's interpreter: sizes, dtypes, layouts, packed sequences, gates."""

from __future__ import annotations

import interpreted
import pytest
import torch

from mindspeed_kda import chunks
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.inputs import cu_seqlens_of, to_float64, wy_inputs
from mindspeed_kda.testing.wy_check import assert_right, judge

pytestmark = pytest.mark.interpreter

HEADS = (60, 64, 100, 128, 256)
AXES = {
    "T": (1, 15, 17, 63, 64, 65, 127, 300),
    "K": HEADS,
    "V": HEADS,
    "dtype": (torch.float32, torch.float16),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (1, 2)),
    "state": ("float32", "main"),
    "state_v_first": (False, True),
    "beta": ("float32", "main"),
}
"""No bfloat16: the interpreter's own arithmetic on it is wrong. The GPU tests have it."""
LENGTHS = [0, 65, 1, 63, 300]
"""Packed: an empty sequence, tails of 1, 63 and 44 rows."""
SPARE = 4
"""Tokens after the last sequence."""


def inputs_of(case):
    """Arguments of one case of AXES."""
    H, HV = case["heads"]
    main = case["dtype"]
    return wy_inputs(
        T=case["T"], H=H, HV=HV, K=case["K"], V=case["V"], BT=case["BT"], dtype=main,
        state_dtype=main if case["state"] == "main" else torch.float32,
        beta_dtype=main if case["beta"] == "main" else torch.float32,
        state_v_first=case["state_v_first"], seed=case["T"],
    )  # fmt: skip


def label(case):
    return "-".join(str(v).removeprefix("torch.") for v in case.values())


@pytest.mark.parametrize("case", pairwise(AXES), ids=label)
def test_against_float64(case, interpreter):
    kwargs = inputs_of(case)
    kwargs["A"][:, case["T"] - case["T"] % case["BT"] :, :, case["T"] % case["BT"] or case["BT"] :] = float("nan")
    assert_right(interpreter(interpreted.run, kwargs), kwargs)


@pytest.mark.parametrize("size", [(1, 1), (1, 256), (3, 17), (33, 200)], ids=str)
def test_odd_head_sizes(size, interpreter):
    kwargs = wy_inputs(T=21, H=1, HV=3, K=size[0], V=size[1], BT=16)
    assert_right(interpreter(interpreted.run, kwargs), kwargs)


def packed(index=torch.int32, poison=True, **more):
    """A packed call whose spare tokens, and columns of A past each tail, hold NaN."""
    T = sum(LENGTHS) + SPARE
    kwargs = wy_inputs(T=T, H=1, K=64, V=60, lengths=LENGTHS, cu_dtype=index, **more)
    if poison:
        BT = kwargs["chunk_size"]
        for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
            kwargs[name][:, -SPARE:] = float("nan")
        for begin, end in zip(kwargs["cu_seqlens"][:-1].tolist(), kwargs["cu_seqlens"][1:].tolist(), strict=True):
            tail = (end - begin) % BT
            if tail:
                kwargs["A"][:, end - tail : end, :, tail:] = float("nan")
    return kwargs


@pytest.mark.parametrize(
    ("BT", "dtype", "index", "heads"),
    [
        (16, torch.float32, torch.int64, 1),
        (32, torch.float16, torch.int32, 2),
        (64, torch.float16, torch.int64, 2),
        (64, torch.float32, torch.int32, 1),
    ],
)
def test_packed(BT, dtype, index, heads, interpreter):
    kwargs = packed(index, BT=BT, dtype=dtype, HV=heads)
    assert_right(interpreter(interpreted.run, kwargs), kwargs)


def test_packed_equals_one_call_per_sequence_and_either_index_type(interpreter):
    kwargs = packed(torch.int32, BT=64)
    got = interpreter(interpreted.run, kwargs)
    wider = interpreter(interpreted.run, kwargs | {"cu_seqlens": kwargs["cu_seqlens"].long()})
    for a, b in zip(got, wider, strict=True):
        assert torch.equal(a, b)
    begin, end = 65, 66
    one = {n: t[:, begin:end] if isinstance(t, torch.Tensor) and t.dim() > 2 else t for n, t in kwargs.items()}
    one |= {"h": kwargs["h"][:, 2:3], "dh": kwargs["dh"][:, 2:3], "cu_seqlens": None}
    for a, b in zip(got, interpreter(interpreted.run, one), strict=True):
        assert torch.equal(a[:, begin:end], b)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_chunk_indices_in_any_order(index, interpreter):
    kwargs = packed(BT=64)
    want = interpreter(interpreted.run, kwargs)
    NT = kwargs["h"].shape[1]
    order = torch.randperm(NT, generator=torch.Generator().manual_seed(1))
    table = chunks.chunk_indices(kwargs["cu_seqlens"], 64, NT)
    moved = kwargs | {"chunk_indices": table[order].to(index)} | {n: kwargs[n][:, order] for n in ("h", "dh")}
    for a, b in zip(interpreter(interpreted.run, moved), want, strict=True):
        assert torch.equal(a, b)


def test_surplus_chunks_hold_no_row(interpreter):
    """A caller that cannot read the device gives more chunks than the sequences have: they are skipped."""
    kwargs = packed(BT=64)
    want = interpreter(interpreted.run, kwargs)
    more = kwargs | {n: torch.cat([kwargs[n], torch.full_like(kwargs[n][:, :2], float("nan"))], 1) for n in ("h", "dh")}
    for a, b in zip(interpreter(interpreted.run_unread, more), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_no_sequence_gives_zeros(lengths, interpreter):
    kwargs = wy_inputs(T=7, K=16, V=16, BT=16, lengths=lengths)
    for out in interpreter(interpreted.run, kwargs):
        assert torch.equal(out, torch.zeros_like(out))


def test_no_tokens(interpreter):
    kwargs = wy_inputs(T=0, K=16, V=16, BT=16)
    for out in interpreter(interpreted.run, kwargs):
        assert out.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gate_that_is_no_cumsum(dtype, interpreter):
    """The op's page passes per-token values as g and an A that is not triangular."""
    kwargs = wy_inputs(T=70, H=1, HV=2, K=64, V=64, BT=64, dtype=dtype, cumsum=False)
    kwargs["g"] = kwargs["g"] * 3 + 2
    assert_right(interpreter(interpreted.run, kwargs), kwargs)


@pytest.mark.parametrize("decay", [-5.0, -10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strong_decay(decay, dtype, interpreter):
    """Finite and right where 2^g underflows, dg element by element too.

    On a chunk's last row two copies of k * dk1, larger than all else there, cancel; a kernel that computes both leaves
    their rounding in dg. The bound is a few roundings of the terms that do not cancel.
    """
    kwargs = wy_inputs(T=100, H=1, K=64, V=64, BT=64, dtype=dtype, decay=decay)
    got = interpreter(interpreted.run, kwargs)
    assert_right(got, kwargs)
    want, wide = judge(kwargs), to_float64(kwargs)
    terms = (wide["q"] * want.dq).abs()
    own = (wide["k"] * want.dk).abs()
    for begin, end in ((0, 64), (64, 100)):
        terms[:, begin : end - 1] += own[:, begin : end - 1]
        terms[:, end - 1] += own[:, begin : end - 1].sum(1)
        state = (wide["h"] * wide["dh"])[:, begin // 64].abs().sum(-1)
        terms[:, end - 1] += torch.exp2(wide["g"][:, end - 1]) * state
    terms += (wide["beta"].unsqueeze(-1) * torch.exp2(wide["g"])).abs()
    unit = torch.finfo(dtype).eps
    assert ((got[4].double() - want.dg).abs() <= 16 * unit * terms + unit * torch.finfo(torch.float16).tiny).all()


def test_decay_of_one_head_only(interpreter):
    """Head 0 keeps everything and head 1 forgets at once: no head reads another's gate."""
    kwargs = wy_inputs(T=70, H=1, HV=2, K=64, V=64, BT=64, decay=-10.0)
    kwargs["g"][:, :, 0] = 0
    assert_right(interpreter(interpreted.run, kwargs), kwargs)


def test_the_interpreter_declines_bfloat16(interpreter):
    """Its own arithmetic on it is wrong: better no result than that one."""
    with pytest.raises(RuntimeError, match=r"expected float16 or float32 in Triton's interpreter.* got bfloat16"):
        interpreter(interpreted.run, wy_inputs(T=16, K=16, V=16, BT=16, dtype=torch.bfloat16))


def test_cu_seqlens_of_lengths():
    assert cu_seqlens_of(LENGTHS).tolist() == [0, 0, 65, 66, 129, 429]
