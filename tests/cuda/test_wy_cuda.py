"""The native kernel on an NVIDIA GPU against float64: shapes, dtypes, packed calls, large tensors, graphs, streams."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.demo import real_inputs
from mindspeed_kda.demo.model import ByteModel, Config
from mindspeed_kda.testing.capture import op_inputs
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.wy_check import assert_right

pytestmark = pytest.mark.gpu

AXES = {
    "T": (1, 15, 17, 63, 64, 65, 127, 300),
    "KV": ((60, 64), (64, 64), (100, 128), (128, 128), (128, 60), (1, 3)),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (2, 4)),
    "state": ("float32", "main"),
    "state_v_first": (False, True),
    "beta": ("float32", "main"),
    "lengths": (None, [0, 65, 1, 63, 300]),
    "index": (torch.int32, torch.int64),
}
SPARE = 4
"""Tokens after the last packed sequence."""


def inputs_of(case, device="cuda"):
    (H, HV), (K, V), main, lengths = case["heads"], case["KV"], case["dtype"], case["lengths"]
    return wy_inputs(
        B=2 if lengths is None else 1, T=case["T"] if lengths is None else sum(lengths) + SPARE, H=H, HV=HV, K=K, V=V,
        BT=case["BT"], dtype=main, state_dtype=main if case["state"] == "main" else torch.float32,
        beta_dtype=main if case["beta"] == "main" else torch.float32, state_v_first=case["state_v_first"],
        lengths=lengths, cu_dtype=case["index"], device=device, seed=case["T"],
    )  # fmt: skip


def native(kwargs):
    return op(**kwargs, backend="cuda")


MAIN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda c: ",".join(str(v).replace(" ", "") for v in c.values()))
def test_against_float64(case):
    kwargs = inputs_of(case)
    if case["lengths"] is not None:
        for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
            kwargs[name][:, -SPARE:] = float("nan")
    assert_right(native(kwargs), kwargs)


INSTANCES = [
    (main, state, K)
    for main in (torch.float16, torch.bfloat16, torch.float32)
    for state in dict.fromkeys((main, torch.float32))
    for K in (64, 100, 128)
]


@pytest.mark.parametrize(("main", "state", "K"), INSTANCES, ids=str)
def test_every_instance(main, state, K):
    """Small on purpose: also what compute-sanitizer runs (`-k every_instance`)."""
    for lengths in (None, [65, 0, 3]):
        kwargs = wy_inputs(
            T=70, H=1, HV=2, K=K, V=K, dtype=main, state_dtype=state, lengths=lengths, device="cuda", seed=K
        )  # fmt: skip
        assert_right(native(kwargs), kwargs)


@MAIN
@pytest.mark.parametrize("K", [64, 128])
def test_fifty_runs_are_bitwise_equal(dtype, K):
    kwargs = wy_inputs(T=300, H=4, K=K, V=K, dtype=dtype, device="cuda")
    first = native(kwargs)
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, native(kwargs), strict=True))


@MAIN
def test_columns_past_a_tail_chunk_may_hold_anything(dtype):
    kwargs = wy_inputs(T=70, H=2, K=128, V=128, dtype=dtype, device="cuda")
    clean = native(kwargs)
    kwargs["A"][:, 64:, :, 6:] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(clean, native(kwargs), strict=True))


@MAIN
def test_strided_and_misaligned_inputs(dtype):
    kwargs = wy_inputs(T=70, H=2, K=128, V=128, dtype=dtype, device="cuda")
    clean = native(kwargs)
    odd = torch.empty(kwargs["v"].numel() + 1, dtype=dtype, device="cuda")[1:].view(kwargs["v"].shape)
    odd.copy_(kwargs["v"])
    wide = kwargs["do"].repeat(1, 1, 1, 2)[..., :128]
    got = native({**kwargs, "v": odd, "do": wide})
    assert_right(got, kwargs)
    for name, a, b in zip(got._fields, clean, got, strict=True):
        # The element-wise instance adds in the same order, Hopper's own kernel some sums of db and dg in another.
        assert torch.equal(a, b) or (name in ("db", "dg") and dtype is not torch.float32), name


@pytest.mark.parametrize("state", ["float32", "main"])
@pytest.mark.parametrize("lengths", [None, [0, 65, 1, 190]], ids=str)
@MAIN
def test_inputs_of_a_training_step(dtype, lengths, state):
    """A model's own q, k, v, gates and gradients, with A, h and dh as its backward has them."""
    torch.manual_seed(0)
    net = ByteModel(Config(layers=1, heads=2, value_heads=2, key_size=128, value_size=128, chunk_size=64)).cuda()
    tokens = torch.randint(0, 256, (2, 131), generator=torch.Generator().manual_seed(1)).cuda()
    call = real_inputs.record(net, tokens[:, :-1], tokens[:, 1:])[0]
    if lengths is not None:
        call = real_inputs.packed(call, lengths)
    kwargs = op_inputs(call, dtype=dtype, state_dtype=dtype if state == "main" else torch.float32)
    assert_right(native(kwargs), kwargs)


