"""Backends of others, through the entry-point group: a made-up distribution on sys.path."""

from __future__ import annotations

import logging
import threading

import pytest

from mindspeed_kda.registry import ENTRY_POINT_GROUP, Registry

GOOD = """
from mindspeed_kda.registry import Backend

def register(registry):
    registry.register(Backend("plugged_op", "theirs", lambda call: None, lambda: "theirs", priority={"cpu": 7}))
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Installs modules with entry points: ``distribution({"module": source}, {"name": "module:function"})``."""

    def install(modules, points):
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / "made_up_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-plugin\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in points.items())
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_a_plug_in_registers_itself_at_the_first_use(distribution):
    distribution({"kda_plugin_good": GOOD}, {"theirs": "kda_plugin_good:register"})
    registry = Registry()
    assert registry.ops() == ("plugged_op",)
    assert registry.choose("plugged_op", None, "cpu").load() == "theirs"


BROKEN = {
    "import": ("raise ImportError('its own dependency is missing')", "ImportError: its own dependency is missing"),
    "library": ("raise OSError('libascendcl.so: cannot open')", "OSError: libascendcl.so: cannot open"),
    "syntax": ("def register(:", "SyntaxError: "),
    "nothing": ("", "AttributeError: "),
    "register": ("def register(registry):\n    raise RuntimeError('half way')", "RuntimeError: half way"),
    "taken": (
        f"{GOOD}\nfirst = register\n\ndef register(registry):\n    first(registry)\n    first(registry)",
        "ValueError: backend: 'theirs' is already registered for plugged_op",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plug_in_is_logged_and_leaves_the_others_working(distribution, caplog, kind):
    source, words = BROKEN[kind]
    distribution(
        {f"kda_plugin_bad_{kind}": source, f"kda_plugin_also_{kind}": GOOD.replace("plugged_op", "another_op")},
        {"broken": f"kda_plugin_bad_{kind}:register", "fine": f"kda_plugin_also_{kind}:register"},
    )
    registry = Registry()
    with caplog.at_level(logging.INFO, logger="mindspeed_kda"):
        assert "another_op" in registry.ops()
        registry.ops()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"backend plug-in 'broken' was not loaded: {words}")


def test_a_plug_in_that_is_missing_altogether(distribution, caplog):
    distribution({}, {"gone": "kda_plugin_not_there:register"})
    Registry().ops()
    (record,) = caplog.records
    assert "'gone' was not loaded: ModuleNotFoundError: No module named 'kda_plugin_not_there'" in record.getMessage()


def test_a_plug_in_may_ask_the_registry_while_it_registers(distribution):
    source = GOOD.replace("    registry.register", "    assert registry.ops() == ()\n    registry.register")
    distribution({"kda_plugin_asks": source}, {"asks": "kda_plugin_asks:register"})
    assert Registry().ops() == ("plugged_op",)


def test_threads_wait_for_plug_ins(distribution):
    """A thread that comes while another loads the plug-ins sees them too, and they load once."""
    source = GOOD.replace("def register(registry):", "import time\n\ndef register(registry):\n    time.sleep(0.2)")
    distribution({"kda_plugin_slow": source}, {"slow": "kda_plugin_slow:register"})
    registry, seen, start = Registry(), [], threading.Barrier(4)

    def work():
        start.wait()
        seen.append(registry.ops())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [("plugged_op",)] * 4
