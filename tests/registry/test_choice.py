"""Choosing a backend, on made-up backends and a made-up op: no tensors, no devices."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from mindspeed_kda.registry import ANY_DEVICE, Backend, Registry, select, use_backend

OP = "an_op"
CALL = object()


def backend(name, reason=None, *, asked=None, **priority):
    """A backend that answers ``reason``; ``asked`` collects the calls its predicate saw."""

    def supports(call):
        if asked is not None:
            asked.append((name, call))
        return reason

    return Backend(
        OP, name, supports, load=lambda: name, priority={k.replace("any", ANY_DEVICE): v for k, v in priority.items()}
    )


def registry(*backends):
    r = Registry()
    for b in backends:
        r.register(b)
    return r


@pytest.fixture
def three():
    """The ranks of the built-in backends."""
    return registry(backend("triton", npu=100, cuda=50), backend("cuda", cuda=100), backend("torch", any=0))


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch):
    monkeypatch.delenv("MINDSPEED_KDA_BACKEND", raising=False)


class TestFourWays:
    def test_automatic(self, three):
        for device, name in {"npu": "triton", "cuda": "cuda", "cpu": "torch", "xpu": "torch", "meta": "torch"}.items():
            assert three.choose(OP, CALL, device).name == name, device

    def test_environment_over_automatic(self, three, monkeypatch):
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "torch")
        assert three.choose(OP, CALL, "npu").name == "torch"

    def test_an_empty_variable_is_unset(self, three, monkeypatch):
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "")
        assert three.choose(OP, CALL, "npu").name == "triton"

    def test_context_over_environment(self, three, monkeypatch):
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "torch")
        with use_backend("triton"):
            assert three.choose(OP, CALL, "cuda").name == "triton"
        assert three.choose(OP, CALL, "cuda").name == "torch"

    def test_argument_over_context(self, three, monkeypatch):
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "torch")
        with use_backend("triton"):
            assert three.choose(OP, CALL, "cpu", "cuda").name == "cuda"

    def test_by_name_a_device_without_a_rank_is_served(self, three):
        """No priority for a device means: not automatically. The predicate alone decides about a request."""
        assert three.choose(OP, CALL, "cpu", "triton").name == "triton"


class TestUnknownNames:
    @pytest.mark.parametrize("source", ["argument", "context", "environment"])
    def test_each_way_says_where_the_name_came_from(self, three, monkeypatch, source):
        word = {"argument": "backend", "context": "use_backend", "environment": "MINDSPEED_KDA_BACKEND"}[source]
        text = f"^{word}: expected one of triton, cuda, torch for an_op, got 'tpu'$"
        if source == "environment":
            monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "tpu")
        with use_backend("tpu" if source == "context" else "torch"):
            if source == "environment":
                pass
            elif source == "context":
                with pytest.raises(ValueError, match=text):
                    three.choose(OP, CALL, "cpu")
            else:
                with pytest.raises(ValueError, match=text):
                    three.choose(OP, CALL, "cpu", "tpu")
        if source == "environment":
            with pytest.raises(ValueError, match=text):
                three.choose(OP, CALL, "cpu")

    def test_unknown_op(self, three):
        with pytest.raises(KeyError, match="op: expected one of an_op, got 'other'"):
            three.choose("other", CALL, "cpu")

    @pytest.mark.parametrize("name", ["", None, 3], ids=repr)
    def test_use_backend_wants_a_name(self, name):
        with (
            pytest.raises(TypeError, match=f"^use_backend: expected the name of a backend, got {name!r}$"),
            use_backend(name),
        ):
            pass

    def test_an_empty_argument_is_a_name_that_does_not_exist(self, three):
        with pytest.raises(ValueError, match=r"^backend: expected one of .*, got ''$"):
            three.choose(OP, CALL, "cpu", "")


class TestExplicitNeverFallsBack:
    REASON = "K: expected at most 128, got 256"

    @pytest.fixture
    def unfit(self):
        return registry(backend("cuda", self.REASON, cuda=100), backend("torch", any=0))

    @pytest.mark.parametrize("way", ["backend=", "use_backend", "MINDSPEED_KDA_BACKEND"])
    def test_runtime_error_with_the_reason(self, unfit, monkeypatch, way, caplog):
        text = f"^an_op: backend 'cuda' \\(asked for by {way}\\) cannot run this call: {self.REASON}$"
        if way == "MINDSPEED_KDA_BACKEND":
            monkeypatch.setenv(way, "cuda")
        if way == "use_backend":
            with use_backend("cuda"), pytest.raises(RuntimeError, match=text):
                unfit.choose(OP, CALL, "cuda")
        else:
            with pytest.raises(RuntimeError, match=text):
                unfit.choose(OP, CALL, "cuda", "cuda" if way == "backend=" else None)
        assert not caplog.records

    def test_only_the_one_asked_for_is_asked(self):
        asked = []
        r = registry(backend("a", asked=asked, cpu=9), backend("b", asked=asked, cpu=1))
        r.choose(OP, CALL, "cpu", "b")
        assert asked == [("b", CALL)]


class TestAutomatic:
    def test_walks_by_rank_and_stops_at_the_first_yes(self):
        asked = []
        r = registry(
            backend("last", asked=asked, any=0),
            backend("second", asked=asked, cpu=5),
            backend("first", "no compiler", asked=asked, cpu=9),
            backend("elsewhere", asked=asked, npu=100),
        )
        assert r.choose(OP, CALL, "cpu").name == "second"
        assert asked == [("first", CALL), ("second", CALL)]

    def test_equal_ranks_keep_the_order_of_registration(self):
        assert registry(backend("b", cpu=1), backend("a", cpu=1)).choose(OP, CALL, "cpu").name == "b"

    def test_a_devices_own_rank_beats_the_one_for_all(self):
        r = registry(backend("general", any=50), backend("both", any=99, npu=1))
        assert r.choose(OP, CALL, "npu").name == "general"
        assert r.choose(OP, CALL, "cpu").name == "both"

    def test_nothing_can(self):
        r = registry(backend("a", "A: expected 1, got 2", cpu=2), backend("b", "B: expected 3, got 4", cpu=1))
        text = "an_op: no backend can run this call: a: A: expected 1, got 2; b: B: expected 3, got 4"
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            r.choose(OP, CALL, "cpu")
        with pytest.raises(RuntimeError, match=r"^an_op: no backend can run this call: none serves device type 'npu'$"):
            r.choose(OP, CALL, "npu")

    def test_choosing_is_pure(self, three):
        """The same answer whatever was chosen before; nothing is kept between calls."""
        backends = three.of(OP)
        want = {d: select(backends, OP, CALL, d, None).backend.name for d in ("npu", "cuda", "cpu")}
        for device in ("cuda", "cpu", "npu", "cuda"):
            assert select(backends, OP, CALL, device, None).backend.name == want[device]

    def test_a_remembered_choice_follows_what_changes(self):
        """The registry keeps the first in rank at hand; registering, removing and another answer all count."""
        answers = {"best": None}
        r = registry(
            backend("torch", any=0),
            Backend(OP, "best", lambda call: answers["best"], load=lambda: None, priority={"cpu": 5}),
        )
        assert [r.choose(OP, CALL, "cpu").name for _ in range(2)] == ["best", "best"]
        answers["best"] = "not any more"
        assert r.choose(OP, CALL, "cpu").name == "torch"
        answers["best"] = None
        assert r.choose(OP, CALL, "cpu").name == "best"
        r.register(backend("better", cpu=9))
        assert r.choose(OP, CALL, "cpu").name == "better"
        r.unregister(OP, "better")
        r.unregister(OP, "best")
        assert r.choose(OP, CALL, "cpu").name == "torch"

    def test_a_backend_registered_during_a_choice_is_not_missed_later(self):
        r = Registry()

        def slow(call):
            if "better" not in r.of(OP):
                r.register(backend("better", cpu=9))  # as another thread would, between the look and the answer

        r.register(Backend(OP, "first", slow, load=lambda: None, priority={"cpu": 5}))
        assert [r.choose(OP, CALL, "cpu").name for _ in range(3)] == ["first", "better", "better"]


class TestPredicates:
    def test_an_error_inside_propagates(self):
        def broken(call):
            raise ZeroDivisionError("a fault of the predicate")

        r = registry(Backend(OP, "broken", broken, load=lambda: None, priority={"cpu": 9}), backend("torch", any=0))
        with pytest.raises(ZeroDivisionError, match="a fault of the predicate"):
            r.choose(OP, CALL, "cpu")
        with pytest.raises(ZeroDivisionError):
            r.choose(OP, CALL, "cpu", "broken")

    @pytest.mark.parametrize("answer", [True, False, "", 0, ["no"]], ids=repr)
    def test_neither_none_nor_a_reason(self, answer):
        r = registry(backend("odd", answer, cpu=9), backend("torch", any=0))
        text = f"backend 'odd': expected supports() to return None or a reason, got {answer!r}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            r.choose(OP, CALL, "cpu")

    def test_load_waits_for_yes(self):
        def load():
            raise AssertionError("loaded")

        r = registry(Backend(OP, "no", lambda call: "not here", load, priority={"cpu": 9}), backend("torch", any=0))
        assert r.choose(OP, CALL, "cpu").load() == "torch"


class TestLog:
    def test_once_with_the_reason(self, caplog):
        r = registry(backend("cuda", "GPU: expected compute capability 9.0, got 8.0", cuda=9), backend("torch", any=0))
        with caplog.at_level(logging.INFO, logger="mindspeed_kda"):
            for _ in range(3):
                r.choose(OP, CALL, "cuda")
        assert [(x.name, x.levelname, x.getMessage()) for x in caplog.records] == [
            (
                "mindspeed_kda",
                "WARNING",
                "an_op runs on backend 'torch' because cuda: GPU: expected compute capability 9.0, got 8.0",
            )
        ]

    def test_another_reason_is_another_line(self, caplog):
        reasons = iter(["first", "second", "first"])
        r = registry(
            Backend(OP, "cuda", lambda call: next(reasons), load=lambda: None, priority={"cuda": 9}),
            backend("torch", any=0),
        )
        for _ in range(3):
            r.choose(OP, CALL, "cuda")
        assert [x.getMessage().rpartition(": ")[2] for x in caplog.records] == ["first", "second"]

    def test_silent_on_the_devices_first_and_on_a_request(self, three, caplog):
        three.choose(OP, CALL, "cuda")
        three.choose(OP, CALL, "cpu", "triton")
        assert not caplog.records


class TestRegistering:
    def test_a_taken_name(self, three):
        with pytest.raises(ValueError, match=r"^backend: 'torch' is already registered for an_op$"):
            three.register(backend("torch"))
        mine = backend("torch", any=0)
        assert three.register(mine, replace=True) is mine
        assert three.choose(OP, CALL, "cpu") is mine

    @pytest.mark.parametrize(("op", "name"), [("", "x"), ("x", "")])
    def test_no_name(self, op, name):
        with pytest.raises(ValueError, match=r"^backend: expected a name and an op, got "):
            Registry().register(Backend(op, name, lambda call: None, lambda: None))

    def test_unregister(self, three):
        three.unregister(OP, "cuda")
        three.unregister(OP, "never was")
        assert three.choose(OP, CALL, "cuda").name == "triton"

    def test_of_is_a_copy(self, three):
        three.of(OP).clear()
        assert list(three.of(OP)) == ["triton", "cuda", "torch"]
        assert three.ops() == (OP,)


class TestUseBackend:
    def test_nests_and_restores(self, three):
        with use_backend("torch"):
            with use_backend("triton"):
                assert three.choose(OP, CALL, "cpu").name == "triton"
            assert three.choose(OP, CALL, "npu").name == "torch"
        assert three.choose(OP, CALL, "npu").name == "triton"

    def test_restores_after_an_exception(self, three):
        with pytest.raises(KeyError), use_backend("torch"):
            raise KeyError
        assert three.choose(OP, CALL, "npu").name == "triton"

    def test_decorates_a_function(self, three):
        @use_backend("torch")
        def choose():
            return three.choose(OP, CALL, "npu").name

        assert (choose(), choose()) == ("torch", "torch")
        assert three.choose(OP, CALL, "npu").name == "triton"

    def test_is_of_one_thread(self, three):
        seen = []
        with use_backend("torch"):
            thread = threading.Thread(target=lambda: seen.append(three.choose(OP, CALL, "npu").name))
            thread.start()
            thread.join()
        assert seen == ["triton"]


def test_threads_do_not_disturb_each_other():
    """Choices, registrations and a first log line from many threads at once: right answers, one line."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("mindspeed_kda")
    r = registry(backend("fast", "not today", cpu=9), backend("torch", any=0), backend("other"))
    start, wrong = threading.Barrier(8), []

    def work(i):
        start.wait()
        for n in range(200):
            if i % 2:
                if r.choose(OP, CALL, "cpu").name != "torch":
                    wrong.append(i)
            else:
                with use_backend("other"):
                    if r.choose(OP, CALL, "cpu").name != "other":
                        wrong.append(i)
            r.register(backend(f"{i}-{n}"))

    logger.addHandler(handler)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        logger.removeHandler(handler)
    assert not wrong
    assert lines == ["an_op runs on backend 'torch' because fast: not today"]
    assert len(r.of(OP)) == 3 + 8 * 200


