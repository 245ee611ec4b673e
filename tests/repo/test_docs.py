"""What the documents say holds: links, the README's example, the environment table, the op's page."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from tree import ROOT, files, text

import mindspeed_kda
from mindspeed_kda import config
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import wy_inputs

PAGES = [f for f in files() if f.suffix == ".md"]
OP_PAGES = ["docs/chunk_kda_bwd_wy_dqkg_fused.md", "docs/zh/chunk_kda_bwd_wy_dqkg_fused.md"]


def anchors(page):
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ +(.+)$", page, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_relative_links_resolve(path):
    page = text(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / path).parent / name if name else ROOT / path
        assert file.exists(), f"{path}: {target}"
        assert file.resolve().is_relative_to(ROOT), f"{path}: {target} leaves the tree"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{path}: {target}"


def links(path):
    """Pages that a page links to, relative to the root of the tree."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text(path))
    return [((ROOT / path).parent / t).resolve().relative_to(ROOT) for t in targets]


def test_every_page_is_reached_from_the_index_which_names_none_twice():
    index = Path("docs/README.md")
    assert len(links(index)) == len(set(links(index)))
    reached, new = {index}, [index]
    while new:
        new = [p for p in {t for page in new for t in links(page)} - reached if p in PAGES]
        reached.update(new)
    assert [str(p) for p in PAGES if p.parts[0] == "docs" and p not in reached] == []


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.M | re.S)


def test_the_readmes_example_runs_and_is_ten_lines(capsys):
    (code,) = blocks(text("README.md"), "python")
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_opens_with_the_two_commands():
    page = text("README.md")
    shell = blocks(page, "sh")[0]
    assert "./ci/demo.sh" in shell
    assert "./ci/test.sh" in shell
    assert page.index("./ci/demo.sh") < page.index("```python")


def test_the_backend_of_the_contributing_page_registers():
    (code,) = blocks(text("CONTRIBUTING.md"), "python")
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), {})
        kwargs = wy_inputs(T=16, K=8, V=8, BT=16)
        assert mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**kwargs, backend="mine").dq.shape == (1, 16, 2, 8)
        with pytest.raises(RuntimeError, match="q: expected K up to 128, got 130"):
            mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**wy_inputs(T=16, K=130, V=8, BT=16), backend="mine")
    finally:
        REGISTRY.unregister(wy_dqkg.OP, "mine")


def test_the_readmes_losses_are_the_demos():
    runs = json.loads(text("benchmarks/results/demo_cpu.json"))["result"]["runs"]
    held_out = {run["zero_kda"]: f"{run['held_out']:.2f}" for run in runs}
    assert f"held-out loss {held_out[False]} nats per byte, {held_out[True]} with the KDA output zeroed" in text(
        "README.md"
    )


def test_named_scripts_and_modules_exist():
    """Every committed script that a document tells to run."""
    for path in PAGES:
        for name in re.findall(
            r"(?:\./)?((?:ci|benchmarks|tests|docs)/[\w/]+\.(?:sh|py|md|jsonl?|csv|png))\b", text(path)
        ):
            assert (ROOT / name).exists(), f"{path}: {name}"


def test_environment_table_is_that_of_config():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text("docs/environment.md"), flags=re.M)
    assert rows == [(v.name, v.meaning) for v in config.TABLE]


def test_no_variable_is_missing_from_the_table():
    variables = {v.name for v in vars(config).values() if isinstance(v, config.Variable)}
    assert variables == {v.name for v in config.TABLE}


@pytest.mark.parametrize("path", OP_PAGES)
class TestOpPage:
    def test_signature(self, path):
        """The signature on the page is the function's, parameter by parameter."""
        code = next(c for c in blocks(text(path), "python") if "def chunk_kda_bwd_wy_dqkg_fused(" in c)
        scope = {}
        exec("from __future__ import annotations\nfrom mindspeed_kda import WyDqkgGrads\n" + code, scope)
        page = inspect.signature(scope["chunk_kda_bwd_wy_dqkg_fused"])
        real = inspect.signature(mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused)
        assert [(p.name, p.kind, p.default) for p in page.parameters.values()] == [
            (p.name, p.kind, p.default) for p in real.parameters.values()
        ]

    def test_every_argument_and_output_has_a_row(self, path):
        rows = re.findall(r"^\| `?(\w+)`?", text(path), flags=re.M)
        arguments = list(inspect.signature(mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused).parameters)
        assert set(arguments) <= set(rows)
        assert set(wy_dqkg.WyDqkgGrads._fields) <= set(rows)

    def test_example_runs(self, path):
        """At a small size; the page's own is the training shape."""
        code = next(c for c in blocks(text(path), "python") if "torch.randn" in c)
        small = code.replace("1, 2048, 32, 128, 128, 64", "1, 40, 2, 8, 8, 16").replace('"npu"', '"cpu"')
        assert small != code
        scope = {}
        exec(compile(small, path, "exec"), scope)
        assert scope["dq"].shape == (1, 40, 2, 8)

    def test_stages_are_those_of_the_plan(self, path):
        stages = {f.stem for f in files() if f.parts[:2] == ("npu_kernels", "wy_dqkg")} & {
            "main", "dv2_db", "dk_dg_db", "dA_pre", "dA_post_right", "dA_post_left",
        }  # fmt: skip
        assert len(stages) == 6
        for stage in stages:
            assert f"{stage}.py" in text(path), stage
