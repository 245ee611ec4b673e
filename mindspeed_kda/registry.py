"""Backends and the choice between them. No op names and no mathematics here.

A backend serves one op under a name. Its predicate looks at the actual call and answers None (yes) or the reason why
not; an error inside a predicate propagates. Choosing is a function of the call, its device type and the request:
argument, then ``use_backend``, then ``MINDSPEED_KDA_BACKEND``, then the best that can. An explicit choice never falls
back.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_kda import config

ENTRY_POINT_GROUP = "mindspeed_kda.backends"
ANY_DEVICE = "*"

logger = logging.getLogger("mindspeed_kda")


@dataclass(frozen=True)
class Backend:
    """One implementation of one op.

    ``supports(call)`` answers None or a sentence with the reason. ``load()`` imports and returns the implementation; it
    is called only once ``supports`` said yes. ``priority`` maps a device type (``"npu"``, ``"cuda"``, ``"cpu"``, or
    ``"*"`` for all) to a rank for automatic choice, highest first; a device that is absent means: by name only.
    ``available()`` answers None or why this machine can never run it, without a call (for ``doctor``).
    ``repeat(*arguments)``, where there is one, serves a call whose checks and predicate would say what they said to one
    that it has served, at a fraction of their price, and answers None to any other.
    """

    op: str
    name: str
    supports: Callable[[Any], str | None]
    load: Callable[[], Any]
    available: Callable[[], str | None] = lambda: None
    priority: Mapping[str, int] = field(default_factory=dict)
    repeat: Callable[..., Any] | None = None

    def rank(self, device_type: str) -> int | None:
        return self.priority.get(device_type, self.priority.get(ANY_DEVICE))

    def why_not(self, call: Any) -> str | None:
        """The predicate's answer: None or the reason. Raises TypeError where it is neither."""
        reason = self.supports(call)
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        raise TypeError(f"backend {self.name!r}: expected supports() to return None or a reason, got {reason!r}")


class Rejection(NamedTuple):
    name: str
    reason: str


class Choice(NamedTuple):
    """The chosen backend and those that came before it in rank, each with its reason."""

    backend: Backend
    rejected: tuple[Rejection, ...]


_NONE: dict[Any, Any] = {}


