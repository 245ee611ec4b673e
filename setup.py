"""Packages and extras. Downloads nothing and needs no GPU."""

import re
from pathlib import Path

from setuptools import find_packages, setup

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
        "mindspeed_kda.cuda_kernels": ["*.so", "**/*.cu", "**/*.cuh", "**/*.h"],
    },
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
