"""flash-linear-attention on this package: ``enable()`` and ``disable()``.

After ``enable()`` its ``chunk_kda`` and its ``chunk_kda_bwd_wy_dqkg_fused`` run here wherever this package serves the
call, through flash-linear-attention's own mechanism: a ``BaseBackend`` registered with its dispatcher, whose verifiers
decline with a reason what is not served (it then runs what it would have run, and logs the reason at level INFO). No
name of it is replaced. Works with fla-core 0.5 and 0.6, which differ in where the dispatcher lives and what it asks:

* 0.6: ``fla/backends.py`` (``BaseBackend``, ``register``); ``chunk_kda`` is an entry point of its own, the op belongs
  to the operation "kda".
* 0.5: ``fla/ops/backends/__init__.py`` (``BaseBackend``), ``fla/ops/kda/backends/__init__.py`` (``kda_registry``).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import mindspeed_kda
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY, current_request

FUNCTIONS = (kda.OP, wy_dqkg.OP)
"""What can be served, by flash-linear-attention's names, which are this package's."""
HINTS = ("cu_seqlens_cpu", "chunk_offsets")
"""Arguments that only spare flash-linear-attention work: their values follow from the others."""
PRIORITY = -10
"""flash-linear-attention asks the lowest number first; its own backends are at 0 to 5."""

_serving: frozenset[str] = frozenset()
_backend: str | None = None
_registered = False


def enable(functions: Iterable[str] = FUNCTIONS, *, backend: str | None = None) -> None:
    """From now on flash-linear-attention asks this package first. May be called again with other arguments.

    ``functions``: which of ``FUNCTIONS``. ``backend``: a backend of this package for all these calls; None chooses one
    for each call, and declines the calls that only the torch backend could run on an accelerator.

    Raises ImportError without flash-linear-attention, ValueError for an unknown name, RuntimeError where its functions
    do not take the arguments that are expected here or its dispatcher is switched off.
    """
    global _serving, _backend
    wanted = frozenset(functions)
    if unknown := sorted(wanted - set(FUNCTIONS)):
        raise ValueError(f"functions: expected some of {', '.join(FUNCTIONS)}, got {', '.join(unknown)}")
    if backend is not None:
        for name in sorted(wanted):
            if backend not in REGISTRY.of(name):
                raise ValueError(f"backend: expected one of {', '.join(REGISTRY.of(name))}, got {backend!r}")
    _register_once()
    _serving, _backend = wanted, backend


def disable() -> None:
    """flash-linear-attention runs everything itself again."""
    global _serving
    _serving = frozenset()


def serving() -> frozenset[str]:
    """The functions that are served now."""
    return _serving


def _originals() -> dict[str, Callable[..., Any]]:
    try:
        chunk = importlib.import_module("fla.ops.kda.chunk")
        chunk_bwd = importlib.import_module("fla.ops.kda.chunk_bwd")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "fla":
            raise
        raise ImportError("flash-linear-attention with KDA is not installed: pip install 'fla-core>=0.5'") from error
    return {kda.OP: chunk.chunk_kda, wy_dqkg.OP: chunk_bwd.chunk_kda_bwd_wy_dqkg_fused}


def _register_once() -> None:
    global _registered
    if _registered:
        return
    originals = _originals()
    _check_signatures(originals)
    if inspect.unwrap(originals[wy_dqkg.OP]) is originals[wy_dqkg.OP]:
        raise RuntimeError("flash-linear-attention's dispatcher is off (FLA_DISABLE_BACKEND_DISPATCH=1)")
    try:
        dispatcher = importlib.import_module("fla.backends")
    except ModuleNotFoundError:
        base = importlib.import_module("fla.ops.backends").BaseBackend
        importlib.import_module("fla.ops.kda.backends").kda_registry.register(_backend_class(base, originals)())
    else:
        adapter = _backend_class(dispatcher.BaseBackend, originals)
        dispatcher.register(originals[kda.OP])(adapter)
        dispatcher.register("kda")(adapter)
    _registered = True


def _check_signatures(originals: dict[str, Callable[..., Any]]) -> None:
    """The leading arguments, by name and order; the others are passed by name, and unknown ones declined."""
    tensors = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv")
    for name, leading in ((kda.OP, ("q", "k", "v", "g", "beta")), (wy_dqkg.OP, tensors)):
        found = tuple(inspect.signature(inspect.unwrap(originals[name])).parameters)[: len(leading)]
        if found != leading:
            raise RuntimeError(f"flash-linear-attention's {name}: expected arguments {leading}, found {found}")


def _backend_class(base: type, originals: dict[str, Callable[..., Any]]) -> type:
    """The adapter, a subclass of flash-linear-attention's ``BaseBackend``, whose interface is followed here:

    ``is_enabled()``, then ``<function>_verifier(...) -> (accepted, reason)``, then ``<function>(...)``.
    """
    signatures = {name: inspect.signature(inspect.unwrap(f)) for name, f in originals.items()}

    def arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = signatures[name].bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        return {n: value for n, value in given.items() if n not in HINTS}

    class MindSpeedKdaBackend(base):
        backend_type = "mindspeed_kda"
        priority = PRIORITY

        @classmethod
        def is_enabled(cls) -> bool:
            return bool(_serving)

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verdict(kda.OP, _why_not_chunk_kda, arguments(kda.OP, args, kwargs))

        def chunk_kda(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return mindspeed_kda.chunk_kda(**arguments(kda.OP, args, kwargs), backend=_backend)

        def chunk_kda_bwd_wy_dqkg_fused_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verdict(wy_dqkg.OP, _why_not_wy_dqkg, arguments(wy_dqkg.OP, args, kwargs))

        def chunk_kda_bwd_wy_dqkg_fused(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            given = _wy_dqkg_names(arguments(wy_dqkg.OP, args, kwargs))
            return tuple(mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**given, backend=_backend))

    return MindSpeedKdaBackend


def _verdict(
    name: str, why_not: Callable[[dict[str, Any]], str | None], given: dict[str, Any]
) -> tuple[bool, str | None]:
    if name not in _serving:
        return False, f"mindspeed_kda.integrations.fla serves {', '.join(sorted(_serving)) or 'nothing'} now"
    try:
        reason = why_not(given)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error)
    return reason is None, reason


def _why_not_chunk_kda(given: dict[str, Any]) -> str | None:
    if given.get("allow_neg_eigval") and not given.get("use_beta_sigmoid_in_kernel"):
        return "allow_neg_eigval without use_beta_sigmoid_in_kernel is an error of flash-linear-attention's own"
    given = dict(given)
    foreign = ("cp_context", "use_graph", "max_num_seqs", "return_intermediate_states")
    kda.decline_foreign(**{n: given.pop(n) for n in foreign if n in given})
    given["state_v_first"] = bool(given.get("state_v_first")) or bool(given.pop("transpose_state_layout", False))
    return _declined_choice(kda.OP, kda.check(**given))


def _wy_dqkg_names(given: dict[str, Any]) -> dict[str, Any]:
    """This package's names for the op's arguments; 0.5 calls ``state_v_first`` ``transpose_state_layout``."""
    given = dict(given)
    if given.pop("use_graph", False):
        raise NotImplementedError("use_graph: results in flash-linear-attention's own static buffers are not served")
    if "transpose_state_layout" in given:
        given["state_v_first"] = given.pop("transpose_state_layout")
    return given


def _why_not_wy_dqkg(given: dict[str, Any]) -> str | None:
    return _declined_choice(wy_dqkg.OP, wy_dqkg.check(**_wy_dqkg_names(given)))


def _declined_choice(op: str, call: Any) -> str | None:
    """Raises where nothing serves the call; declines the reference on an accelerator unless it was asked for."""
    chosen = REGISTRY.choose(op, call, call.device.type, _backend)
    asked = _backend is not None or current_request(None) is not None
    if chosen.name == "torch" and call.device.type != "cpu" and not asked:
        return f"only the torch backend serves this call on {torch.device(call.device).type}"
    return None
