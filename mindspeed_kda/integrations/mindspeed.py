"""MindSpeed on this package: a feature of its own kind, and the import path of MindSpeed-Ops' op.

In a training script, before MindSpeed builds its arguments::

    from mindspeed_kda.integrations import mindspeed
    mindspeed.register()                 # then: --use-mindspeed-kda [--mindspeed-kda-backend triton]

With the flag, MindSpeed's patch manager replaces ``fla.ops.kda.chunk_kda`` and the op
``mindspeed_ops.api.triton.chunk_kda_bwd.chunk_kda_bwd_wy_dqkg_fused`` by this package's functions, when it applies the
patches of all features. Without a trainer, ``install_ops_path()`` serves the op's import path alone.

Nothing of MindSpeed is imported by this module; ``register()`` imports its feature list. Its interface, as followed
here (repository Ascend/MindSpeed):

* ``mindspeed/features_manager/feature.py``, ``MindSpeedFeature``: the constructor's ``feature_name`` and
  ``optimization_level``, ``is_need_apply(args)``, ``register_args(parser)``, ``pre_validate_args(args)``,
  ``validate_args(args)``, ``post_validate_args(args)``, ``pre_register_patches(patch_manager, args)``,
  ``register_patches(patch_manager, args)``.
* ``mindspeed/features_manager/features_manager.py``, ``MindSpeedFeaturesManager.FEATURES_LIST``: the features that are
  asked, in order.
* ``mindspeed/patch_utils.py``, ``MindSpeedPatchesManager.register_patch(orig_func_name, new_func, force_patch,
  create_dummy)``: what to replace, applied later by ``apply_patches()``; a ``new_func`` whose name ends in "wrapper" or
  "decorator" would be called with the original instead of replacing it; ``create_dummy`` makes modules that are absent.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

import mindspeed_kda
from mindspeed_kda.contracts import chunk_kda as kda
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import REGISTRY

FLAG, BACKEND_FLAG = "--use-mindspeed-kda", "--mindspeed-kda-backend"
OPS_PATH = "mindspeed_ops.api.triton.chunk_kda_bwd"
CHUNK_KDA_PATHS = ("fla.ops.kda.chunk_kda", "fla.ops.kda.chunk.chunk_kda")
"""Where models built on flash-linear-attention take ``chunk_kda`` from; patched where it is installed."""


class PatchesManager(Protocol):
    """The part of ``MindSpeedPatchesManager`` that is used (``mindspeed/patch_utils.py``)."""

    @staticmethod
    def register_patch(
        orig_func_name: str, new_func: Callable[..., Any] | None = None, force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None: ...  # fmt: skip


def chunk_kda_bwd_wy_dqkg_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """MindSpeed-Ops' function of this name: (dq, dk, dv, db, dg, dA), a plain tuple.

    Shapes, dtypes and errors are those of ``mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused``.
    """
    grads = mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(
        q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, cu_seqlens, chunk_size, chunk_indices
    )
    return tuple(grads)  # type: ignore[return-value]


class MindSpeedKdaFeature:
    """``--use-mindspeed-kda``: MindSpeed's own feature interface, without its base class.

    MindSpeed asks its features by these names only; each method says when. ``feature_name`` is the flag's attribute.
    """

    feature_name = "use_mindspeed_kda"
    optimization_level = 0
    """Applies at every ``--optimization-level``."""
    default_patches = False
    """And only where the flag is given."""

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Asked before any patch is registered."""
        return bool(getattr(args, self.feature_name, False))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Called once, with the trainer's parser."""
        group = parser.add_argument_group(title="mindspeed_kda")
        group.add_argument(FLAG, action="store_true", help="run Kimi Delta Attention on the mindspeed_kda package")
        group.add_argument(
            BACKEND_FLAG,
            default=None,
            metavar="NAME",
            help=f"one of {', '.join(REGISTRY.of(kda.OP))}; default: the best for each call",
        )

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Called before Megatron validates its arguments. Nothing to do."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """Called after it. Raises ValueError on a backend that is not registered."""
        name = getattr(args, "mindspeed_kda_backend", None)
        if name is not None and name not in REGISTRY.of(kda.OP):
            raise ValueError(f"{BACKEND_FLAG}: expected one of {', '.join(REGISTRY.of(kda.OP))}, got {name!r}")

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Called last. Nothing to do."""

    def pre_register_patches(self, patch_manager: PatchesManager, args: argparse.Namespace) -> None:
        """Patches that must stand before Megatron is imported. None."""

    def register_patches(self, patch_manager: PatchesManager, args: argparse.Namespace) -> None:
        """Names what is replaced; the manager does it when all features were asked."""
        backend = getattr(args, "mindspeed_kda_backend", None)
        op = _on_backend(chunk_kda_bwd_wy_dqkg_fused, backend)
        patch_manager.register_patch(f"{OPS_PATH}.{wy_dqkg.OP}", op, create_dummy=True)
        if importlib.util.find_spec("fla") is not None:
            for path in CHUNK_KDA_PATHS:
                patch_manager.register_patch(path, _on_backend(_fla_chunk_kda, backend))


