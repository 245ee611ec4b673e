"""The native library's build and backend without a GPU: what is found, what is refused, how ptxas reports are read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sources import ROOT, build, load

from mindspeed_kda import config
from mindspeed_kda.backends import cuda_backend
from mindspeed_kda.contracts import chunk_kda, wy_dqkg
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.kda_inputs import kda_inputs

report = load(ROOT / "ci/nvcc_report.py")

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3kda14wy_dqkg_kernelI6__halffLi128ELi128ELb1EEEvNS_8WyParamsE' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda14wy_dqkg_kernelI6__halffLi128ELi128ELb1EEEvNS_8WyParamsE
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Compile time = 3.1 ms
"""


@pytest.mark.parametrize(("figures", "clean"), [((0, 0, 0), True), ((8, 0, 0), False), ((8, 4, 4), False)])
def test_a_report_is_read_and_spills_show(figures, clean):
    (kernel,) = report.parse(PTXAS.format(stack=figures[0], stores=figures[1], loads=figures[2]))
    assert (kernel.target, kernel.registers, kernel.stack, kernel.spill_stores, kernel.spill_loads) == (
        "sm_90a", 128, *figures,
    )  # fmt: skip
    assert kernel.clean is clean
    assert report.readable(kernel.name) == "wy_dqkg_kernel<half, float, 128, 128, 1>"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("_ZN3kda56_GLOBAL__N__0a1b_7_tail_cu_9f_15kda_tail_kernelENS0_4TailE", "kda_tail_kernel"),
        ("_ZN3kda17kda_grads_kernelI13__nv_bfloat16Li128ELb1EEEvNS_9KdaParamsE", "kda_grads_kernel<bf16, 128, 1>"),
    ],
)
def test_a_kernel_is_named_without_its_mangling(name, shown):
    assert report.readable(name) == shown


def test_a_report_without_figures_is_an_error():
    text = PTXAS.format(stack=0, stores=0, loads=0)
    for cut in ("Used 128", "bytes stack frame"):
        broken = "\n".join(line for line in text.splitlines() if cut not in line)
        with pytest.raises(ValueError, match=r"no (figures|stack)"):
            report.parse(broken)
    assert report.parse("nothing to see") == []


def test_building_imports_no_torch_and_asks_for_no_gpu():
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(ROOT / 'cuda_kernels/build.py')!r})\n"
        "m = importlib.util.module_from_spec(spec); sys.modules['b'] = m; spec.loader.exec_module(m)\n"
        "print(m.find_torch_headers()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "torch/csrc/stable/library.h").is_file()


def test_headers_of_an_older_torch_are_refused(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    monkeypatch.setattr(build, "find_package", lambda name: [tmp_path])
    with pytest.raises(build.UnavailableError, match=r"expected torch >= 2\.10, got 2\.9\.1\+cpu"):
        build.find_torch_headers()
    monkeypatch.setattr(build, "find_package", lambda name: [])
    with pytest.raises(build.UnavailableError, match="torch is not installed"):
        build.find_torch_headers()


def test_the_toolkit_of_cuda_home_comes_first(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_toolkit() == (nvcc, "CUDA_HOME")


def test_every_source_of_the_library_is_compiled():
    sources = {str(p.relative_to(ROOT / "cuda_kernels")) for p in (ROOT / "cuda_kernels").rglob("*.c[up]*")}
    sources = {s for s in sources if s.endswith((".cu", ".cpp"))}
    assert sources == {*build.KERNEL_SOURCES, *build.BIND_SOURCES, *build.EMULATOR_SOURCES}


def test_inline_assembly_stands_where_the_emulator_replaces_it():
    files = [p for p in (ROOT / "cuda_kernels").rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp")]
    assert [p.name for p in files if re.search(r"\basm\b", p.read_text(encoding="utf-8"))] == ["device.cuh"]


def test_without_a_host_compiler_or_headers_the_emulator_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.UnavailableError, match=r"g\+\+ is not on PATH"):
        build.build_emulator(tmp_path / "some.so")
    monkeypatch.setattr(build.Path, "is_file", lambda self: "cuda" not in self.name)
    with pytest.raises(build.UnavailableError, match=r"cuda_fp16\.h.*pip install"):
        build.find_cuda_headers()


def test_without_the_library_the_reason_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv(config.CUDA_LIBRARY.name, str(tmp_path / "none.so"))
    reason = cuda_backend.available()
    assert "none.so" in reason
    assert config.BUILD_CUDA.name in reason


def test_an_older_torch_is_declined(monkeypatch, tmp_path):
    library = tmp_path / "some.so"
    library.touch()
    monkeypatch.setenv(config.CUDA_LIBRARY.name, str(library))
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert cuda_backend.available() == "torch: expected 2.10 or later, got 2.9.1+cu128"


@pytest.mark.parametrize(("dtype", "part"), [(torch.float64, "got float64"), (torch.float32, "got cpu")])
def test_what_the_predicate_says_about_a_call(dtype, part):
    assert part in cuda_backend.supports(wy_dqkg.check(**wy_inputs(T=16, H=1, K=8, V=8, BT=16, dtype=dtype)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "q: expected float16 or bfloat16, got float32"),
        ({"dtype": torch.float64}, "q: expected float16 or bfloat16, got float64"),
        ({}, "tensors: expected device cuda, got cpu"),
    ],
)
def test_what_the_predicate_says_about_a_training_step(options, reason):
    call = chunk_kda.check(**kda_inputs(T=16, **{"dtype": torch.float16, **options}).arguments)
    assert cuda_backend.supports_chunk_kda(call) == reason


@pytest.mark.parametrize(
    ("options", "shared", "reason"),
    [
        ({}, 1 << 20, None),
        ({"K": 128, "V": 128, "BT": 16}, 1 << 20, None),
        ({"K": 128}, 1 << 20, "q, v: expected K = V = 64 or 128, got K = 128 and V = 64"),
        ({"K": 60, "V": 60}, 1 << 20, "q, v: expected K = V = 64 or 128, got K = 60 and V = 60"),
        ({}, 48 << 10, "device: expected {} bytes of shared memory a block, got 49152"),
    ],
)
def test_what_it_says_on_a_gpu(monkeypatch, options, shared, reason):
    monkeypatch.setattr(cuda_backend, "_unfit", lambda q: None)
    monkeypatch.setattr(cuda_backend, "_shared_bytes", lambda index: shared)
    call = chunk_kda.check(**kda_inputs(T=16, dtype=torch.bfloat16, **options).arguments)
    expected = None if reason is None else reason.format(cuda_backend.KDA_SHARED_BYTES[64])
    assert cuda_backend.supports_chunk_kda(call) == expected


def test_too_many_chunks_for_one_launch_are_declined(monkeypatch):
    monkeypatch.setattr(cuda_backend, "_unfit", lambda q: None)
    call = chunk_kda.check(**kda_inputs(T=16, dtype=torch.bfloat16).arguments)
    call.T = 2**38
    assert "v: expected chunks of 64 tokens times HV up to 2147483647, got T = " in cuda_backend.supports_chunk_kda(
        call
    )
