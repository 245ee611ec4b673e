"""The cost counter reproduces hand-counted bytes and products of two small kernels on every target."""

from pathlib import Path

import pytest

from mindspeed_kda.npu_kernels.ascend_check import cost_report, hivm, toolchain
from mindspeed_kda.npu_kernels.ascend_check.cost import CUBE_MACS, RATES, VECTOR_BYTES, Cost, count
from mindspeed_kda.npu_kernels.ascend_check.execute import ExecutionError
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

pytestmark = pytest.mark.ascend

KERNELS = Path(__file__).with_name("gate_kernels.py")
FIRST = ("Ascend910B3", "Ascend910_9391")
VECTOR = {"x": "*fp16", "y": "*fp16", "o": "*fp32", "T": "i32", "BT": CONSTEXPR}
MIX = {"x": "*fp16", "y": "*fp16", "o": "*fp32", "T": "i32", **dict.fromkeys(("K", "V", "BT", "BK"), CONSTEXPR)}
PACKED = {"x": "*fp32", "cu_seqlens": "*i64", "o": "*fp32", "N": "i32", "BT": CONSTEXPR}
K, V, BT, BK = 128, 64, 64, 32
SPECS = {
    "clean_vector": KernelSpec.of("test", "clean_vector", f"{KERNELS}:clean_vector", VECTOR, {"BT": 1024}),
    "clean_mix": KernelSpec.of(
        "test", "clean_mix", f"{KERNELS}:clean_mix", MIX, {"K": K, "V": V, "BT": BT, "BK": BK}, per=2,
        scalars={"T": 128},
    ),
    "metadata": KernelSpec.of("test", "metadata", f"{KERNELS}:metadata", PACKED, {"BT": 64}),
}  # fmt: skip


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The final IR of every kernel on every target."""
    reason = toolchain.missing()
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("cost")
    keys = [(name, target) for name in SPECS for target in TARGETS]
    tasks = [Task(SPECS[name], TARGETS[target], root / name / target) for name, target in keys]
    for _, report in run_all(tasks, jobs=2):
        assert report.stopped_in is None, report.error
    final = "temps/module.hivm.opt.mlir"
    return {key: hivm.parse_module((root / key[0] / key[1] / final).read_text()) for key in keys}


def counted(modules, name, target, **scalars):
    return count(modules[name, target], dict(SPECS[name].signature), scalars)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("T", [4096, 2500, 1, 0])
def test_vector_kernel(modules, target, T):
    cost = counted(modules, "clean_vector", target, T=T)
    assert (cost.read["x"], cost.read["y"], cost.written["o"]) == (T * 2, T * 2, T * 4)
    assert cost.tensor_bytes == T * 8
    assert cost.workspace == 0
    assert sum(cost.macs.values()) == 0
    tiles = -(-T // 1024)
    exponentials = sum(n for op, n in cost.vector.items() if op.startswith("vexp"))
    assert exponentials == tiles * 1024  # a tile's tail is computed, not stored


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("T", [128, 640, 100, 16])
def test_mix_kernel(modules, target, T):
    cost = counted(modules, "clean_mix", target, T=T)
    tiles = -(-T // BT)
    assert cost.read == {"x": T * K * 2, "y": tiles * K * V * 2}
    assert cost.written == {"o": T * V * 4}
    rows = T if target in FIRST else tiles * BT  # the second compiler multiplies a tail's padding too
    assert cost.macs == {"half": rows * K * V}
    # written by the cube core and read by the vector cores, in whole tiles; the second generation hands over in UB
    assert cost.workspace == (2 * tiles * BT * V * 4 if target in FIRST else 0)
    exponentials = sum(n for op, n in cost.vector.items() if op.startswith("vexp"))
    assert exponentials == tiles * BT * V
    assert cost.waits["cores"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_share_the_work(modules, target):
    spec = SPECS["clean_mix"]
    one, three = (count(modules["clean_mix", target], dict(spec.signature), {"T": 640}, blocks=b) for b in (1, 3))
    assert (one.read, one.written, one.macs, one.workspace) == (three.read, three.written, three.macs, three.workspace)


@pytest.mark.parametrize("target", TARGETS)
def test_what_depends_on_unknown_values_is_an_error(modules, target):
    with pytest.raises(ExecutionError):
        counted(modules, "metadata", target, N=2)
    with pytest.raises(ExecutionError):
        counted(modules, "clean_vector", target)


def test_wrong_arguments_are_an_error(modules):
    with pytest.raises(ExecutionError, match=r"expected arguments \['x', 'grid x', 'grid y', 'grid z'\]"):
        count(modules["clean_vector", "Ascend910B3"], {"x": "*fp16"}, {})


def test_report_per_chunk_and_head(modules):
    target = TARGETS["Ascend910B3"]
    spec = SPECS["clean_mix"]
    (one,) = cost_report.measure([spec], target)
    assert one.cost.macs == {"half": 128 * K * V / 2}
    twice = cost_report.measure([spec, spec], target)
    assert twice[0].cost.tensor_bytes == 2 * one.cost.tensor_bytes
    assert twice[0].cost.launches == 2
    assert cost_report.total([one, one]).cost.launches == 2
    assert cost_report.op_bound([one, one], target) == 2 * one.cost.bound(target)[1]
    assert [row[0] for row in cost_report.rows([one], target)] == ["clean_mix", "total"]


def test_bound_is_the_longest_pipe():
    target = TARGETS["Ascend910B3"]
    rates = RATES[target.name]
    cost = Cost(vector_bytes=VECTOR_BYTES * rates.clock * target.vector_cores * 3)
    cost.read["x"] = int(rates.memory)
    cost.macs["half"] = int(CUBE_MACS["half"] * rates.clock * target.cube_cores * 2)
    assert cost.times(target) == pytest.approx({"memory": 1, "cube": 2, "vector": 3})
    assert cost.bound(target) == ("vector", pytest.approx(3))
