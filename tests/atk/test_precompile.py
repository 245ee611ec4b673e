"""Kernels compiled ahead: one small case, there and back. Needs stock Triton, which ci/fla.sh has, and no GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from tests.atk import precompile, records, suite

OP = "chunk_kda_bwd_wy_dqkg_fused"
STOCK = (
    importlib.util.find_spec("triton") is not None and importlib.util.find_spec("triton.backends.nvidia") is not None
)
pytestmark = pytest.mark.skipif(not STOCK, reason="needs stock Triton, whose compiler knows NVIDIA's GPUs")


def test_what_is_compiled_here_is_found_there(tmp_path, monkeypatch):
    made, adopted, archive = tmp_path / "made", tmp_path / "adopted", tmp_path / "kernels.tar.xz"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(made))
    monkeypatch.setenv(precompile.NO_LINES, "1")
    spec = min((s for s in records.load(OP) if s["lengths"]), key=suite.cost)
    it = suite.executor(OP)
    with precompile.compiling(made) as done:
        it.run(it.build(spec, torch.device("cpu")), "precompile")
    assert len(done) == 7  # six stages and zero_tail
    assert precompile.pack(made, archive) == precompile.unpack(archive, adopted) == 7
    assert {p.name for p in adopted.iterdir()} == {p.parent.name for p in made.glob("*/*.cubin")}  # the same Triton
    for folder in adopted.iterdir():
        (group,) = folder.glob("__grp__*.json")
        paths = json.loads(group.read_text())["child_paths"]
        assert {name.split(".")[-1] for name in paths} == {"cubin", "json"}
        for name, path in paths.items():
            assert (made / folder.name / name).read_bytes() == (folder / name).read_bytes()
            assert path == str(folder / name)
