"""Ascend chips the gate compiles for. Sizes in bytes, as the compilers themselves state them in their output."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One ``--target`` of the compiler, which of the two compilers serves it, and the chip's on-chip memories.

    ``regbase`` marks the second generation (Ascend950): other compiler, register-based vector code, no memory JSON.
    """

    name: str
    series: str
    compiler: str
    ub: int
    l1: int
    l0c: int
    cube_cores: int
    vector_cores: int
    regbase: bool = False


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("Ascend910B3", "Atlas A2", "bishengir-compile", 192 * KIB, 512 * KIB, 128 * KIB, 20, 40),
        Target("Ascend910_9391", "Atlas A3", "bishengir-compile", 192 * KIB, 512 * KIB, 128 * KIB, 24, 48),
        Target("Ascend950PR_9589", "Ascend 950", "bishengir-compile-a5", 248 * KIB, 512 * KIB, 256 * KIB, 32, 64, True),
    )
}


def target_named(name: str) -> Target:
    """The target of that name. Raises ValueError with the list of known ones."""
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]
