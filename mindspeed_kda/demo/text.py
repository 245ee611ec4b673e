"""Real text as bytes: Python's own documentation, or a file."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1
"""The share of the text, at its end, that is never trained on."""


@dataclass(frozen=True)
class Text:
    """Bytes as int64 token numbers, cut into a part to train on and the held-out end; ``source`` says where from."""

    train: Tensor
    held_out: Tensor
    source: str

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)


def python_documentation() -> str:
    """The language reference that every CPython ships for ``help()``, in its own order, heading rules taken out.

    Raises ModuleNotFoundError on the rare builds that leave it out.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    plain = re.sub(r"^[*=~^-]{4,}\n", "", "\n\n".join(topics[name] for name in sorted(topics)), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", plain)


def load(path: str | None, shortest: int) -> Text:
    """The text of a file, or of Python's documentation where ``path`` is None.

    Raises OSError where the file cannot be read and ValueError where it has fewer than ``shortest`` bytes.
    """
    if path is None:
        raw, source = python_documentation().encode(), "pydoc_data.topics"
    else:
        raw, source = Path(path).read_bytes(), path
    if len(raw) < shortest:
        raise ValueError(f"expected at least {shortest} bytes, got {len(raw)}")
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    return Text(tokens[:cut], tokens[cut:], source)


def bigram_entropy(tokens: Tensor) -> float:
    """Nats a byte that the best guess from the previous byte alone leaves, counted on these very bytes."""
    pairs = torch.bincount(tokens[:-1] * 256 + tokens[1:], minlength=65536).view(256, 256).double()
    rows = pairs.sum(1, keepdim=True).expand_as(pairs)
    seen = pairs > 0
    return float(-(pairs[seen] * (pairs[seen] / rows[seen]).log()).sum() / pairs.sum()) if len(tokens) > 1 else math.nan


def batch(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows [rows, length] and the bytes that follow each of theirs."""
    starts = torch.randint(0, len(tokens) - length, (rows, 1), generator=generator)
    window = tokens[starts + torch.arange(length + 1)]
    return window[:, :-1], window[:, 1:]
