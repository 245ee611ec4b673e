"""The stages run in Triton's interpreter, in a process of its own: ``interpreter(fn, *args)`` runs fn there."""

from collections.abc import Iterator

import pytest

from mindspeed_kda.testing.interpreter import Interpreter, interpreter


@pytest.fixture(scope="session", name="interpreter")
def _interpreter() -> Iterator[Interpreter]:
    with interpreter() as it:
        yield it
