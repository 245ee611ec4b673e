"""How the stages are launched: grids, options, cores, tile table, and the list that the compile gate shares."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.npu_kernels import tiling
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, Config
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.npu_kernels.tiling import TABLE, tile
from mindspeed_kda.testing.inputs import wy_inputs

triton = pytest.importorskip("triton")

from mindspeed_kda.npu_kernels import launch as launching  # noqa: E402
from mindspeed_kda.npu_kernels.ascend_check.toolchain import stand_in_driver  # noqa: E402
from mindspeed_kda.npu_kernels.chunk_kda.specs import STAGES as chunk_kda_stages  # noqa: E402, N811
from mindspeed_kda.npu_kernels.wy_dqkg import gate, plan, specs  # noqa: E402

NAMES = {torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
NPU = SimpleNamespace(type="npu", index=0)
KERNELS = (
    "chunk_kda_bwd_kernel_wy_dqkg_fused",
    "chunk_kda_bwd_kernel_wy_dv2_db",
    "chunk_kda_bwd_kernel_wy_dk_dg_db",
    "chunk_kda_bwd_kernel_wy_dA_pre",
    "chunk_kda_bwd_kernel_dA_post_right",
    "chunk_kda_bwd_kernel_dA_post_left",
)
"""In the order and under the names of the op's page."""


@pytest.fixture
def recorded(monkeypatch):
    """Launches of the plan as an NPU would get them: (kernel name, grid, arguments and options), nothing runs."""
    seen = []

    def run(self, *args, grid, warmup, **kwargs):
        assert not args
        seen.append((self.fn.__name__, grid, kwargs))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    target = TARGETS["Ascend910B3"]
    cores = launching.Cores(target.cube_cores, target.vector_cores)
    monkeypatch.setattr(launching, "cores", lambda kind, index: cores)
    options = launching.options
    monkeypatch.setattr(launching, "options", lambda kind, tile: options("npu", tile))
    return seen


def test_grids_stay_below_the_core_count_where_tasks_exceed_the_grid_limit(recorded):
    """B * H * NT over 65535, which is as far as an Ascend grid goes."""
    kwargs = wy_inputs(B=1, T=16 * 1100, H=1, HV=64, K=1, V=1, BT=16, dtype=torch.float16)
    call = wy_dqkg.check(**kwargs)
    assert call.B * call.HV * call.NT > 65535
    plan.run(call)
    assert [name for name, _, _ in recorded] == list(KERNELS)
    assert [grid for _, grid, _ in recorded] == [(TARGETS["Ascend910B3"].cube_cores,)] * 6


def test_few_tasks_take_a_small_grid(recorded):
    plan.run(wy_dqkg.check(**wy_inputs(B=1, T=40, H=1, K=100, V=64, BT=64)))
    assert [grid for _, grid, _ in recorded] == [(2,), (1,), (1,), (1,), (4,), (4,)]


def test_packed_calls_also_zero_the_rows_of_no_sequence(recorded):
    plan.run(wy_dqkg.check(**wy_inputs(T=40, H=1, K=16, V=16, BT=16, lengths=[20, 0, 5])))
    assert [name for name, _, _ in recorded] == [*KERNELS, "zero_tail"]


@pytest.mark.parametrize(
    ("dtype", "lengths", "state_v_first"), [(torch.float16, None, True), (torch.float32, [9, 3], False)]
)
def test_the_gate_compiles_what_is_launched(dtype, lengths, state_v_first, recorded, monkeypatch):
    monkeypatch.setattr(gate, "H", 2)
    monkeypatch.setattr(gate, "HV", 4)
    kwargs = wy_inputs(
        T=20, H=2, HV=4, K=60, V=33, BT=32, dtype=dtype, lengths=lengths, cu_dtype=torch.int64,
        state_v_first=state_v_first,
    )  # fmt: skip
    plan.run(wy_dqkg.check(**kwargs))
    config = Config(str(dtype).removeprefix("torch."), 60, 33, 32, lengths is not None, "float32", state_v_first)
    listed = list(gate.specs(config, TARGETS["Ascend910B3"]))
    assert [s.kernel.rpartition(":")[2] for s in listed] == [name for name, _, _ in recorded]
    for spec, (_, _, given) in zip(listed, recorded, strict=True):
        constants = dict(spec.constants)
        for name, kind in spec.signature:
            value = given[name]
            if kind == CONSTEXPR:
                assert constants[name] == value, name
            elif kind.startswith("*"):
                assert kind == "*" + NAMES[value.dtype], name
            else:
                assert kind == {int: "i32", float: "fp32"}[type(value)], name
        assert {name for name, _ in spec.signature} == set(given), "an option beside the kernel's own parameters"


