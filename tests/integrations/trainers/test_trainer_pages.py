"""The snippets of the pages on flash-linear-attention and Transformers and the lines of the README's table, each in a
process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "integrations"


@pytest.mark.parametrize("page", ["flash_linear_attention.md", "transformers.md"])
def test_snippet_runs(page):
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size" in done.stdout


@pytest.mark.parametrize("trainer", ["flash-linear-attention", "Transformers", "plain PyTorch"])
def test_line_of_the_readme_runs(trainer):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| \[{trainer}\]\(.*?\) \| `(from [^`]+)` \|$", readme, flags=re.M)
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