class TestRepeat:
    """``Registry.repeat``: the short way of the backend that ``choose`` would ask first."""

    def test_automatic_once_it_was_chosen(self):
        r = registry(Backend(OP, "cuda", lambda call: None, lambda: "cuda", priority={"cuda": 1}, repeat=list))
        assert r.repeat(OP, "cuda") is None
        r.choose(OP, CALL, "cuda")
        assert r.repeat(OP, "cuda") is list
        assert r.repeat(OP, "cpu") is None
        r.register(backend("better", cuda=2))
        assert r.repeat(OP, "cuda") is None
        r.choose(OP, CALL, "cuda")
        assert r.repeat(OP, "cuda") is None, "the better one has no short way"

    def test_request(self, monkeypatch):
        r = registry(
            Backend(OP, "cuda", lambda call: None, lambda: "cuda", priority={"cuda": 1}, repeat=list),
            backend("torch", any=0),
        )
        r.choose(OP, CALL, "cuda")
        assert r.repeat(OP, "cuda", "cuda") is list
        assert r.repeat(OP, "cuda", "torch") is None
        assert r.repeat(OP, "cuda", "nobody") is None
        with use_backend("torch"):
            assert r.repeat(OP, "cuda") is None
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "torch")
        assert r.repeat(OP, "cuda") is None
        monkeypatch.setenv("MINDSPEED_KDA_BACKEND", "")
        assert r.repeat(OP, "cuda") is list