def test_core_counts_come_from_the_driver():
    launching.cores.cache_clear()
    try:
        for target in TARGETS.values():
            with stand_in_driver(target):
                assert launching.cores("npu", 0) == (target.cube_cores, target.vector_cores)
            launching.cores.cache_clear()
        with pytest.raises(RuntimeError, match="expected npu, cuda or cpu, got xpu"), stand_in_driver(target):
            launching.cores("xpu", 0)
    finally:
        launching.cores.cache_clear()


def test_warps_and_stages_are_given_to_cuda_alone():
    it = tile("cuda", 16, 64, 64, 64, "main")
    assert launching.options("npu", it) == launching.options("cpu", it) == {}
    assert launching.options("cuda", it) == {"num_warps": it.num_warps, "num_stages": it.num_stages}


STAGES = ("main", "dv2_db", "dk_dg_db", "dA_pre", "dA_post_right", "dA_post_left", "zero_tail")
ALL_STAGES = (*STAGES, *chunk_kda_stages, "fused_recurrent")
SIZES = (1, 15, 16, 17, 60, 64, 100, 128, 200, 256)


def test_every_row_of_the_tile_table_is_reached():
    reached = set()
    for target, bits, head, stage in itertools.product(tiling.TARGETS, (16, 32), SIZES, ALL_STAGES):
        reached.add(next(row for row in TABLE if row.serves(target, bits, head, stage)))
    assert reached == set(TABLE)


@pytest.mark.parametrize("target", tiling.TARGETS)
def test_every_tile_is_valid(target):
    """Powers of two of at least 16, none larger than the head needs, and a dA tile that divides the chunk."""
    for bits, K, V, BT, stage in itertools.product((16, 32), SIZES, SIZES, (16, 32, 64), ALL_STAGES):
        it = tile(target, bits, K, V, BT, stage)
        for size, need in ((it.BK, K), (it.BV, V), (it.BDA, BT)):
            assert size >= tiling.MIN_DOT
            assert size & (size - 1) == 0
            assert size < 2 * max(need, tiling.MIN_DOT)
        assert BT % it.BDA == 0


@pytest.fixture
def fresh_products():
    specs.float32_products.cache_clear()
    yield
    specs.float32_products.cache_clear()


@pytest.mark.parametrize("main", ["fp16", "bf16", "fp32"])
def test_products_are_ieee_but_for_fp32_on_nvidia(main, monkeypatch):
    monkeypatch.setattr(specs, "float32_products", lambda: "of tensor cores")
    for target, stage in itertools.product(tiling.TARGETS, STAGES[:-1]):
        sizes = specs.Sizes(target, main, "fp32", None, H=1, HV=1, K=64, V=64, BT=64)
        expected = "of tensor cores" if (target, main) == ("cuda", "fp32") else "ieee"
        assert specs.constants(sizes, specs.Stage(stage, "", ""))["PREC"] == expected


@pytest.mark.usefixtures("fresh_products")
@pytest.mark.parametrize(
    ("known", "interpreter", "expected"),
    [
        (("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"), "", "bf16x6"),
        (("tf32", "tf32x3", "ieee"), "", "tf32x3"),
        (("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"), "1", "ieee"),
        (None, "", "ieee"),
    ],
    ids=["3.5", "before", "interpreter", "not for NVIDIA"],
)
def test_fp32_takes_what_this_triton_multiplies_best(known, interpreter, expected, monkeypatch):
    module = known and SimpleNamespace(CUDAOptions=SimpleNamespace(allowed_dot_input_precisions=known))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", module and SimpleNamespace(compiler=module))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", module)
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    assert specs.float32_products() == expected


def test_the_page_s_defaults():
    for bits, BT, stage in itertools.product((16, 32), (16, 32, 64), STAGES):
        it = tile("npu", bits, 128, 128, BT, stage)
        assert it.BK == it.BV == 64
        assert {16: 16, 32: 32, 64: 32}[BT] == it.BDA


def test_a_target_without_a_row_is_named():
    with pytest.raises(ValueError, match="target 'xpu', 16 bits, K=64, V=32, stage 'main'"):
        tile("xpu", 16, 64, 32, 64, "main")


def test_workspace_regions_are_apart_and_aligned():
    """Written one after the other, each keeps its own value."""
    call = wy_dqkg.check(**wy_inputs(T=37, H=1, HV=3, K=5, V=7, BT=16, dtype=torch.float16))
    regions = plan.workspace(call)
    assert len({t.untyped_storage().data_ptr() for t in regions.values()}) == 1, "one allocation"
    for i, t in enumerate(regions.values()):
        assert t.storage_offset() * t.element_size() % plan.ALIGN == 0
        t.fill_(i)
    for i, t in enumerate(regions.values()):
        assert (t == i).all()
