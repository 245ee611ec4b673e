"""The build script and the emulator by their paths, as they are before anything is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "cuda_kernels"


def load(path):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load(KERNELS / "build.py")
emulated = load(KERNELS / "emulator/emulated.py")
