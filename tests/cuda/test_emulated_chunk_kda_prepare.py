"""The chunk table and the parallel stage before the scans of the native training step, run on this processor."""

from __future__ import annotations

import math

import pytest
import torch
from sources import build, emulated

from mindspeed_kda.contracts import chunk_kda
from mindspeed_kda.cuda_kernels.chunk_kda import layout
from mindspeed_kda.reference import transforms
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate


def built(out, **how):
    try:
        return emulated.Emulated(build.build_emulator(out, **how))
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return built(tmp_path_factory.mktemp("emulated") / "kernels.so", sources=SOURCES)


SOURCES = ("chunk_kda/plan.cu", "chunk_kda/prepare.cu")


def call_of(lengths=None, B=1, T=64, cu_dtype=torch.int32):
    inputs = kda_inputs(B=B, T=T if lengths is None else sum(lengths) + 2, H=1, K=64, V=64, dtype=torch.float16,
                        lengths=lengths)  # fmt: skip
    arguments = dict(inputs.arguments)
    if lengths is not None:
        arguments["cu_seqlens"] = arguments["cu_seqlens"].to(cu_dtype)
    return chunk_kda.check(**arguments)


def expected_chunks(call):
    """[(first row, rows, sequence)], and the number of chunks before each sequence and in all."""
    bounds = (
        [(n * call.T, (n + 1) * call.T) for n in range(call.B)]
        if call.cu_seqlens is None
        else list(zip(call.cu_seqlens.tolist()[:-1], call.cu_seqlens.tolist()[1:], strict=True))
    )
    chunks, first = [], []
    for n, (start, end) in enumerate(bounds):
        first.append(len(chunks))
        chunks += [(row, min(64, end - row), n) for row in range(start, end, 64)]
    return chunks, [*first, len(chunks)]


@pytest.mark.parametrize(
    ("lengths", "B", "T"),
    [(None, 3, 130), (None, 1, 1), (None, 5, 64), ([0, 65, 0, 0, 1, 64, 200, 0], 1, 0), ([0, 0], 1, 0),
     ([(37 * i) % 130 for i in range(300)], 1, 0)],
    ids=("dense", "one token", "whole chunks", "packed", "all empty", "300 sequences"),
)  # fmt: skip
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_the_table_of_chunks(kernels, lengths, B, T, cu_dtype):
    call = call_of(lengths, B, T, cu_dtype)
    chunks, first = expected_chunks(call)
    for schedule in (emulated.FORWARD, emulated.REVERSE):
        got = kernels.chunk_kda(["plan"], call, {}, schedule)
        assert got["first_chunk"].tolist() == first
        table = [(row, both & 0xFFFFFFFF, both >> 32) for row, both in got["chunks"].tolist()]
        assert table[: len(chunks)] == chunks
        assert all(rows == 0 for _, rows, _ in table[len(chunks) :])


OUTPUTS = ("A", "Aqk", "w", "u", "qd", "kr", "decay")
ROUNDINGS = 2
"""Limit of the RMS ratios in roundings of the dtype: half a unit in the last place, or half the smallest number."""


