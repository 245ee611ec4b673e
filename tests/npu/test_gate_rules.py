"""Each rule of the compile gate has a small kernel that trips it, on each target where it can; sound kernels pass."""

import dataclasses
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from mindspeed_kda.npu_kernels.ascend_check import rules, toolchain
from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport, read_report
from mindspeed_kda.npu_kernels.ascend_check.spec import KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

pytestmark = pytest.mark.ascend

KERNELS = Path(__file__).with_name("gate_kernels.py")
FIRST = ("Ascend910B3", "Ascend910_9391")
SECOND = ("Ascend950PR_9589",)
ALL = FIRST + SECOND
INT, C = "i32", "constexpr"


class Case(NamedTuple):
    """A kernel, its constants, and the rules it fails on targets of the first and of the second compiler."""

    signature: dict
    constants: dict
    first: set
    second: set
    kernel: str | None = None


OVERFLOW = {"compiles", "fits", "keeps_defaults"}
MATMUL = {"x": "*fp16", "y": "*fp16", "o": "*fp32"}
ROWS = {"x": "*fp32", "o": "*fp32", "T": INT, "BT": C, "K": C}
CASES = {
    "clean_vector": Case({"x": "*fp16", "y": "*fp16", "o": "*fp32", "T": INT, "BT": C}, {"BT": 1024}, set(), set()),
    "clean_mix": Case(
        {**MATMUL, "T": INT, "K": C, "V": C, "BT": C, "BK": C}, {"K": 128, "V": 64, "BT": 64, "BK": 64}, set(), set()
    ),
    "metadata": Case({"x": "*fp32", "cu_seqlens": "*i64", "o": "*fp32", "N": INT, "BT": C}, {"BT": 64}, set(), set()),
    "UB": Case({"x": "*fp32", "o": "*fp32", "SIZE": C}, {"SIZE": 32768}, OVERFLOW, {"compiles", "fits"}, "three_tiles"),
    "L1": Case({**MATMUL, "N": C, "K": C}, {"N": 64, "K": 4096}, OVERFLOW, {"compiles", "fits"}, "wide_product"),
    "L0C": Case({**MATMUL, "N": C, "K": C}, {"N": 512, "K": 64}, OVERFLOW, {"compiles", "fits"}, "wide_product"),
    # 14 Ki floats three times over fit once, but not twice: the first compiler retries, the second has a larger UB
    "weakened": Case(
        {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": INT, "SIZE": C}, {"SIZE": 14336}, {"keeps_defaults"}, set(),
        "sum_of_two",
    ),
    "minimum": Case(
        {**ROWS, "HOW": C}, {"BT": 64, "K": 64, "HOW": "minimum"}, {"no_discrete_access"}, {"no_discrete_access"},
        "clamped_rows",
    ),
    "where": Case(
        {**ROWS, "HOW": C}, {"BT": 64, "K": 64, "HOW": "where"}, {"no_discrete_access", "no_scalar_code"},
        {"no_discrete_access", "no_scalar_code"}, "clamped_rows",
    ),
    "remainder": Case(
        {**ROWS, "HOW": C}, {"BT": 64, "K": 64, "HOW": "remainder"}, {"no_discrete_access"}, {"no_discrete_access"},
        "clamped_rows",
    ),
    "gathered_rows": Case(
        {"x": "*fp32", "index": "*i32", "o": "*fp32", "T": INT, "BT": C, "K": C}, {"BT": 64, "K": 64},
        {"no_discrete_access", "no_scalar_code"}, {"no_discrete_access", "no_scalar_code"},
    ),
    # an int64 compare of tiles is scalar code on the first compiler only
    "wide_compare": Case(
        {"x": "*fp32", "index": "*i64", "o": "*fp32", "T": INT, "BT": C}, {"BT": 64}, {"no_scalar_code"}, set()
    ),
    # one accumulator through two loops of one trip each: an error of the first compiler that is no overflow
    "chained_sums": Case(
        {**MATMUL, "z": "*fp16", "n": INT, "N": C, "ONE": C}, {"N": 64, "ONE": 1}, {"compiles"}, set()
    ),
    "tf32": Case({"x": "*fp32", "o": "*fp32", "N": C}, {"N": 32}, {"compiles"}, {"compiles"}),
}  # fmt: skip
NO_MARKS = dict.fromkeys(("DiscreteMemAccess", "ExtractedLoadOrStore"), 0)
SOUND = CompileReport(None, 0, 0.1, core="mix", dots=3, products=3, marks=NO_MARKS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Report and folder of every case on every target."""
    reason = toolchain.missing()
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("gate")
    keys = [(name, target) for name in CASES for target in ALL]
    tasks = [Task(_spec(name), TARGETS[target], root / name / target) for name, target in keys]
    return {keys[i]: (report, tasks[i].keep) for i, report in run_all(tasks, jobs=2)}


def _spec(name):
    case = CASES[name]
    return KernelSpec.of("test", name, f"{KERNELS}:{case.kernel or name}", _ordered(case, name), case.constants)


def _ordered(case, name):
    """The signature in the kernel's own order, read from its source: importing triton here is not needed."""
    source = KERNELS.read_text(encoding="utf-8")
    line = next(text for text in source.splitlines() if text.startswith(f"def {case.kernel or name}("))
    names = [part.split(":")[0].strip() for part in line[line.index("(") + 1 : line.rindex(")")].split(",")]
    return {argument: case.signature[argument] for argument in names}


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("name", CASES)
def test_fails_exactly_its_rules(compiled, name, target):
    report, _ = compiled[name, target]
    failed = rules.findings(report)
    assert set(failed) == (CASES[name].first if target in FIRST else CASES[name].second), failed


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(("name", "needs"), [("UB", None), ("L1", 1024.0), ("L0C", 1024.0)])
def test_overflow_names_the_memory_and_by_how_much(compiled, name, needs, target):
    report, _ = compiled[name, target]
    (overflow,) = report.overflows
    budget = {"UB": TARGETS[target].ub, "L1": TARGETS[target].l1, "L0C": TARGETS[target].l0c}[name]
    assert (overflow.memory, overflow.available) == (name, budget)
    assert needs is None or overflow.required == needs * 1024
    assert f"{name} needs" in rules.findings(report)["fits"]


@pytest.mark.parametrize("target", ALL)
def test_peaks_of_a_kernel_planned_by_hand(compiled, target):
    """clean_mix: per product [64, 64] and [64, 64] fp16 in L1, both double-buffered; one [64, 64] fp32 in L0C, doubled
    on the second compiler, which also holds the result twice in UB before exp2."""
    report, _ = compiled["clean_mix", target]
    assert report.l1 == 2 * 2 * 64 * 64 * 2
    assert report.l0c == 64 * 64 * 4 * (2 if target in SECOND else 1)
    assert report.core == "mix"
    assert (report.dots, report.products) == (1, 1)
    # through global scratch memory on the first compiler (four tasks in flight), straight to UB on the second
    assert report.workspace == (4 * 64 * 64 * 4 if target in FIRST else 0)


@pytest.mark.parametrize("target", ALL)
def test_a_lost_product_is_found_in_the_compilers_own_output(compiled, tmp_path, target):
    """Takes the multiply-accumulate out of the final IR, as if the compiler had dropped it."""
    report, folder = compiled["clean_mix", target]
    final = folder / "temps" / "module.hivm.opt.mlir"
    lines = final.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if "call @mma" not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "temps").mkdir()
    (tmp_path / "temps" / final.name).write_text("\n".join(kept), encoding="utf-8")
    for name in ("kernel.mlir", "kernel.ttir"):
        (tmp_path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    doctored = read_report(tmp_path, TARGETS[target], subprocess.CompletedProcess([], 0, "", ""))
    assert (doctored.dots, doctored.products) == (1, 0)
    sentence = "matrix products: 1 in the source, 0 in the final HIVM"
    assert rules.findings(doctored)["keeps_products"] == sentence
    assert "keeps_products" not in rules.findings(report)


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"stopped_in": "triton", "exit_code": 1, "error": "a\n  b"}, "compiles", "Triton: a b"),
        ({"stopped_in": "bishengir", "exit_code": -11}, "compiles", "(exit code -11): no message"),
        ({"notes": ("Cbuf overflow detected; retrying",)}, "keeps_defaults", "Cbuf overflow"),
        ({"marks": {"DiscreteMemAccess": 2}}, "no_discrete_access", "2 x DiscreteMemAccess"),
        ({"scalar": ("load memref<64xi32>",) * 2}, "no_scalar_code", "2 x load memref<64xi32>"),
        ({"products": 1}, "keeps_products", "3 in the source, 1 in"),
        ({"products": 4}, "keeps_products", "3 in the source, 4 in"),
    ],
)
def test_a_sentence_for_each_rule(change, rule, words):
    failed = rules.findings(dataclasses.replace(SOUND, **change))
    assert list(failed) == [rule]
    assert words in failed[rule]
    assert rules.findings(SOUND) == {}


def test_an_earlier_report_is_taken_for_unchanged_code_only(compiled, tmp_path):
    target = TARGETS["Ascend910B3"]
    tasks = [Task(_spec("clean_vector"), target, cache=tmp_path), Task(_spec("where"), target, cache=tmp_path)]
    first = dict(run_all(tasks, jobs=1))
    assert len(list(tmp_path.iterdir())) == 2
    assert dict(run_all(tasks, jobs=1)) == first  # to the second they took: nothing was compiled again
    other = dataclasses.replace(tasks[0].spec, constants=(("BT", 512),))
    dict(run_all([Task(other, target, cache=tmp_path)], jobs=1))
    assert len(list(tmp_path.iterdir())) == 3