def _fla_chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``fla.ops.kda.chunk_kda`` on this package; arguments after beta by name, since their order differs by version."""
    if args:
        raise TypeError(f"chunk_kda: expected arguments after beta by name, got {len(args)} by position")
    return mindspeed_kda.chunk_kda(q, k, v, g, beta, **kwargs)


def _on_backend(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    if backend is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mindspeed_kda.use_backend(backend):
            return function(*args, **kwargs)

    return run


def register(features: list[Any] | None = None) -> MindSpeedKdaFeature:
    """Appends the feature to MindSpeed's list, once, and returns it.

    ``features``: the list; None takes ``MindSpeedFeaturesManager.FEATURES_LIST``, for which MindSpeed must be installed
    (ImportError otherwise). Call it before MindSpeed parses its arguments.
    """
    if features is None:
        try:
            manager = importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "mindspeed":
                raise
            raise ImportError("MindSpeed is not installed; it is needed to register the feature with it") from error
        features = manager.FEATURES_LIST
    assert features is not None
    for feature in features:
        if isinstance(feature, MindSpeedKdaFeature):
            return feature
    feature = MindSpeedKdaFeature()
    features.append(feature)
    return feature


_made: list[str] = []
_replaced: dict[str, Any] = {}


def install_ops_path() -> None:
    """Serves ``from mindspeed_ops.api.triton.chunk_kda_bwd import chunk_kda_bwd_wy_dqkg_fused`` from here.

    Modules on that path that are not installed are made; where MindSpeed-Ops is installed, its function is replaced in
    its module (names that others imported from it before stay). May be called again; ``remove_ops_path`` undoes it.
    """
    parent: ModuleType | None = None
    parts = OPS_PATH.split(".")
    for i, part in enumerate(parts):
        path = ".".join(parts[: i + 1])
        module = _module(path)
        if parent is not None and getattr(parent, part, None) is not module:
            setattr(parent, part, module)
        parent = module
    assert parent is not None
    if parent.__dict__.get(wy_dqkg.OP) is not chunk_kda_bwd_wy_dqkg_fused:
        _replaced[wy_dqkg.OP] = parent.__dict__.get(wy_dqkg.OP)
        setattr(parent, wy_dqkg.OP, chunk_kda_bwd_wy_dqkg_fused)


def remove_ops_path() -> None:
    """Removes the modules that ``install_ops_path`` made and puts back the function that it replaced."""
    module = sys.modules.get(OPS_PATH)
    for name, original in _replaced.items():
        if module is not None and original is not None:
            setattr(module, name, original)
        elif module is not None:
            delattr(module, name)
    _replaced.clear()
    while _made:
        path = _made.pop()
        sys.modules.pop(path, None)
        parent, _, name = path.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], name):
            delattr(sys.modules[parent], name)


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise  # something that MindSpeed-Ops itself needs is missing
    module = ModuleType(path, "Made by mindspeed_kda.integrations.mindspeed.install_ops_path.")
    module.__path__ = []  # a package, so that the import system looks for what lies below it
    sys.modules[path] = module
    _made.append(path)
    return module
