"""Small text, and no change of this process's environment by a command."""

import pytest

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY, Backend


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    """On a CPU, demo and verify turn Triton's interpreter on for their own process; here that process is pytest."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; the dog sleeps on. " * 120)
    return str(path)


@pytest.fixture
def wrong_backend():
    """A backend of the op whose db is off by a hundredth."""
    right = REGISTRY.of(wy_dqkg.OP)["torch"].load()

    def run(call):
        out = right(call)
        return out._replace(db=out.db * 1.01)

    REGISTRY.register(Backend(wy_dqkg.OP, "wrong", supports=lambda call: None, load=lambda: run))
    yield "wrong"
    REGISTRY.unregister(wy_dqkg.OP, "wrong")
