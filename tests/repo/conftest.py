"""Fresh Python processes, in an environment and folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tree.py beside this file

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fresh(tmp_path: Path) -> Run:
    """``fresh(code, stubs={"module": source}, **variables)`` runs code in a new interpreter, outside the source tree.

    Stubs stand before everything else on its path. Nothing of this process's environment that steers the package or
    Triton reaches it.
    """

    def run(code: str, stubs: dict[str, str] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        stub_folder = tmp_path / "stubs"
        for name, source in (stubs or {}).items():
            (stub_folder / name).mkdir(parents=True, exist_ok=True)
            (stub_folder / name / "__init__.py").write_text(source)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MINDSPEED_KDA_", "TRITON_", "PYTHON"))}
        env |= {"PYTHONPATH": str(stub_folder), "OMP_NUM_THREADS": "1", **variables}
        work = tmp_path / "elsewhere"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", code], cwd=work, env=env, capture_output=True, text=True, timeout=300
        )

    return run
