"""``bench``: a figure only for a checked result, and the ratios that it shows."""

import json

import pytest
import torch

from mindspeed_kda.cli.main import main
from mindspeed_kda.testing import benchmark
from mindspeed_kda.testing.benchmark import Case
from mindspeed_kda.testing.timing import Timing

SMALL = ["bench", "--device", "cpu", "--shapes", "1x32x1x16x8", "--chunk", "16", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def _roof(monkeypatch):
    monkeypatch.setattr(benchmark, "copy_speed", lambda device: 1e9)


def test_figures_and_files(tmp_path, capsys):
    assert main([*SMALL, "--backends", "torch", "--out", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert row["bytes"] == 4 * 32 * (3 * 16 + 4 * 8 + 1 + 16) + 2 * 4 * 2 * 16 * 8 + 4 * 32 * (3 * 16 + 8 + 1 + 16)
    assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"]["median"])
    assert row["of_copy"] == pytest.approx(row["bytes_per_second"] / 1e9)
    assert row["times_eager"] == 1.0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "bench.json").read_text()) == report


def test_never_a_figure_for_a_wrong_result(capsys, wrong_backend):
    assert main(SMALL) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = [line for line in lines if " wrong " in line]
    assert "WRONG: db: RMS ratio" in wrong
    assert wrong.split("WRONG")[0].split()[4] == "-"
    assert any(" torch " in line and line.endswith("checked") for line in lines)
    assert any(line.startswith("not run: triton in float32: ") for line in lines)


def test_wrong_results_are_not_timed(monkeypatch, wrong_backend):
    timed = []

    def record(fn, device, **options):
        timed.append(fn()["db"].sum().item())
        return Timing(1.0, 1.0, 1.0, 1)

    monkeypatch.setattr(benchmark, "median_time", record)
    case = Case("wy_dqkg", 1, 32, 1, 1, 16, 8, 16, torch.float32)
    result = benchmark.measure_all([case], ["wrong", "torch"], torch.device("cpu"))
    assert [m.backend for m in result.rows] == ["torch", "wrong"], "eager first"
    assert len(timed) == 1
    assert result.rows[1].timing is None


@pytest.mark.parametrize("what", ["chunk_kda", "chunk_kda_fwd"])
def test_the_whole_layer(what, capsys):
    assert main([*SMALL, "--op", what, "--backends", "torch", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["seconds"]["median"] > 0


def test_inputs_are_not_zero():
    for what in benchmark.OPS:
        call = Case(what, 1, 32, 1, 1, 16, 8, 16, torch.float32).inputs(torch.device("cpu"))
        for name, t in call.items():
            if isinstance(t, torch.Tensor):
                assert t.ne(0).any(), name


@pytest.mark.parametrize("lengths", [None, (5, 0, 20)])
def test_inputs_repeat_with_their_seed(lengths):
    for what in benchmark.OPS:
        case = Case(what, 1, 32, 1, 1, 16, 8, 16, torch.float16, lengths=lengths)
        first, again, other = (case.inputs(torch.device("cpu"), seed) for seed in (1, 1, 2))
        for name in ("q", "v", "g", "beta", "do"):
            assert torch.equal(first[name], again[name]), name
            assert not torch.equal(first[name], other[name]), name


def test_a_peer_that_cannot_run_says_why():
    assert "the device is cpu" in benchmark.PEERS["fla"].why_not(torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "timed", "said"),
    [(0.0, True, ""), (1e-3, True, "db: RMS ratio 1.00e-03 > 1e-05"), (0.5, False, "computes something else: db:")],
)
def test_a_peer_is_timed_if_it_computes_the_same_thing(monkeypatch, error, timed, said):
    def bind(call):
        right = benchmark.OPS["wy_dqkg"].bind(call, "torch")
        return lambda: {n: t * (1 + error) if n == "db" else t for n, t in right().items()}

    monkeypatch.setitem(benchmark.PEERS, "other", benchmark.Peer(lambda device: None, {"wy_dqkg": bind}))
    case = Case("wy_dqkg", 1, 32, 1, 1, 16, 8, 16, torch.float32)
    result = benchmark.measure_all([case], ["torch"], torch.device("cpu"), peers=["other"], seconds=0.01)
    row = result.rows[1]
    assert (row.timing is not None) is timed
    assert row.misses == []
    assert said in (row.note or row.reason or "")


def test_a_peer_that_raises_is_a_row(monkeypatch):
    def bind(call):
        raise TypeError("unexpected keyword argument 'g'")

    monkeypatch.setitem(benchmark.PEERS, "other", benchmark.Peer(lambda device: None, {"wy_dqkg": bind}))
    case = Case("wy_dqkg", 1, 32, 1, 1, 16, 8, 16, torch.float32)
    result = benchmark.measure_all([case], ["torch"], torch.device("cpu"), peers=["other"], seconds=0.01)
    assert result.rows[1].reason == "TypeError: unexpected keyword argument 'g'"
    assert result.rows[0].timing is not None
