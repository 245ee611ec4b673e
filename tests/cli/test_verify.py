"""``verify``: real inputs, every backend and dtype, non-zero exit on a miss."""

import json

import pytest
import torch

from mindspeed_kda.cli import checking
from mindspeed_kda.cli.main import main
from mindspeed_kda.testing.judge import SUBJECTS

SMALL = ["verify", "--device", "cpu", "--steps", "1", "--shape", "1x40x1x16x8", "--chunk", "16"]
OUTPUTS = ["dq", "dk", "dv", "db", "dg", "dA"]


def rows(capsys):
    return json.loads(capsys.readouterr().out)["rows"]


def test_all_dtypes_of_the_reference(text_file, capsys):
    assert main([*SMALL, "--text", text_file, "--backend", "torch", "--json"]) == 0
    found = rows(capsys)
    for layer in (0, 1):
        for dtype in ("fp32", "fp16", "bf16"):
            of = [r for r in found if r["input"] == f"layer {layer} BT16" and r["dtype"] == dtype]
            assert [r["output"] for r in of] == OUTPUTS
    for measure in ("rms_ratio", "rms_limit", "mixed", "mare", "mere", "rmse", "max_abs"):
        assert all(isinstance(r[measure], float) for r in found)
    rounded = [r["rms_ratio"] for r in found if r["dtype"] == "bf16" and r["output"] == "dv"]
    assert min(rounded) > 1e-4, "bf16 outputs carry bf16's rounding: the judge did not see the same numbers"


def test_table_names_limits(text_file, capsys):
    assert main([*SMALL, "--text", text_file, "--backend", "torch", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    for word in ("RMS ratio", "limit", "mixed", "MARE", "MERE", "RMSE", "max err", "all within limits"):
        assert word in out


def test_a_miss_exits_1(text_file, capsys, wrong_backend):
    assert main([*SMALL, "--text", text_file, "--dtype", "fp32"]) == 1
    out = capsys.readouterr().out
    missed = [line for line in out.splitlines() if "MISS: " in line]
    assert len(missed) == 2, "db of each layer, and nothing else"
    assert all(" db " in line and "wrong" in line for line in missed)


@pytest.mark.parametrize(
    "extra",
    [
        ["--packed", "0,17,1,16", "--state-v-first", "--state-dtype", "fp16", "--dtype", "fp16"],
        ["--chunk", "16,32", "--value-heads", "2", "--dtype", "bf16"],
        ["--op", "chunk_kda", "--packed", "0,17,1", "--dtype", "fp32"],
    ],
)
def test_other_forms_of_the_call(text_file, capsys, extra):
    assert main([*SMALL, "--text", text_file, "--backend", "torch", "--json", *extra]) == 0
    labels = {r["input"] for r in rows(capsys)}
    if "--packed" in extra:
        assert labels == {"layer 0 BT16 packed", "layer 1 BT16 packed"}
    else:
        assert labels == {f"layer {i} BT{n}" for i in (0, 1) for n in (16, 32)}


def test_backends_that_cannot_say_why(text_file, capsys):
    assert main([*SMALL, "--text", text_file, "--dtype", "fp32"]) == 0
    assert "not run: chunk_kda_bwd_wy_dqkg_fused on triton in fp32: " in capsys.readouterr().out


def test_bfloat16_is_kept_out_of_the_interpreter(text_file, capsys, monkeypatch):
    """Its bf16 products are wrong by orders of magnitude; the row says so instead of a figure."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subject = SUBJECTS["chunk_kda_bwd_wy_dqkg_fused"]
    call = subject.probe(torch.bfloat16)
    (row,) = checking.check_call(subject, "probe", call, ["triton"], torch.device("cpu"), required=False)
    assert "bfloat16" in row["reason"] or "not installed" in row["reason"]