def test_many_short_sequences_are_found_without_indices():
    lengths = [1 + (7 * i) % 5 for i in range(700)]
    kwargs = wy_inputs(
        T=sum(lengths) + 3, H=1, K=64, V=64, BT=16, dtype=torch.float16, lengths=lengths, device="cuda"
    )  # fmt: skip
    assert_right(native(kwargs), kwargs)


def test_no_sequence_has_a_token():
    kwargs = wy_inputs(T=5, H=1, K=64, V=64, dtype=torch.float16, lengths=[0, 0], device="cuda")
    assert all((x == 0).all() for x in native(kwargs))


def test_a_cuda_graph_replays_it_on_a_side_stream():
    kwargs = wy_inputs(T=130, H=2, K=128, V=128, dtype=torch.bfloat16, lengths=[63, 65], device="cuda")
    expected = native(kwargs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        native(kwargs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = native(kwargs)
    for x in got:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_torch_compile_keeps_one_graph():
    kwargs = wy_inputs(T=70, H=2, K=128, V=128, dtype=torch.float16, device="cuda")
    compiled = torch.compile(lambda kw: op(**kw, backend="cuda")[0] + 1, fullgraph=True)
    assert torch.equal(compiled(kwargs), native(kwargs)[0] + 1)


def test_the_operator_has_a_fake():
    kwargs = wy_inputs(T=70, H=2, K=64, V=64, dtype=torch.float16, device="cuda")
    c = wy_dqkg.check(**kwargs)
    native(kwargs)
    arguments = (
        c.q,
        c.k,
        c.v,
        c.v_new,
        c.g,
        c.beta,
        c.A,
        c.h,
        c.do,
        c.dh,
        c.dv,
        None,
        None,
        c.scale,
        c.BT,
        False,
        True,
    )
    torch.library.opcheck(torch.ops.mindspeed_kda_cuda.wy_dqkg.default, arguments)


def test_a_call_like_a_checked_one_skips_the_checks_and_no_other_does(monkeypatch):
    kwargs = wy_inputs(T=70, H=2, K=64, V=64, dtype=torch.float16, lengths=[65, 5], device="cuda")
    first = native(kwargs)

    def unexpected(*_args, **_kwargs):
        raise LookupError("checked")

    monkeypatch.setattr(wy_dqkg, "check", unexpected)
    assert all(torch.equal(a, b) for a, b in zip(first, native(kwargs), strict=True))
    again = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    assert all(torch.equal(a, b) for a, b in zip(first, native(again), strict=True))
    others = [{n: x[..., :-1].contiguous()} for n, x in kwargs.items() if isinstance(x, torch.Tensor)]
    others += [{n: x.to(torch.bfloat16)} for n, x in kwargs.items() if isinstance(x, torch.Tensor)]
    others += [{n: x.cpu()} for n, x in kwargs.items() if isinstance(x, torch.Tensor) and n != "cu_seqlens"]
    others += [{n: None} for n, x in kwargs.items() if isinstance(x, torch.Tensor)]
    others += [{"q": kwargs["q"].transpose(1, 2).contiguous().transpose(1, 2)}, {"g": kwargs["g"].to_sparse()}]
    others += [{"scale": 0.5}, {"scale": 2}, {"chunk_size": 32}, {"state_v_first": True}, {"state_v_first": 0}]
    others += [{"chunk_indices": torch.zeros(3, 2, dtype=torch.int64, device="cuda")}]
    for other in others:
        with pytest.raises(LookupError, match="checked"):
            native({**kwargs, **other})
    monkeypatch.setenv("MINDSPEED_KDA_VALIDATE", "1")
    with pytest.raises(LookupError, match="checked"):
        native(kwargs)


def test_memory_beyond_the_outputs():
    kwargs = wy_inputs(T=256, H=4, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    native(kwargs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = native(kwargs)
    own = sum(-(-x.numel() * x.element_size() // 512) * 512 for x in out)
    assert torch.cuda.max_memory_allocated() - before - own <= 1 << 20


@pytest.mark.whole_gpu
def test_more_than_two_to_the_31_elements():
    """h alone has 2^31 + 2^27 elements; the last chunks are compared with a call of their own."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free device memory")
    T, H, K = 17 << 12, 128, 128
    small = wy_inputs(T=64, H=H, K=K, V=K, dtype=torch.bfloat16, state_dtype=torch.bfloat16, device="cuda")
    big = {}
    for name, x in small.items():
        big[name] = x
        if isinstance(x, torch.Tensor):
            big[name] = x.repeat(1, T // 64, *(1 for _ in x.shape[2:]))
    assert big["h"].numel() > 2**31
    expected, got = native(small), native(big)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b[:, -64:])
        assert torch.equal(a, b[:, :64])
