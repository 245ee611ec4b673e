"""A wheel and an sdist that install in a clean environment and work outside the source tree; what they declare."""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tree import ROOT, files


def run(*command, cwd, **env):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MINDSPEED_KDA_", "PYTHON"))}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_tree(target):
    """What git does not ignore, so that no build product comes along."""
    for f in files():
        (target / f).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / f, target / f)


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """sdist of a copy of the tree, and the wheel built from that sdist: what is missing in the one is in neither."""
    copy, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    copy_tree(copy)
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy,
        cwd=out, MINDSPEED_KDA_BUILD_CUDA="0",
    )  # fmt: skip
    return out


@pytest.fixture(scope="session")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as z:
        (name,) = [n for n in z.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(z.read(name))


def requirements(metadata, extra=None, **environment):
    """Requirements of an extra (of the core without), as they apply in this environment."""
    base = {"python_version": "3.11", "platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux"}
    chosen = {}
    for line in metadata.get_all("Requires-Dist"):
        r = Requirement(line)
        here = {**base, **environment}
        core = r.marker is None or r.marker.evaluate({**here, "extra": ""})
        if (extra is None and core) or (extra is not None and not core and r.marker.evaluate({**here, "extra": extra})):
            chosen[r.name] = r.specifier
    return chosen


def test_one_wheel_for_every_machine(wheel):
    """No native library inside, so no platform tag: aarch64 hosts take the same file."""
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.partition("/")[0] for n in names}
    assert tops == {"mindspeed_kda", next(t for t in tops if t.endswith(".dist-info"))}
    package = {n for n in names if n.startswith("mindspeed_kda/")}
    source = {
        str(f) if f.parts[0] == "mindspeed_kda" else f"mindspeed_kda/{f}"
        for f in files()
        if f.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")
        and f.parts[0] in ("mindspeed_kda", "npu_kernels", "cuda_kernels")
    }
    assert source - package == set()
    assert "mindspeed_kda/py.typed" in package
    assert not [n for n in names if n.endswith((".so", ".pyc"))]


def test_sdist_holds_what_a_build_needs(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as t:
        names = {n.partition("/")[2] for n in t.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "mindspeed_kda/config.py"} <= names


@pytest.mark.parametrize("build", ["", "0"])
def test_a_library_built_before_is_taken_along_in_a_wheel_of_its_platform(tmp_path, build):
    """Unless it was declined: a wheel for every machine holds none."""
    copy = tmp_path / "tree"
    copy_tree(copy)
    (copy / "cuda_kernels/libmindspeed_kda_cuda.so").write_bytes(b"built before")
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, copy,
        cwd=tmp_path, MINDSPEED_KDA_BUILD_CUDA=build,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    libraries = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".so")]
    if build == "0":
        assert wheel.name.endswith("-py3-none-any.whl")
        assert libraries == []
    else:
        assert wheel.name.endswith(f"_{platform.machine()}.whl")
        assert "-py3-none-" in wheel.name
        assert libraries == ["mindspeed_kda/cuda_kernels/libmindspeed_kda_cuda.so"]


def test_metadata(metadata):
    import mindspeed_kda

    assert metadata["Name"] == "mindspeed_kda"
    assert metadata["Version"] == mindspeed_kda.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(">=3.10")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert set(metadata.get_all("Provides-Extra")) == {"npu", "cuda", "ascend-check", "cli", "test", "dev"}


def test_the_core_needs_torch_and_numpy_alone(metadata):
    assert set(requirements(metadata)) == {"torch", "numpy"}
    assert Version("2.7.0") in requirements(metadata)["torch"]
    assert Version("2.6.0") not in requirements(metadata)["torch"]


def test_extras_are_the_same_on_aarch64(metadata):
    for extra in metadata.get_all("Provides-Extra"):
        assert requirements(metadata, extra) == requirements(metadata, extra, platform_machine="aarch64"), extra


def test_npu_pins_the_one_stack_that_works_together(metadata):
    npu = requirements(metadata, "npu")
    assert {n: str(npu[n]) for n in ("torch", "torch-npu", "triton-ascend")} == {
        "torch": "==2.7.1",
        "torch-npu": "==2.7.1",
        "triton-ascend": "==3.2.0",
    }


@pytest.mark.parametrize("extra", ["npu", "ascend-check"])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.14"])
def test_on_a_newer_python_an_extra_fails_aloud(metadata, extra, python):
    """The pins stand on every Python: where no wheel exists (3.12 on), the resolver says so and installs nothing."""
    assert requirements(metadata, extra, python_version=python) == requirements(metadata, extra)
    assert "triton-ascend" in requirements(metadata, extra, python_version=python)


def test_npu_and_cuda_exclude_each_other(metadata):
    """No torch satisfies both, so every resolver refuses the pair."""
    npu, cuda = requirements(metadata, "npu")["torch"], requirements(metadata, "cuda")["torch"]
    releases = [Version(f"2.{minor}.{patch}") for minor in range(5, 40) for patch in range(3)]
    assert [v for v in releases if v in npu] == [Version("2.7.1")]
    assert [v for v in releases if v in cuda]
    assert not [v for v in releases if v in npu and v in cuda]


def test_extras_hold_what_they_are_for(metadata):
    assert "triton" in requirements(metadata, "cuda")
    assert {"triton-ascend", "ascendnpu-ir", "pybind11", "pyyaml", "scipy"} <= set(
        requirements(metadata, "ascend-check")
    )
    assert set(requirements(metadata, "cli")) == {"matplotlib", "rich"}
    assert {"pytest", "hypothesis"} <= set(requirements(metadata, "test"))
    assert {"ruff", "mypy", "build"} <= set(requirements(metadata, "dev"))


SMOKE = """
import json, sys, torch, mindspeed_kda
from mindspeed_kda.testing.inputs import to_float64, wy_inputs
assert "site-packages" in mindspeed_kda.__file__, mindspeed_kda.__file__
kwargs = wy_inputs(T=40, K=8, V=8, BT=16)
a, b = (mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**x) for x in (kwargs, to_float64(kwargs)))
for x, y in zip(a, b):
    assert ((x - y).square().mean() / y.square().mean()).sqrt() < 1e-5
import mindspeed_kda.npu_kernels.tiling, mindspeed_kda.cuda_kernels
print(json.dumps(mindspeed_kda.__version__))
"""


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The wheel in an environment of its own; torch and the rest are lent from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    lent = {str(Path(importlib.util.find_spec(m).origin).parents[1]) for m in ("torch", "numpy", "sympy")}
    # A .pth names folders only: .pth files inside them, an editable install's for one, are not read.
    (site / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    run(
        sys.executable, "-m", "pip", "--python", python,
        "install", "--no-deps", "--no-index", "--ignore-installed", wheel,
        cwd=folder,
    )  # fmt: skip
    return folder, python


def test_installed_wheel_passes_doctor_and_a_smoke_test(installed):
    folder, python = installed
    assert run(python, "-c", SMOKE, cwd=folder).strip() == f'"{importlib.metadata.version("mindspeed_kda")}"'
    assert "torch" in run(python, "-m", "mindspeed_kda", "doctor", cwd=folder)
    assert "doctor" in run(python.parent / "mindspeed-kda", "--help", cwd=folder)


def test_setup_downloads_nothing_and_asks_no_gpu():
    source = (ROOT / "setup.py").read_text()
    for word in ("urllib", "requests", "nvidia-smi", "torch.cuda", "import torch", "git "):
        assert word not in source, word
