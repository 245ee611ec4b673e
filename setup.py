"""Packages and extras. Downloads nothing and needs no GPU."""

import importlib.util
import re
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ModuleNotFoundError:  # setuptools before 70.1, in an environment of the caller's
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mindspeed_kda/__init__.py").read_text(encoding="utf-8")).group(1)

# npu_kernels and cuda_kernels stand at the top of the tree and are installed inside the package, under one name only.
KERNELS = ("npu_kernels", "cuda_kernels")
packages = find_packages(include=["mindspeed_kda", "mindspeed_kda.*"])
package_dir = {"mindspeed_kda": "mindspeed_kda"}
for top in KERNELS:
    for name in [top, *(f"{top}.{p}" for p in find_packages(top))]:
        packages.append(f"mindspeed_kda.{name}")
        package_dir[f"mindspeed_kda.{name}"] = name.replace(".", "/")

# triton-ascend and ascendnpu-ir declare no dependencies; these are the ones they import.
ASCEND_UNDECLARED = ["numpy<2.4", "attrs", "decorator", "psutil", "pybind11", "pyyaml", "scipy"]
PLOT = ["matplotlib>=3.8", "rich>=13"]
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", *PLOT]


def load_build():
    """cuda_kernels/build.py by its path: nothing here is installed yet."""
    spec = importlib.util.spec_from_file_location("mindspeed_kda_cuda_build", ROOT / "cuda_kernels/build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def why_no_native_build(build):
    """None, or why this installation goes without the native library. An error where it was asked for."""
    asked = build.config().BUILD_CUDA.flag()
    if asked is False:
        return f"{build.config().BUILD_CUDA.name}=0"
    if (ROOT / "cuda_kernels" / build.LIBRARY).is_file() and asked is None:
        return None  # built before, taken along
    try:
        build.find_toolkit(), build.find_torch_headers()
    except build.UnavailableError as error:
        if asked:
            raise SystemExit(f"{build.config().BUILD_CUDA.name}=1: {error}") from None
        return str(error)
    return None


BUILD = load_build()
WHY_NOT = why_no_native_build(BUILD)


class BuildWithKernels(build_py):
    """Adds the native library to the package, or to cuda_kernels/ itself in an editable installation."""

    def run(self):
        super().run()
        if WHY_NOT is not None:
            print(f"mindspeed_kda: without the native CUDA library: {WHY_NOT}", file=sys.stderr)
            return
        folder = ROOT / "cuda_kernels" if self.editable_mode else Path(self.build_lib) / "mindspeed_kda/cuda_kernels"
        if not (folder / BUILD.LIBRARY).is_file() or BUILD.config().BUILD_CUDA.flag():
            BUILD.build(folder)


class WheelOfOnePlatform(bdist_wheel):
    """The library calls no Python, so its wheel serves every version on this platform."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if WHY_NOT is not None else ("py3", "none", platform)


class MaybeNative(Distribution):
    def has_ext_modules(self):
        return WHY_NOT is None


setup(
    name="mindspeed_kda",
    version=VERSION,
    description="Kimi Delta Attention that trains on Ascend NPUs, NVIDIA GPUs and CPUs behind one API",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["attention", "linear attention", "KDA", "Triton", "Ascend", "CUDA"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=packages,
    package_dir=package_dir,
    package_data={
        "mindspeed_kda": ["py.typed"],
        "mindspeed_kda.cuda_kernels": [
            *(["*.so"] if WHY_NOT is None else []),
            "**/*.cu",
            "**/*.cuh",
            "**/*.h",
            "**/*.cpp",
        ],
    },
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfOnePlatform},
    distclass=MaybeNative,
    python_requires=">=3.10",
    install_requires=["torch>=2.7", "numpy>=1.26"],
    extras_require={
        # The one set that works together. No Python markers: its wheels end at 3.11, and a marker would make the extra
        # install nothing, in silence, on a newer Python. Without it the resolver refuses and names the package.
        "npu": ["torch==2.7.1", "torch-npu==2.7.1", "triton-ascend==3.2.0", *ASCEND_UNDECLARED],
        "cuda": ["torch>=2.8", "triton>=3.4; platform_system=='Linux'"],
        "ascend-check": ["triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", *ASCEND_UNDECLARED],
        "cli": PLOT,
        "test": TEST,
        "dev": [*TEST, "ruff==0.17.6", "mypy==2.4.1", "build>=1.2", "setuptools>=77", "packaging>=24"],
    },
    entry_points={"console_scripts": ["mindspeed-kda=mindspeed_kda.cli.main:main"]},
)
