"""``ascend-check`` from the outside: usage, exit codes, what it writes; the stratum; workers that die."""

import itertools
import json
from dataclasses import astuple

import pytest

from mindspeed_kda.cli import ascend_check
from mindspeed_kda.cli.main import main
from mindspeed_kda.npu_kernels.ascend_check import matrix, toolchain
from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import TARGETS
from mindspeed_kda.npu_kernels.ascend_check.worker import Task, run_all

BROKEN = """\
import triton
import triton.language as tl

@triton.jit
def f(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), undefined_name)
"""


def spec(kernel, stage="one", **constants):
    return KernelSpec.of("op", stage, kernel, {"x": "*fp32", **dict.fromkeys(constants, CONSTEXPR)}, constants)


@pytest.fixture
def packages():
    reason = toolchain.missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def two_stages(packages, monkeypatch):
    """A provider of two stages whose compilations are made up: stage "bad" overflows on Ascend910B3."""

    def provide(config, target):
        yield spec("m:f", "good", BT=config.BT, HALF=config.dtype != "float32")
        yield spec("m:f", "bad", BT=config.BT, BAD=True)

    def compiled(tasks, jobs):
        for i, task in enumerate(tasks):
            fails = task.spec.stage == "bad" and task.target.name == "Ascend910B3"
            notes = ("Ub overflow detected; retrying",) if fails else ()
            yield i, CompileReport(None, 0, 0.1, notes=notes, core="vector", ub=96 * 1024, marks={})

    monkeypatch.setattr(matrix, "load_providers", lambda: [provide])
    monkeypatch.setattr(matrix, "run_all", compiled)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "Ascend910B"], "--target: expected one or more of Ascend910B3, Ascend910_9391, "),
        (["--dtype", "fp8"], "--dtype: expected one or more of fp16, bf16, fp32, got 'fp8'"),
        (["--stage", "third"], "--stage: expected one or more of good, bad, got 'third'"),
        (["--jobs", "-1"], "--jobs: expected a positive number, got -1"),
    ],
)
def test_wrong_usage(two_stages, capsys, arguments, words):
    assert main(["ascend-check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert main(["ascend-check"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'mindspeed_kda[ascend-check]'" in error
    assert error.count("\n") == 1


def test_unwritable_folder(two_stages, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["ascend-check", "--write", str(tmp_path / "file" / "below")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_failure_is_told_and_fails(two_stages, capsys):
    assert main(["ascend-check", "--target", "Ascend910B3,Ascend910_9391"]) == 1
    out = capsys.readouterr().out
    assert "Ascend910B3 bad [fp16 K64 V64 BT16 fixed state fp32 and " in out
    assert "keeps_defaults: default configuration weakened: Ub overflow" in out
    assert "Ascend910_9391 bad" not in out
    assert "hivmc" in out


def test_passes_without_the_failing_stage(two_stages, capsys):
    assert main(["ascend-check", "--stage", "good", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["failed"] == []
    assert values["compilations"] == len(values["rows"]) == 3 * 2 * len(TARGETS)
    row = dict(zip(values["columns"], values["rows"][0], strict=True))
    assert (row["target"], row["stage"], row["core"], row["ub"]) == ("Ascend910B3", "good", "vector", 98304)


def test_written_page_and_json(two_stages, tmp_path):
    assert main(["ascend-check", "--full", "--write", str(tmp_path)]) == 1
    page = (tmp_path / "docs" / "ascend_check.md").read_text()
    assert "| Ascend910B3 | good | fp16/bf16 | 480 | 3 | vector | 96.0 (50%) | - | - | - |  |" in page
    assert "## Failures" in page
    values = json.loads((tmp_path / "benchmarks" / "results" / "ascend_check.json").read_text())
    assert values["configurations"] == len(matrix.full_matrix()) * len(TARGETS)


def test_matrix_is_the_documented_one():
    configs = matrix.full_matrix()
    assert len(configs) == len(set(configs)) == len(matrix.HEADS) * 3 * 2 * 2 * (2 + 2 + 1)
    assert {(c.K, c.V) for c in configs} >= set(itertools.product((64, 128, 256), repeat=2))


def test_stratum_covers_every_pair_and_every_stage_dtype_target(packages):
    pairs = [(config, target) for config in matrix.full_matrix() for target in TARGETS.values()]
    rows = matrix.plan(pairs, matrix.load_providers())
    chosen = matrix.stratum(rows)
    assert len(chosen) >= 60
    assert len({(row.target.name, row.spec.key()) for row in chosen}) == len(chosen)

    def covered(some):
        served = [(row, config) for row in some for config in row.configs]
        triples = {(row.spec.stage, config.dtype, row.target.name) for row, config in served}
        values = {(row.spec.stage, row.target.name, *astuple(config)) for row, config in served}
        return triples | {pair for value in values for pair in itertools.combinations(enumerate(value), 2)}

    state = 2 + 5  # its dtype name repeats the main one's: the axis is "float32 or the main dtype"
    wanted = {item for item in covered(rows) if not any(isinstance(x, tuple) and x[0] == state for x in item)}
    assert wanted <= covered(chosen)
    assert chosen == matrix.stratum(rows)


def test_a_worker_that_dies_costs_one_compilation(packages, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "broken.py").write_text(BROKEN)
    target = TARGETS["Ascend910B3"]
    kernels = [f"{tmp_path}/dies.py:f", f"{tmp_path}/broken.py:f", "no_such_module:f"]
    reports = dict(run_all([Task(spec(kernel, N=16), target) for kernel in kernels], jobs=1))
    assert "died (exit code 3)" in reports[0].error
    assert "undefined_name" in reports[1].error
    assert "no_such_module" in reports[2].error
    assert {report.stopped_in for report in reports.values()} == {"triton"}


def test_progress_without_rich(two_stages, monkeypatch, capsys):
    monkeypatch.setattr(ascend_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain, "missing", lambda: None)
    assert main(["ascend-check", "--stage", "good"]) == 0
    assert "18/18" in capsys.readouterr().err
