"""Wrong input: one line on standard error, exit 2, no traceback, nothing on standard output."""

import sys

import pytest

from mindspeed_kda.cli.main import main

CASES = {
    "text absent": (["demo", "--text", "{tmp}/absent"], "--text: cannot read {tmp}/absent: No such file or directory"),
    "text is a folder": (["demo", "--text", "{tmp}"], "--text: cannot read {tmp}: Is a directory"),
    "text too short": (["demo", "--text", "{short}"], "--text: {short} is too short: expected at least 5120"),
    "steps": (["demo", "--steps", "0"], "--steps: expected 1 or more, got 0"),
    "minutes": (["demo", "--minutes", "0"], "--minutes: expected more than 0, got 0.0"),
    "backend unknown": (["demo", "--backend", "nope"], "--backend: expected one or more of "),
    "demo dtype": (["demo", "--dtype", "fp64"], "--dtype: expected fp32 or bf16, got 'fp64'"),
    "device": (["demo", "--device", "npu"], "--device: expected one of cpu (present here), got 'npu'"),
    "out under a file": (["demo", "--out", "{short}/x"], "--out: cannot write to {short}/x: Not a directory"),
    "beside absent": (["demo", "--beside", "{tmp}/absent"], "--beside: cannot read {tmp}/absent"),
    "beside is no report": (["demo", "--beside", "{short}"], "--beside: expected the loss.json of a demo, got {short}"),
    "verify text": (["verify", "--text", "{tmp}/absent"], "--text: cannot read"),
    "verify text short": (["verify", "--text", "{short}"], "--text: {short} is too short"),
    "verify shape": (["verify", "--shape", "1x2x3"], "--shape: expected BxTxHxKxV with numbers from 1, got '1x2x3'"),
    "verify zero": (["verify", "--shape", "1x0x1x1x1"], "--shape: expected BxTxHxKxV with numbers from 1"),
    "verify dtype": (["verify", "--dtype", "int8"], "--dtype: expected one or more of fp32, fp16, bf16, fp64"),
    "verify backend": (["verify", "--backend", "x"], "--backend: expected one or more of"),
    "verify cannot": (
        ["verify", "--backend", "triton", "--dtype", "fp32", "--shape", "1x20x1x16x16", "--steps", "0"],
        "--backend: triton cannot run chunk_kda_bwd_wy_dqkg_fused in fp32 on cpu: ",
    ),
    "verify chunk": (["verify", "--chunk", "48"], "--chunk: expected any of 16, 32, 64, got '48'"),
    "verify chunk words": (["verify", "--chunk", "a"], "--chunk: expected numbers from 1, separated by commas"),
    "verify packed": (["verify", "--packed", "1,-2"], "--packed: expected numbers from 0"),
    "verify packed long": (
        ["verify", "--shape", "1x20x1x16x16", "--packed", "21"],
        "--packed: expected lengths that sum to at most B * T = 20, got 21",
    ),
    "verify heads": (["verify", "--value-heads", "3"], "--value-heads: expected a multiple of H = 2, got 3"),
    "verify head size": (["verify", "--shape", "1x20x1x300x16"], "--shape: expected K from 1 to 256, got 300"),
    "verify steps": (["verify", "--steps", "-1"], "--steps: expected 0 or more, got -1"),
    "verify states": (
        ["verify", "--shape", "1x20x1x16x16", "--steps", "0", "--dtype", "fp16", "--state-dtype", "bf16"],
        "--state-dtype: expected fp32 or fp16 with --dtype fp16, got 'bf16'",
    ),
    "bench shape": (["bench", "--shapes", "1x4x1x4x4,oops"], "--shapes: expected BxTxHxKxV with numbers from 1"),
    "bench head size": (["bench", "--shapes", "1x64x1x64x300"], "--shapes: expected V from 1 to 256, got 300"),
    "bench heads": (["bench", "--shapes", "1x4x2x4x4", "--value-heads", "3"], "--value-heads: expected a multiple of"),
    "bench backend": (["bench", "--backends", "x"], "--backends: expected one or more of"),
    "bench cannot": (["bench", "--backends", "triton", "--shapes", "1x16x1x16x16"], "--backends: triton: "),
    "bench dtype": (["bench", "--dtype", "fp8"], "--dtype: expected one or more of"),
    "bench peer": (["bench", "--peer", "fla"], "--peer: fla cannot run here: flash-linear-attention's kernels"),
    "bench seconds": (["bench", "--seconds", "0"], "--seconds: expected more than 0, got 0.0"),
    "bench out": (["bench", "--out", "{short}/x"], "--out: cannot write to {short}/x: Not a directory"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick_roof(monkeypatch):
    from mindspeed_kda.testing import benchmark

    monkeypatch.setattr(benchmark, "copy_speed", lambda device: 1e9)


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_exit_2(name, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("short")
    argv, expected = CASES[name]
    argv = [a.format(tmp=tmp_path, short=short) for a in argv]
    if argv[0] != "doctor" and "--device" not in argv:
        argv += ["--device", "cpu"]
    assert main(argv) == 2
    shown = capsys.readouterr()
    *_, last = shown.err.splitlines()
    assert last.startswith(f"mindspeed-kda: error: {expected.format(tmp=tmp_path, short=short)}")
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("argv", [["demo"], ["bench", "--out", "{tmp}"]])
def test_without_matplotlib(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([a.format(tmp=tmp_path) for a in argv]) == 2
    err = capsys.readouterr().err
    assert err == (
        "mindspeed-kda: error: a PNG needs matplotlib, which is not installed: pip install 'mindspeed_kda[cli]'\n"
    )


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_with_a_broken_matplotlib(error, tmp_path, monkeypatch, capsys):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text(f"raise {error}('libfreetype.so: cannot open')")
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["demo"]) == 2
    assert "cannot be imported: libfreetype.so: cannot open" in capsys.readouterr().err


def test_a_python_without_its_documentation(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert main(["demo", "--no-plot", "--out", str(tmp_path)]) == 2
    assert "this Python ships no documentation (pydoc_data.topics); name a file" in capsys.readouterr().err
