"""The snippets of the pages on flash-linear-attention and Transformers, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "integrations"


@pytest.mark.parametrize("page", ["flash_linear_attention.md", "transformers.md"])
def test_snippet_runs(page):
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size" in done.stdout
