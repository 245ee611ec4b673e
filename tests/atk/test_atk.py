"""The frozen cases are what the generators make, span what they should, and pass; the standards can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mindspeed_kda.registry import REGISTRY, Backend
from mindspeed_kda.testing.oracle import judge as token_recurrence
from tests.atk import plugin, records, standards, suite
from tests.atk.__main__ import main

WY, KDA = "chunk_kda_bwd_wy_dqkg_fused", "chunk_kda"
CHEAP = 12_000
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("op", [WY, KDA])
def test_frozen_cases_are_the_generators(op):
    for kind in records.KINDS:
        make = getattr(suite.generator(op), kind, None)
        frozen = records.path(op, kind)
        assert (make is not None) == frozen.exists()
        if make is not None:
            assert frozen.read_text(encoding="utf-8") == records.dump(op, make())
            assert records.load(op, kind) == json.loads(json.dumps(make()))


@pytest.mark.parametrize(("op", "least"), [(WY, 500), (KDA, 200)])
def test_cases_span_what_they_should(op, least):
    specs = records.load(op)
    assert len(specs) >= least
    assert len({s["seed"] for s in specs}) == len(specs)
    assert len({json.dumps({**s, "seed": 0, "case_id": 0}) for s in specs}) > 0.95 * len(specs)
    for name, values in {
        "dtype": ("fp16", "bf16", "fp32"),
        "chunk_size": (16, 32, 64),
        "state_v_first": (True, False),
        "layout": plugin.LAYOUTS,
        "decay": (None, -0.05, -1.0, -5.0),
        "cu_dtype": ("int32", "int64"),
        "K": (1, 64, 128, 256),
    }.items():
        for value in values:
            assert sum(s[name] == value for s in specs) >= 5, f"{name} = {value}"
    assert sum(s["T"] % s["chunk_size"] == 1 for s in specs) >= 10
    assert sum(s["HV"] > s["H"] for s in specs) >= 20
    assert sum(0 in (s["lengths"] or ()) for s in specs) >= 20
    assert not any(s["T"] == 2048 for s in specs)  # the training shape is kept apart


def test_training_shape_is_kept_apart():
    assert {(s["B"], s["T"], s["H"], s["K"], s["V"], s["chunk_size"]) for s in records.load(WY, "model")} == {
        (1, 2048, 32, 128, 128, 64)
    }


@pytest.mark.parametrize("op", [WY, KDA])
def test_wrong_calls(op):
    specs = records.load(op, "negative")
    assert len(specs) >= 30
    bad = {s["case_key"]: r.misses for s in specs if (r := suite.run_case(op, "negative", s, "torch", "cpu")).misses}
    assert not bad


@pytest.mark.parametrize("op", [WY, KDA])
def test_sample_on_torch(op):
    cases = suite.sample(records.load(op), 24, CHEAP)
    assert {s["dtype"] for s in cases} == {"fp16", "bf16", "fp32"}
    bad = {s["case_key"]: r.misses for s in cases if (r := suite.run_case(op, "accuracy", s, "torch", "cpu")).misses}
    assert not bad


@pytest.mark.interpreter
@pytest.mark.parametrize("op", [op for op in (WY, KDA) if "triton" in REGISTRY.of(op)])
def test_sample_on_triton(op):
    """fp16 and fp32: bf16 products are wrong in Triton's interpreter and are tested on a GPU."""
    command = [sys.executable, "-m", "tests.atk", "--backend", "triton", "--op", op, "--kind", "accuracy"]
    command += ["--sample", "6", "--max-cost", "4000", "--dtype", "fp16", "--dtype", "fp32"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 cases passed" in done.stdout
    assert f"`{op}`" in done.stdout


def test_goldens_are_the_token_recurrence():
    """The chunked float64 golden of ``chunk_kda`` against a judge that has no chunks, on the frozen inputs."""
    it = suite.executor(KDA)
    for spec in suite.sample([s for s in records.load(KDA) if s["B"] * s["T"] <= 40], 8, CHEAP):
        inputs = it.build(spec, torch.device("cpu"))
        golden = it.golden(inputs)
        reference = token_recurrence(inputs["arguments"], inputs["do"], inputs["dht"])
        for name, t in golden.items():
            torch.testing.assert_close(t, reference[name], rtol=1e-9, atol=1e-11, msg=f"{spec['case_key']}: {name}")


class TestStandardsCanFail:
    """Each standard rejects the result that it is there for."""

    def judge(self, spoil, control=None, main=torch.bfloat16, runs=2, **options):
        golden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        control = golden * (1 + 2.0**-8) if control is None else control(golden)
        good = golden.float()
        out = [spoil(good.clone()) for _ in range(runs)]
        return standards.judge("x", out, golden, control, main, torch.float32, None, **options).misses

    def test_a_right_result_passes(self):
        assert not self.judge(lambda x: x)

    def test_dtype(self):
        assert "expected float32" in self.judge(lambda x: x.double())[0]

    def test_one_nan(self):
        def spoil(x):
            x[3, 5] = float("nan")
            return x

        assert "1 elements are non-finite" in self.judge(spoil)[0]

    def test_mixed_tolerance(self):
        def spoil(x):
            x[0, :8] += 0.2
            return x

        assert any("mixed tolerance" in m for m in self.judge(spoil))

    def test_rms_ratio(self):
        assert any("RMS ratio" in m for m in self.judge(lambda x: x * 1.01))

    def test_worse_than_the_control(self):
        misses = self.judge(lambda x: x * (1 + 2.0**-9), control=lambda g: g * (1 + 2.0**-12))
        assert {m.split()[0] for m in misses} == {"MARE", "MERE", "RMSE"}
        assert not self.judge(lambda x: x * (1 + 2.0**-9), control=lambda g: g * (1 + 2.0**-12), dual=False)

    @pytest.mark.parametrize(
        ("n", "out", "off", "passes"),
        [
            (1, torch.float32, 1.4, True),
            (15, torch.float32, 1.4, True),
            (1, torch.float32, 1.6, False),
            (16, torch.float32, 1.4, False),
            (1, torch.bfloat16, 1.4, False),
        ],
    )
    def test_few_numbers_that_cancel(self, n, out, off, passes):
        """In 16 bits, fewer than FEW float32 numbers are held to 1.5 times the control's RMS ratio, others to 5e-3."""
        golden = torch.linspace(1, 2, n, dtype=torch.float64)
        control, got = golden * (1 + 2.0**-4), (golden * (1 + off * 2.0**-4)).to(out)
        misses = standards.judge("x", [got], golden, control, torch.bfloat16, out, None).misses
        assert any("RMS ratio" in m for m in misses) is not passes

    def test_an_exact_control_does_not_fail_a_rounding(self):
        assert not self.judge(lambda x: torch.nextafter(x, 2 * x), control=lambda g: g, main=torch.float32)

    def test_one_bit_between_runs(self):
        calls = iter(range(9))
        spoil = lambda x: x if next(calls) == 0 else torch.nextafter(x, 2 * x)  # noqa: E731
        assert "2 runs differ in their bits" in self.judge(spoil)

    def test_structural_zeros(self):
        golden = torch.ones(8, 8, dtype=torch.float64).tril(-1)
        mask = golden > 0
        got = golden.float() + torch.eye(8) * 1e-9
        misses = standards.judge("x", [got], golden, golden, torch.float32, torch.float32, mask).misses
        assert misses == ["8 structural zeros are not 0"]


@pytest.mark.parametrize("op", [WY, KDA])
def test_a_wrong_backend_fails(op):
    """A result that is off by a part in a hundred goes red, output by output."""
    torch_backend = REGISTRY.of(op)["torch"].load()

    def wy(call):
        out = torch_backend(call)
        return type(out)(*(t * 1.01 for t in out))

    class Kda:
        saved_specs, forward = torch_backend.saved_specs if op == KDA else None, None

        @staticmethod
        def backward(call, saved, do, dht):
            out = torch_backend.backward(call, saved, do, dht)
            return type(out)(*(None if t is None else t * 1.01 for t in out))

    if op == KDA:
        Kda.forward = staticmethod(torch_backend.forward)
        Kda.saved_specs = staticmethod(torch_backend.saved_specs)
    REGISTRY.register(Backend(op, "off", supports=lambda call: None, load=lambda: wy if op == WY else Kda))
    try:
        spec = suite.sample(records.load(op), 1, CHEAP)[0]
        misses = suite.run_case(op, "accuracy", spec, "off", "cpu").misses
    finally:
        REGISTRY.unregister(op, "off")
    outputs = {m.split(":")[0] for m in misses}
    assert outputs >= ({"dq", "dk", "dv", "db", "dg", "dA"} if op == WY else {"dq", "dk", "dv", "dg", "dbeta"})


def test_command_line(capsys, tmp_path):
    report = tmp_path / "report.json"
    assert main(["--backend", "torch", "--sample", "2", "--max-cost", "4000", "--out", str(report)]) == 0
    out = capsys.readouterr().out
    assert out.count("| `chunk_kda") == len(out.split("\n\n")[0].splitlines()) - 2
    assert "8 of 8 cases passed" in out
    assert json.loads(report.read_text())["passed"] == 8
    assert main(["--json", "--op", KDA, "--kind", "negative", "--case", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["key"] == "negative_q_rank"
    for wrong in (["--backend", "abacus"], ["--device", "cuda:99"], ["--case", "99999"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2


def test_processes_give_the_same(tmp_path):
    jobs = [(WY, "accuracy", s) for s in suite.sample(records.load(WY), 4, 4000)]
    one, two = (suite.run_all(jobs, "torch", "cpu", processes=n) for n in (1, 2))
    assert [(r.case_id, r.worst, r.misses) for r in one] == [(r.case_id, r.worst, r.misses) for r in two]


@pytest.mark.parametrize("processes", [1, 2])
def test_no_case_begins_after_the_time_limit(processes):
    jobs = [(WY, "accuracy", s) for s in suite.sample(records.load(WY), 4, 4000)]
    assert suite.run_all(jobs, "torch", "cpu", processes=processes, seconds=0.0) == []


def test_the_command_fails_where_cases_were_not_run(capsys):
    assert main(["--backend", "torch", "--op", WY, "--sample", "2", "--time-limit", "0"]) == 1
    assert "0 of 0 cases passed, 0 declined, 4 not run" in capsys.readouterr().out


@pytest.mark.parametrize("there", [True, False])
def test_a_declined_call_is_told_apart_only_where_the_backend_is_there(there, monkeypatch):
    """What cannot run at all on this machine must not look like a call outside the backend's limits."""
    reason = None if there else "no library"
    REGISTRY.register(Backend(WY, "narrow", lambda call: "too wide", lambda: None, available=lambda: reason))
    try:
        spec = suite.sample(records.load(WY), 1, 4000)[0]
        result = suite.run_case(WY, "accuracy", spec, "narrow", "cpu")
    finally:
        REGISTRY.unregister(WY, "narrow")
    assert not result.passed
    assert (result.declined, bool(result.misses)) == (("too wide", False) if there else ("", True))


class TestUnderAtk:
    """The plug-ins register themselves with ATK where it is there: a stub of the four names that they use."""

    @pytest.fixture
    def atk(self, monkeypatch):
        registered = {}

        def register(name):
            return lambda cls: registered.setdefault(name, cls)

        class BaseApi:
            def __init__(self, task_result):
                self.device = task_result.device

        for name, content in {
            "atk": {},
            "atk.tasks": {},
            "atk.tasks.api_execute": {"register": register},
            "atk.tasks.api_execute.base_api": {"BaseApi": BaseApi},
            "atk.case_generator": {},
            "atk.case_generator.generator": {},
            "atk.case_generator.generator.generate_types": {
                "GENERATOR_REGISTRY": types.SimpleNamespace(register=register)
            },
            "atk.case_generator.generator.base_generator": {"CaseGenerator": object},
        }.items():
            module = types.ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return registered

    @pytest.mark.parametrize("op", [WY, KDA])
    def test_executor(self, atk, op):
        it = suite.executor(op)
        plugin.register_executor(it)
        spec = suite.sample(records.load(op), 1, CHEAP)[0]
        value = next(i["range_values"] for i in records.record(op, spec)["inputs"] if i["name"] == "case_spec")
        data = types.SimpleNamespace(kwargs={"case_spec": value, "main_marker": torch.zeros(1)})
        expected = it.golden(it.build(spec, torch.device("cpu")))
        for device, benchmark, dtype in (("cpu", True, torch.float64), ("cpu", False, None), ("npu", False, None)):
            api = atk[f"executor_{op}"](types.SimpleNamespace(device=device, is_benchmark_task=benchmark))
            outputs = api(data)
            assert [t.shape for t in outputs] == [t.shape for t in expected.values()]
            assert dtype is None or {t.dtype for t in outputs} == {dtype}

    def test_generator(self, atk):
        specs = records.load(WY)
        plugin.register_generator(WY, lambda: specs)
        config = types.SimpleNamespace(id=3, name=None, inputs=[types.SimpleNamespace() for _ in range(3)])
        made = atk[f"generator_{WY}"]().after_case_config(config)
        assert made.name == records.record(WY, specs[3])["name"]
        assert json.loads(made.inputs[2].range_values) == specs[3]

    def test_without_atk_they_are_plain_modules(self):
        assert plugin.register_executor(suite.executor(WY)) is None
