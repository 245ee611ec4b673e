"""``demo`` end to end on a few steps, and once as a process of its own."""

import json
import subprocess
import sys

import pytest
import torch

from mindspeed_kda.cli import demo
from mindspeed_kda.cli.main import main

PNG = b"\x89PNG\r\n\x1a\n"
SHORT = ["demo", "--steps", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    sizes = {"width": 32, "heads": 1, "value_heads": 2, "key_size": 16, "value_size": 8, "mlp": 32, "chunk_size": 16}
    monkeypatch.setitem(demo.MODELS, "small", sizes)
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 5)
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_trains_samples_checks_and_plots(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*SHORT, "--text", text_file, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert (out / "loss.png").read_bytes().startswith(PNG)
    report = json.loads((out / "loss.json").read_text())
    (run,) = report["runs"]
    assert len(run["losses"]) == 2
    assert f"held-out loss {run['held_out']:.3f}" in shown.out
    assert "tokens/s" in shown.err
    assert "bigram entropy" in shown.err
    judged = {(r["input"], r["backend"], r["output"]) for r in report["checks"] if "reason" not in r}
    assert {("layer 0", "torch", n) for n in ("dq", "dk", "dv", "db", "dg", "dA")} <= judged
    assert "layer 1" in shown.out


def test_compare_draws_both(text_file, tmp_path, capsys):
    assert main([*SHORT, "--text", text_file, "--out", str(tmp_path), "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["zero_kda"] for r in report["runs"]] == [False, True]
    assert report["runs"][0]["parameters"] == report["runs"][1]["parameters"]
    assert report["checks"]


def test_zero_kda_has_nothing_to_check_and_another_run_beside(text_file, tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    assert main([*SHORT, "--text", text_file, "--out", str(first), "--zero-kda", "--no-plot"]) == 0
    assert not (first / "loss.png").exists()
    assert json.loads((first / "loss.json").read_text())["checks"] == []
    assert "KDA output zeroed: held-out loss" in capsys.readouterr().out
    beside = str(first / "loss.json")
    assert main([*SHORT, "--text", text_file, "--out", str(second), "--zero-kda", "--beside", beside]) == 0
    assert (second / "loss.png").read_bytes().startswith(PNG)


def test_a_wrong_backend_is_a_miss(text_file, tmp_path, capsys, wrong_backend):
    assert main([*SHORT, "--text", text_file, "--out", str(tmp_path), "--no-plot"]) == 1
    assert "MISS: RMS ratio 1.0e-02 > 1e-05" in capsys.readouterr().out.replace("1.00e-02", "1.0e-02")


def test_the_seed_decides(text_file, tmp_path, capsys):
    losses = []
    for seed in ("0", "0", "1"):
        arguments = [*SHORT, "--text", text_file, "--out", str(tmp_path), "--no-plot", "--zero-kda", "--seed", seed]
        assert main([*arguments, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["runs"][0]["losses"])
    assert losses[0] == losses[1] != losses[2]


def test_plain_lines_without_rich(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    arguments = [*SHORT, "--text", text_file, "--out", str(tmp_path), "--no-plot", "--zero-kda"]
    assert main(arguments) == 0
    assert "without KDA 100%  loss" in capsys.readouterr().err


@pytest.mark.parametrize(("load", "kept"), [(0.5, 2), (1e6, 1)])
def test_one_thread_on_a_busy_machine(monkeypatch, load, kept):
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (load, load, load))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        demo.leave_room(torch.device("cpu"))
        assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


@pytest.mark.interpreter
def test_as_a_process_with_every_backend(text_file, tmp_path, monkeypatch):
    """A fresh process, in which the command itself turns Triton's interpreter on where Triton is installed."""
    monkeypatch.delenv("TRITON_INTERPRET")
    command = [sys.executable, "-m", "mindspeed_kda", *SHORT, "--text", text_file, "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    judged = {r["backend"] for r in report["checks"] if "reason" not in r}
    if "Triton kernels are checked in Triton's interpreter" in done.stderr:
        assert judged >= {"torch", "triton"}
    else:
        assert judged == {"torch"}
        assert all("triton" in r["reason"].lower() for r in report["checks"] if r["backend"] == "triton")
