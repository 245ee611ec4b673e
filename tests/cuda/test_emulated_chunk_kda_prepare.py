"""The chunk table and the parallel stage before the scans of the native training step, run on this processor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_kda.contracts import chunk_kda
from mindspeed_kda.testing.kda_inputs import kda_inputs

KERNELS = Path(__file__).resolve().parents[2] / "cuda_kernels"


def load(path):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load(KERNELS / "build.py")
emulated = load(KERNELS / "emulator/emulated.py")


def built(out, **how):
    try:
        return emulated.Emulated(build.build_emulator(out, **how))
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return built(tmp_path_factory.mktemp("emulated") / "kernels.so", sources=SOURCES)


SOURCES = ("chunk_kda/plan.cu",)


def call_of(lengths=None, B=1, T=64, cu_dtype=torch.int32):
    inputs = kda_inputs(B=B, T=T if lengths is None else sum(lengths) + 2, H=1, K=64, V=64, dtype=torch.float16,
                        lengths=lengths)  # fmt: skip
    arguments = dict(inputs.arguments)
    if lengths is not None:
        arguments["cu_seqlens"] = arguments["cu_seqlens"].to(cu_dtype)
    return chunk_kda.check(**arguments)


def expected_chunks(call):
    """[(first row, rows, sequence)], and the number of chunks before each sequence and in all."""
    bounds = (
        [(n * call.T, (n + 1) * call.T) for n in range(call.B)]
        if call.cu_seqlens is None
        else list(zip(call.cu_seqlens.tolist()[:-1], call.cu_seqlens.tolist()[1:], strict=True))
    )
    chunks, first = [], []
    for n, (start, end) in enumerate(bounds):
        first.append(len(chunks))
        chunks += [(row, min(64, end - row), n) for row in range(start, end, 64)]
    return chunks, [*first, len(chunks)]


@pytest.mark.parametrize(
    ("lengths", "B", "T"),
    [(None, 3, 130), (None, 1, 1), (None, 5, 64), ([0, 65, 0, 0, 1, 64, 200, 0], 1, 0), ([0, 0], 1, 0),
     ([(37 * i) % 130 for i in range(300)], 1, 0)],
    ids=("dense", "one token", "whole chunks", "packed", "all empty", "300 sequences"),
)  # fmt: skip
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_the_table_of_chunks(kernels, lengths, B, T, cu_dtype):
    call = call_of(lengths, B, T, cu_dtype)
    chunks, first = expected_chunks(call)
    for schedule in (emulated.FORWARD, emulated.REVERSE):
        got = kernels.chunk_kda(["plan"], call, {}, schedule)
        assert got["first_chunk"].tolist() == first
        table = [(row, both & 0xFFFFFFFF, both >> 32) for row, both in got["chunks"].tolist()]
        assert table[: len(chunks)] == chunks
        assert all(rows == 0 for _, rows, _ in table[len(chunks) :])
