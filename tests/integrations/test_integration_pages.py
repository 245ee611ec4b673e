"""The snippets of the integration pages run: here those that need no other package; trainers/ runs the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mindspeed_stub
import pytest

from mindspeed_kda.integrations import mindspeed

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize(("page", "count"), [("integrations.md", 1), ("integrations/mindspeed.md", 2)])
def test_snippets_run(page, count, monkeypatch, capsys):
    mindspeed_stub.install(monkeypatch)
    codes = snippets(page)
    assert len(codes) == count
    for code in codes:
        exec(compile(code, page, "exec"), {})
    assert "torch.Size" in capsys.readouterr().out
    assert not any(m.split(".")[0] == "mindspeed_ops" for m in sys.modules)


def test_the_flags_of_the_page_are_the_features():
    page = (DOCS / "integrations/mindspeed.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(--[\w-]+)", page)) == {mindspeed.FLAG, mindspeed.BACKEND_FLAG}
