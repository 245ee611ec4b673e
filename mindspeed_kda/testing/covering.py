"""Covering sets: few cases in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases, each one value per axis, that hold every pair of values of every two axes; the same on every run.

    Greedy: each case starts from an uncovered pair and takes for every other axis the value that covers most pairs left
    (ties go to the value used least). The size is near the product of the two longest axes.
    """
    names = list(axes)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    used = {(name, i): 0 for name in names for i in range(len(axes[name]))}
    cases = []
    while left:
        first, second = min(left, key=lambda pair: (names.index(pair[0][0]), names.index(pair[1][0]), pair))
        chosen = dict((first, second))
        for name in sorted((n for n in names if n not in chosen), key=lambda n: -len(axes[n])):

            def gain(i: int, name: str = name, chosen: dict[str, int] = chosen) -> tuple[int, int, int]:
                return (sum(_pair(names, name, i, o, j) in left for o, j in chosen.items()), -used[name, i], -i)

            chosen[name] = max(range(len(axes[name])), key=gain)
        for (a, i), (b, j) in itertools.combinations(chosen.items(), 2):
            left.discard(_pair(names, a, i, b, j))
        for name, i in chosen.items():
            used[name, i] += 1
        cases.append({name: axes[name][chosen[name]] for name in names})
    return cases


def _pair(names: list[str], a: str, i: int, b: str, j: int) -> tuple[tuple[str, int], tuple[str, int]]:
    return ((a, i), (b, j)) if names.index(a) < names.index(b) else ((b, j), (a, i))
