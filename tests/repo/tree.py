"""What the repository tests read: the tree's own files, tracked or about to be."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("mindspeed_kda", "npu_kernels", "cuda_kernels")
"""Folders that are installed."""


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file of the tree that git does not ignore, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return tuple(sorted(Path(f) for f in listed.split("\0") if f and (ROOT / f).is_file()))


def python_files(*folders: str) -> list[Path]:
    """The Python files under these folders (all without)."""
    return [f for f in files() if f.suffix == ".py" and (not folders or f.parts[0] in folders)]


def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(text(path), filename=str(path))


def walk(path: Path) -> Iterator[ast.AST]:
    return ast.walk(syntax(path))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
