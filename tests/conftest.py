"""Every test runs on hostile memory: what a kernel or a plan does not write is NaN."""

from collections.abc import Iterator

import pytest

from mindspeed_kda.testing.memory import hostile_memory


@pytest.fixture(autouse=True)
def _hostile_memory() -> Iterator[None]:
    with hostile_memory():
        yield
