"""The scans over the chunks of the native training step, run on this processor: against their recurrences in float64,
from tiles and a start that have nothing to do with each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sources import build, emulated

from mindspeed_kda.contracts import chunk_kda
from mindspeed_kda.cuda_kernels.chunk_kda import layout
from mindspeed_kda.testing import metrics
from mindspeed_kda.testing.kda_inputs import kda_inputs

PACKED = (0, 65, 1, 63, 200, 0)
MANY = (0,) * 40 + (65,) + (0,) * 30 + (130, 1)
"""Sequences enough for slices of 64 columns."""
A100_SHARED = 163 << 10


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    try:
        return emulated.Emulated(
            build.build_emulator(
                tmp_path_factory.mktemp("emulated") / "kernels.so", sources=("chunk_kda/plan.cu", "chunk_kda/scan.cu")
            )
        )
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")


@dataclasses.dataclass
class Problem:
    call: chunk_kda.ChunkKdaCall
    given: dict[str, torch.Tensor]
    """What the stages before would have written, and do and dht."""
    chunks: list[tuple[int, int, int, int]]
    """(row of [B T], rows, sequence, entry) of each, in order."""


def problem(dtype, size, lengths=None, B=1, T=64, HV=1, states=True, v_first=False, seed=0):
    made = kda_inputs(
        B=B, T=T if lengths is None else sum(lengths) + 3, H=1, HV=HV, K=size, V=size, dtype=dtype,
        lengths=None if lengths is None else list(lengths), states=states, state_v_first=v_first, seed=seed,
    )  # fmt: skip
    call = chunk_kda.check(**made.arguments)
    source = torch.Generator().manual_seed(seed)
    bounds = (
        [(n * call.T, (n + 1) * call.T) for n in range(call.B)]
        if lengths is None
        else [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))]
    )
    spans = [(row, min(64, end - row), n) for n, (start, end) in enumerate(bounds) for row in range(start, end, 64)]
    chunks = [(*span, i) for i, span in enumerate(spans)]
    NT = layout.num_chunks(call)

    def tiles(scale):
        x = torch.randn(NT, call.HV, 64, size, generator=source) * scale
        for _, rows, _, i in chunks:
            x[i, :, rows:] = 0.0
        x[len(chunks) :] = float("nan")
        return x.to(dtype)

    Aqk = torch.zeros(call.B * call.T, call.HV, 64)
    for row, rows, _, _ in chunks:
        block = torch.randn(rows, call.HV, rows, generator=source) * 0.3
        Aqk[row : row + rows, :, :rows] = block.transpose(0, 1).tril().transpose(0, 1)
    decay = torch.rand(NT, call.HV, size, generator=source)
    decay[len(chunks) :] = float("nan")
    given = {
        "w": tiles(0.1),
        "u": tiles(1.0),
        "qd": tiles(0.1),
        "kr": tiles(0.1),
        "decay": decay,
        "Aqk": Aqk.view(call.B, call.T, call.HV, 64).to(dtype),
        "do": made.do,
    }
    if made.dht is not None:
        given["dht"] = made.dht
    images = {name: layout.image(x) if name in ("w", "u", "qd", "kr") else x for name, x in given.items()}
    for name in ("w", "qd"):
        images[name] = images[name] * layout.STORED_SCALE[dtype]
    return Problem(call, given, chunks), images


def start_of(p, x):
    """[N, HV, K, V] in float64."""
    c = p.call
    if x is None:
        return torch.zeros(c.N, c.HV, c.K, c.V, dtype=torch.float64)
    return (x.transpose(-1, -2) if c.state_v_first else x).double().clone()


def tokens_of(p, name, row, rows):
    """[HV, 64, .] of an array [B, T, HV, .], zeros after the chunk's rows."""
    x = p.given[name].double().flatten(0, 1)[row : row + rows].transpose(0, 1)
    return torch.nn.functional.pad(x, (0, 0, 0, 64 - rows))


def forward_in_float64(p):
    c, dtype = p.call, p.call.dtype
    S = start_of(p, c.initial_state)
    o = torch.full((c.B * c.T, c.HV, c.V), float("nan"), dtype=torch.float64)
    h, v_new = {}, {}
    for row, rows, n, i in p.chunks:
        w, u, qd, kr = (p.given[name][i].double() for name in ("w", "u", "qd", "kr"))
        Aqk = tokens_of(p, "Aqk", row, rows)
        h[i] = S[n].clone()
        v_new[i] = u - w @ S[n].to(dtype).double()
        rounded = v_new[i].to(dtype).double()
        o[row : row + rows] = (qd @ S[n].to(dtype).double() + Aqk @ rounded)[:, :rows].transpose(0, 1)
        S[n] = p.given["decay"][i].double()[..., None] * S[n] + kr.mT @ rounded
    return {"o": o.view(c.B, c.T, c.HV, c.V), "h": h, "v_new": v_new, "ht": S}


