"""Transformers' KDA models on this package: ``enable()`` and ``disable()``.

Since 5.2x Transformers ships three models with KDA layers (Kimi Linear, Bailing hybrid, GLM 5 next). Each modeling file
has the two functions ``chunk_kimi_delta_attention`` and ``recurrent_kimi_delta_attention`` in its own namespace, which
its layer looks up at every call. ``enable()`` puts this package's functions there, after comparing the arguments;
models that exist already and models made later run here, until ``disable()``. Transformers offers a mapping to kernels
of its hub for these functions, but none to a local function without the ``kernels`` package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import mindspeed_kda
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.registry import REGISTRY

MODELS = ("kimi_linear", "bailing_hybrid", "glm5_next")
CHUNK, RECURRENT = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
LEADING = ("query", "key", "value", "g", "beta")

_originals: dict[tuple[str, str], Callable[..., Any]] = {}


def enable(models: Iterable[str] = MODELS, *, backend: str | None = None) -> tuple[str, ...]:
    """KDA layers of these models run here from now on; returns the models found. May be called again.

    ``backend``: a backend of ``mindspeed_kda.chunk_kda`` for all calls, None to choose one for each. Calls that it
    cannot serve raise its reason.

    Raises ImportError where Transformers has none of the models, RuntimeError where their functions take other
    arguments than expected here, ValueError for an unknown backend.
    """
    if backend is not None and backend not in REGISTRY.of(kda.OP):
        raise ValueError(f"backend: expected one of {', '.join(REGISTRY.of(kda.OP))}, got {backend!r}")
    found = {name: module for name in models if (module := _modeling(name)) is not None}
    if not found:
        raise ImportError(f"transformers: expected a version with one of the models {', '.join(models)}")
    ours = {
        CHUNK: functools.wraps(_chunk)(functools.partial(_chunk, backend=backend)),
        RECURRENT: functools.wraps(_recurrent)(functools.partial(_recurrent, backend=backend)),
    }
    for name, module in found.items():
        for function in ours:
            original = _originals.get((name, function)) or getattr(module, function)
            leading = tuple(inspect.signature(original).parameters)[: len(LEADING)]
            if leading != LEADING:
                raise RuntimeError(f"{name}.{function}: expected arguments {LEADING}, found {leading}")
    for name, module in found.items():
        for function, replacement in ours.items():
            _originals.setdefault((name, function), getattr(module, function))
            setattr(module, function, replacement)
    return tuple(found)


def disable() -> None:
    """Puts back what ``enable`` replaced."""
    while _originals:
        (name, function), original = _originals.popitem()
        module = _modeling(name)
        assert module is not None
        setattr(module, function, original)


def _modeling(model: str) -> ModuleType | None:
    path = f"transformers.models.{model}"
    try:
        if importlib.util.find_spec(path) is None:
            return None
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return None
    module = importlib.import_module(f"{path}.modeling_{model}")
    return module if hasattr(module, CHUNK) and hasattr(module, RECURRENT) else None


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' ``chunk_kimi_delta_attention``. ``other``: what a model hands to all its layers."""
    return mindspeed_kda.chunk_kda(
        query,
        key,
        value,
        g,
        beta,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        backend=backend,
    )


def _recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' ``recurrent_kimi_delta_attention``; through ``chunk_kda`` where a gradient is wanted."""
    tensors = (query, key, value, g, beta, initial_state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _chunk(
            query, key, value, g, beta, 64, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
            backend=backend,
        )  # fmt: skip
    return mindspeed_kda.fused_recurrent_kda(
        query,
        key,
        value,
        g,
        beta,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