def chunk_formulas(call):
    """{output: ([chunks, rows, ...], or decay, in float64) of every chunk of every value head}, by docs/kda_math.md."""
    c, out = call, []
    group = c.HV // c.H
    q, k = (x.double()[0 if x.shape[0] == 1 else slice(None)].reshape(-1, c.H, c.K) for x in (c.q, c.k))
    if c.qk_l2norm:
        q, k = q * transforms.inverse_norm(q), k * transforms.inverse_norm(k)
    v, beta = c.v.double().reshape(-1, c.HV, c.V), transforms.write_strength(c, c.beta.double()).reshape(-1, c.HV)
    x = c.g.double().reshape(-1, c.HV, c.K)
    if c.gate != chunk_kda.PREGATED:
        x = x if c.dt_bias is None else x + c.dt_bias.double().reshape(c.HV, c.K)
        rate = c.A_log.double().exp()[:, None]
        x = -rate * torch.nn.functional.softplus(x) if c.gate == chunk_kda.SOFTPLUS else (
            c.lower_bound * torch.sigmoid(rate * x)
        )  # fmt: skip
    for row, rows, _ in expected_chunks(c)[0]:
        at = slice(row, row + rows)
        for hv in range(c.HV):
            qc, kc, vc, b = q[at, hv // group], k[at, hv // group], v[at, hv], beta[at, hv, None]
            g = (x[at, hv] / math.log(2.0)).cumsum(0)
            difference = g[:, None] - g
            i, j = torch.arange(rows)[:, None], torch.arange(rows)
            E = torch.where((i >= j)[..., None], difference, -torch.inf).exp2()
            L = torch.where(i > j, b * torch.einsum("ik,jk,ijk->ij", kc, kc, E), 0.0)
            A = torch.linalg.solve_triangular(torch.eye(rows, dtype=g.dtype) + L, torch.eye(rows, dtype=g.dtype),
                                              upper=False)  # fmt: skip
            out.append({
                "A": A, "Aqk": c.scale * torch.einsum("ik,jk,ijk->ij", qc, kc, E),
                "w": A @ (b * kc * g.exp2()), "u": A @ (b * vc),
                "qd": c.scale * qc * g.exp2(), "kr": kc * (g[-1] - g).exp2(), "decay": g[-1].exp2(),
            })  # fmt: skip
    return out


def by_chunk(call, got):
    """The same of what the kernel left, after a look at what it may not leave: rows past a chunk's last in tiles that
    are not zero, columns of A and Aqk that are not zero."""
    c, out = call, []
    tiles = {name: emulated.image(got[name]) for name in ("w", "u", "qd", "kr")}
    for name in ("w", "qd"):
        tiles[name] = tiles[name].float() / layout.STORED_SCALE[c.dtype]
    A, Aqk = (got[name].reshape(-1, c.HV, 64) for name in ("A", "Aqk"))
    for n, (row, rows, _) in enumerate(expected_chunks(c)[0]):
        for hv in range(c.HV):
            for name, x in tiles.items():
                assert (x[n, hv, rows:] == 0).all(), f"{name}: rows past the chunk are not zero"
            square = {"A": A[row : row + rows, hv], "Aqk": Aqk[row : row + rows, hv]}
            for name, x in square.items():
                past = torch.arange(64) > torch.arange(rows)[:, None]
                assert (x[past] == 0).all(), f"{name}: columns right of the diagonal are not zero"
            out.append({
                **{name: x[:, :rows] for name, x in square.items()},
                **{name: x[n, hv, :rows] for name, x in tiles.items()},
                "decay": got["decay"][n, hv],
            })  # fmt: skip
    return out


def check_prepare(kernels, call):
    """Forward in both orders of threads, against float64; backward from forward's A: the same bits."""
    got = kernels.chunk_kda(["plan", "prepare_forward"], call, {}, emulated.FORWARD)
    reverse = kernels.chunk_kda(["plan", "prepare_forward"], call, {}, emulated.REVERSE)
    backward = kernels.chunk_kda(["plan", "prepare_backward"], call, {"A": got["A"]}, emulated.REVERSE)
    for name in OUTPUTS:
        bits = torch.int32 if name == "decay" else torch.int16
        assert torch.equal(got[name].view(bits), reverse[name].view(bits)), f"{name} depends on the order of threads"
        if name != "Aqk":
            assert torch.equal(got[name].view(bits), backward[name].view(bits)), f"{name}: backward differs"
    mine, theirs = by_chunk(call, got), chunk_formulas(call)
    for name in OUTPUTS:
        a, b = (torch.cat([x[name].flatten() for x in parts]) for parts in (mine, theirs))
        limit = 1e-5
        if name != "decay":
            kind, size = torch.finfo(call.dtype), float(b.square().mean().sqrt())
            least = kind.smallest_normal / (layout.STORED_SCALE[call.dtype] if name in ("w", "qd") else 1.0)
            limit = ROUNDINGS * (kind.eps / 2 + least * kind.eps / 2 / max(size, 1e-12))
        assert_accurate(name, a, b, torch.float32 if name == "decay" else call.dtype, rms_limit=limit)


AXES = {
    "T": (1, 17, 64, 100),
    "K": (64, 128),
    "dtype": (torch.bfloat16, torch.float16),
    "heads": ((1, 1), (1, 2)),
    "gate": (
        {}, {"gate_divisor": 10.0}, {"decay": -5.0}, {"decay": -10.0}, {"gate": "softplus"}, {"gate": "lower_bound"},
        {"gate": "lower_bound", "dt_bias": False, "decay": -5.0},
    ),
    "raw": (True, False),
    "neg_eigval": (False, True),
    "wide": (True, False),
}  # fmt: skip


@pytest.mark.parametrize("case", pairwise(AXES), ids=str)
def test_prepare(kernels, case):
    H, HV = case["heads"]
    inputs = kda_inputs(T=case["T"], H=H, HV=HV, K=case["K"], V=case["K"], dtype=case["dtype"], raw=case["raw"],
                        neg_eigval=case["neg_eigval"], wide_beta_and_g=case["wide"], **case["gate"])  # fmt: skip
    check_prepare(kernels, chunk_kda.check(**inputs.arguments))


@pytest.mark.parametrize("K", [64, 128])
def test_prepare_of_packed_sequences(kernels, K):
    inputs = kda_inputs(T=141, H=1, HV=2, K=K, V=K, dtype=torch.bfloat16, lengths=[0, 65, 1, 0, 70], gate="softplus")
    check_prepare(kernels, chunk_kda.check(**inputs.arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_prepare_where_tokens_forget_everything(kernels, dtype):
    inputs = kda_inputs(T=64, H=1, HV=1, K=128, V=128, dtype=dtype, gate_divisor=10.0)
    inputs.arguments["g"][:, 3::7] = -1000.0
    check_prepare(kernels, chunk_kda.check(**inputs.arguments))


@pytest.mark.parametrize("neg_eigval", [False, True])
def test_the_inverse_of_equal_keys(kernels, neg_eigval):
    """The inverse's hardest case: its terms cancel to (1, -b) beside the diagonal, or with b = 2 flip signs for ever.
    The error stays within what one rounding of each element of L brings."""
    inputs = kda_inputs(T=64, H=1, HV=1, K=64, V=64, dtype=torch.float16, decay=-1e-4, neg_eigval=neg_eigval)
    inputs.arguments["k"][:] = inputs.arguments["k"][:, :1]
    inputs.arguments["beta"][:] = 8.0
    call = chunk_kda.check(**inputs.arguments)
    got = kernels.chunk_kda(["plan", "prepare_forward"], call, {})["A"][0, :, 0].double()
    A = chunk_formulas(call)[0]["A"]
    sign = torch.randint(2, A.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    half = torch.finfo(call.dtype).eps / 2
    noisy = torch.linalg.inv(torch.linalg.inv(A) * (1 + half * sign))
    limit = float((noisy - A).square().mean().sqrt() / A.square().mean().sqrt()) + half
    assert_accurate("A", got, A, torch.bfloat16, rms_limit=limit)
