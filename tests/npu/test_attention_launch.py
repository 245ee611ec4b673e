"""How the attention kernels are launched: on an NPU as the compile gate lists it, on NVIDIA a program per task."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from launch_specs import recorded_on, same

from mindspeed_kda.contracts import flash_attention as contract
from mindspeed_kda.npu_kernels.ascend_check.spec import Config
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS

pytest.importorskip("triton")

from mindspeed_kda.npu_kernels import launch as launching
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.flash_attention import gate, plan

TARGET = TARGETS["Ascend910B3"]
NAMES = {
    "flash_attention_fwd_kernel": "attention",
    "flash_attention_bwd_kernel_preprocess": "attention_preprocess",
    "flash_attention_bwd_kernel_dkdv": "attention_dkdv",
    "flash_attention_bwd_kernel_dq": "attention_dq",
}
OPTIONS = {
    "": {"causal": True, "window": (5, None), "softcap": 2.0},
    "causal": {"causal": True},
    "full": {},
}


@pytest.fixture
def recorded(monkeypatch):
    return recorded_on(TARGET, plan, monkeypatch)


def call_of(lengths=None, T=300, D=60, DV=100, dtype=torch.float16, **options):
    q, k, v = (torch.randn(1, T, n, d).to(dtype) for n, d in ((gate.H, D), (gate.HK, D), (gate.HK, DV)))
    cu = None if lengths is None else torch.tensor(lengths)
    return contract.check(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)


@pytest.mark.parametrize("lengths", [None, [0, 9, 12]], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", OPTIONS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_every_launch_is_one_that_the_gate_compiles(variant, lengths, deterministic, recorded):
    call = call_of(lengths, deterministic=deterministic, **OPTIONS[variant])
    o, lse = plan.forward(call)
    plan.backward(call, o, lse, o)
    assert [NAMES[name] for name, _, _ in recorded] == list(NAMES.values())
    config = Config("float16", 60, 100, 64, lengths is not None, "float32", False)
    specs = {s.stage: s for s in gate.specs(config, TARGET) if s.variant == variant}
    for name, grid, given in recorded:
        assert same(specs[NAMES[name]], given), name
        cores = TARGET.vector_cores if NAMES[name] == "attention_preprocess" else TARGET.cube_cores
        assert grid == (min(cores, given["n_tasks"]),)


@pytest.mark.parametrize("lengths", [None, [0, 9, 9, 290]], ids=["dense", "packed"])
def test_tasks_cover_all_rows_and_keys_once(lengths, recorded):
    call = call_of(lengths, **OPTIONS["causal"])
    o, lse = plan.forward(call)
    plan.backward(call, o, lse, o)
    for name, _, given in recorded:
        keys = name.endswith("dkdv")
        tile = tiling.attention_tile("npu", 16, 60, 100, NAMES[name], tiling.CAUSAL)
        side, blocks = tile.BN if keys else tile.BM, given["NB" if keys else "MB"]
        assert given["n_tasks"] == blocks * (gate.HK if keys else gate.H)
        if lengths is None:
            assert blocks == -(-300 // side)
            continue
        assert blocks <= 300 // side + 3
        sizes = [b - a for a, b in itertools.pairwise(lengths)]
        listed = [(n, i) for n, i in given["blocks"].tolist() if i * side < sizes[n]]
        assert listed == [(n, i) for n, size in enumerate(sizes) for i in range(-(-size // side))]


def test_a_window_wider_than_any_sequence_fits_32_bits(recorded):
    call = call_of(window=(2**40, 2**40))
    plan.forward(call)
    [(_, _, given)] = recorded
    assert (given["left"], given["right"]) == (600, 600)


def test_atomics_are_taken_where_allowed_and_faster():
    faster = [
        (target, bits, D, left, right)
        for target in ("npu", "cuda", "cpu")
        for bits in (16, 32)
        for D in (64, 128, 256)
        for left in (False, True)
        for right in (False, True)
        if tiling.attention_adds_dq(target, bits, D, D, left, right)
    ]
    assert faster == [("cuda", 16, 128, False, True)]
    assert not plan.adds_dq(call_of(D=128, DV=128, causal=True, deterministic=True))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_program_per_task_on_nvidia(persistent, monkeypatch):
    grids = []

    class Kernel:
        fn, arg_names = object(), ("x",)

        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **values: collections.defaultdict(lambda: None)

    monkeypatch.setattr(launching, "cores", lambda kind, index: launching.Cores(cube=8, vector=8))
    monkeypatch.setattr(launching, "_COMPILED", {})
    tile = tiling.AttentionTile(64, 64, 4, 2)
    launching.launch(Kernel(), torch.device("cuda", 0), 100, {"x": 1}, {}, tile, persistent=persistent)
    assert grids == [(8 if persistent else 100,)]