class Registry:
    """Backends by op and name. Thread-safe; a snapshot is taken for each choice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: dict[str, dict[str, Backend]] = {}
        self._best: dict[tuple[str, str], Backend] = {}  # first in rank by op and device type, once it was chosen
        self._changes = 0
        self._logged: set[tuple[str, str, tuple[Rejection, ...]]] = set()
        self._entry_points_loaded = False
        self._entry_points_loading = False

    def register(self, backend: Backend, *, replace: bool = False) -> Backend:
        """Adds a backend. Raises ValueError where the name is taken for that op, unless ``replace``."""
        if not backend.name or not backend.op:
            raise ValueError(f"backend: expected a name and an op, got name={backend.name!r} op={backend.op!r}")
        with self._lock:
            of_op = self._backends.setdefault(backend.op, {})
            if backend.name in of_op and not replace:
                raise ValueError(f"backend: {backend.name!r} is already registered for {backend.op}")
            of_op[backend.name] = backend
            self._changed()
        return backend

    def unregister(self, op: str, name: str) -> None:
        with self._lock:
            self._backends.get(op, {}).pop(name, None)
            self._changed()

    def _changed(self) -> None:
        self._best.clear()
        self._changes += 1

    def ops(self) -> tuple[str, ...]:
        self._load_entry_points()
        with self._lock:
            return tuple(self._backends)

    def of(self, op: str) -> dict[str, Backend]:
        """The backends of an op by name, in order of registration."""
        self._load_entry_points()
        with self._lock:
            if op not in self._backends:
                raise KeyError(f"op: expected one of {', '.join(self._backends) or '(none)'}, got {op!r}")
            return dict(self._backends[op])

    def choose(self, op: str, call: Any, device_type: str, request: str | None = None) -> Backend:
        """The backend for this call. ``request`` is the ``backend=`` argument."""
        requested, source = _requested(request)
        if requested is None:
            best = self._best.get((op, device_type))
            if best is not None and best.why_not(call) is None:
                return best
        changes, backends = self._changes, self.of(op)
        choice = select(backends, op, call, device_type, requested, source)
        if requested is None and not choice.rejected:
            with self._lock:
                if self._changes == changes:  # nobody registered another one meanwhile
                    self._best[op, device_type] = choice.backend
        if choice.rejected:
            self._log_once(op, choice)
        return choice.backend

    def repeat(self, op: str, device_type: str, request: str | None = None) -> Callable[..., Any] | None:
        """``Backend.repeat`` of the backend that ``choose`` would ask first; None: check, and choose."""
        requested = current_request(request)
        if requested is None:
            backend = self._best.get((op, device_type))
        else:
            backend = self._backends.get(op, _NONE).get(requested)
        return None if backend is None else backend.repeat

    def _log_once(self, op: str, choice: Choice) -> None:
        key = (op, choice.backend.name, choice.rejected)
        with self._lock:
            if key in self._logged:
                return
            self._logged.add(key)
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in choice.rejected)
        logger.warning("%s runs on backend %r because %s", op, choice.backend.name, reasons)

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        with self._lock:
            if self._entry_points_loaded or self._entry_points_loading:  # loading: a plug-in asks the registry itself
                return
            self._entry_points_loading = True
            for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
                try:
                    point.load()(self)
                except Exception as error:  # a broken plug-in must not take the package down, nor pass unseen
                    logger.warning("backend plug-in %r was not loaded: %s: %s", point.name, type(error).__name__, error)
            self._entry_points_loaded = True


_context: ContextVar[str | None] = ContextVar("mindspeed_kda_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls that name no backend use this one, and fail where it cannot serve them."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"use_backend: expected the name of a backend, got {name!r}")
    token = _context.set(name)
    try:
        yield
    finally:
        _context.reset(token)


def current_request(argument: str | None) -> str | None:
    """The backend asked for by argument, ``use_backend`` or the environment; None: whichever is best."""
    return _requested(argument)[0]


def _requested(argument: str | None) -> tuple[str | None, str]:
    if argument is not None:
        if not isinstance(argument, str):
            raise TypeError(f"backend: expected the name of a backend or None, got {argument!r}")
        return argument, "backend="
    inside = _context.get()
    if inside is not None:
        return inside, "use_backend"
    return (config.BACKEND.read() or None) if config.BACKEND.given() else None, config.BACKEND.name


def select(
    backends: Mapping[str, Backend],
    op: str,
    call: Any,
    device_type: str,
    requested: str | None,
    source: str = "backend=",
) -> Choice:
    """Pure choice. Raises ValueError for an unknown name, RuntimeError with the reasons where nothing can run."""
    if requested is not None:
        backend = backends.get(requested)
        if backend is None:
            raise ValueError(f"{source.rstrip('=')}: expected one of {', '.join(backends)} for {op}, got {requested!r}")
        reason = backend.why_not(call)
        if reason is not None:
            raise RuntimeError(f"{op}: backend {requested!r} (asked for by {source}) cannot run this call: {reason}")
        return Choice(backend, ())
    ranked = sorted(
        (b for b in backends.values() if b.rank(device_type) is not None), key=lambda b: -(b.rank(device_type) or 0)
    )
    rejected: list[Rejection] = []
    for backend in ranked:
        reason = backend.why_not(call)
        if reason is None:
            return Choice(backend, tuple(rejected))
        rejected.append(Rejection(backend.name, reason))
    reasons = "; ".join(f"{r.name}: {r.reason}" for r in rejected) or f"none serves device type {device_type!r}"
    raise RuntimeError(f"{op}: no backend can run this call: {reasons}")


REGISTRY = Registry()
register_backend = REGISTRY.register
