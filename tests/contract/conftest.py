"""A backend that only counts its calls, so that a test can tell whether anything ran."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY, Backend


class Spy:
    """Counts calls and keeps the last one; answers with empty outputs of the contract."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: wy_dqkg.WyDqkgCall | None = None

    def __call__(self, call: wy_dqkg.WyDqkgCall) -> wy_dqkg.WyDqkgGrads:
        self.calls += 1
        self.last = call
        return wy_dqkg.empty_outputs(call)


@pytest.fixture
def spy() -> Iterator[Spy]:
    """Registered as backend ``spy`` for the test; by name only."""
    it = Spy()
    REGISTRY.register(Backend(wy_dqkg.OP, "spy", supports=lambda call: None, load=lambda: it))
    yield it
    REGISTRY.unregister(wy_dqkg.OP, "spy")