def reverse_in_float64(p):
    dtype = p.call.dtype
    dS = start_of(p, p.given.get("dht"))
    dh, dv_new = {}, {}
    for row, rows, n, i in reversed(p.chunks):
        w, qd, kr = (p.given[name][i].double() for name in ("w", "qd", "kr"))
        Aqk, do = tokens_of(p, "Aqk", row, rows), tokens_of(p, "do", row, rows)
        dh[i] = dS[n].clone()
        dv_new[i] = Aqk.mT @ do + kr @ dS[n].to(dtype).double()
        decayed = p.given["decay"][i].double()[..., None] * dS[n]
        dS[n] = decayed + qd.mT @ do - w.mT @ dv_new[i].to(dtype).double()
    return {"dh": dh, "dv_new": dv_new, "dh0": dS}


def images_near(p, got, want, what):
    plain = torch.stack([want[i] for i in range(len(want))])
    metrics.assert_accurate(what, layout.image(got[: len(want)]), plain, p.call.dtype)
    assert got[len(want) :].isnan().all(), f"{what}: written past the last chunk"


def run(kernels, p, images, stage):
    """The arrays after the stage, the same bits whichever thread goes first."""
    a, b = (
        kernels.chunk_kda(["plan", stage], p.call, images, s) for s in (emulated.FORWARD, emulated.REVERSE)
    )  # fmt: skip
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), f"{name} depends on the schedule"
    return a


def check_forward(kernels, p, images):
    got, want = run(kernels, p, images, "scan_forward"), forward_in_float64(p)
    there = ~want["o"].isnan()
    assert got["o"][~there].isnan().all()
    metrics.assert_accurate("o", got["o"][there], want["o"][there], p.call.dtype)
    if p.call.output_final_state:
        metrics.assert_accurate("ht", start_of(p, got["ht"]), want["ht"], p.call.dtype)
    return got


def check_backward(kernels, p, images):
    got = run(kernels, p, images, "scan_backward")
    state, reverse = forward_in_float64(p), reverse_in_float64(p)
    images_near(p, got["h"], state["h"], "h")
    images_near(p, got["v_new"], state["v_new"], "v_new")
    images_near(p, got["dh"], reverse["dh"], "dh")
    images_near(p, got["dv_new"], reverse["dv_new"], "dv_new")
    if p.call.initial_state is not None:
        metrics.assert_accurate("dh0", start_of(p, got["dh0"]), reverse["dh0"], p.call.dtype)
    return got


CASES = {
    "dense": {"B": 2, "T": 130},
    "packed": {"lengths": PACKED},
    "v first": {"lengths": PACKED, "v_first": True},
    "no states": {"lengths": PACKED, "states": False},
    "one token": {"T": 1},
    "heads": {"B": 1, "T": 100, "HV": 3, "v_first": True},
}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", [check_forward, check_backward], ids=["forward", "backward"])
def test_scans_against_their_recurrences(kernels, check, case, dtype, size):
    p, images = problem(dtype, size, **CASES[case])
    check(kernels, p, images)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("check", [check_forward, check_backward], ids=["forward", "backward"])
def test_many_sequences_take_wide_slices_with_the_same_bits(kernels, check, size):
    p, images = problem(torch.bfloat16, size, lengths=MANY, HV=2 if size == 64 else 1)
    wide = check(kernels, p, images)
    few = tuple(n for n in MANY if n)
    q, few_images = problem(torch.bfloat16, size, lengths=few, HV=2 if size == 64 else 1)
    used = [n for n, length in enumerate(MANY) if length]
    at = len(p.chunks)
    for name in ("w", "u", "qd", "kr", "decay"):
        few_images[name][:at] = images[name][:at]
    few_images["Aqk"], few_images["do"] = images["Aqk"], images["do"]
    few_images["dht"] = images["dht"][used].contiguous()
    call = dataclasses.replace(q.call, initial_state=p.call.initial_state[used].contiguous())
    stage = "scan_forward" if check is check_forward else "scan_backward"
    narrow = kernels.chunk_kda(["plan", stage], call, few_images)
    names = ("o",) if check is check_forward else ("h", "v_new", "dh", "dv_new")
    for name in names:
        a, b = (x[name] if name == "o" else x[name][:at] for x in (wide, narrow))
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("check", [check_forward, check_backward], ids=["forward", "backward"])
def test_two_stages_where_there_is_no_room_for_three(kernels, check):
    p, images = problem(torch.float16, 128, lengths=PACKED)
    three = check(kernels, p, images)
    kernels.library.kda_emulator_shared_limit(A100_SHARED)
    try:
        two = check(kernels, p, images)
    finally:
        kernels.library.kda_emulator_shared_limit(227 << 10)
    for name in three:
        assert torch.equal(three[name].view(torch.uint8), two[name].view(torch.uint8)), name
