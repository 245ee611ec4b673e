"""A stub of the part of MindSpeed that the feature meets, each piece beside its source in repository Ascend/MindSpeed.

Written from reading, since MindSpeed is on no package index; ``install`` puts it under MindSpeed's module names.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import ClassVar


class MindSpeedFeature:
    """mindspeed/features_manager/feature.py, class MindSpeedFeature: what each feature answers to."""

    def __init__(self, feature_name, optimization_level=2):
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args):
        wanted = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return wanted or self.default_patches

    def register_args(self, parser): ...
    def pre_validate_args(self, args): ...
    def validate_args(self, args): ...
    def post_validate_args(self, args): ...
    def pre_register_patches(self, patch_manager, args): ...
    def register_patches(self, patch_manager, args): ...


class MindSpeedPatchesManager:
    """mindspeed/patch_utils.py, classes Patch and MindSpeedPatchesManager: name now, replace in ``apply_patches``."""

    patches: ClassVar[dict] = {}

    @staticmethod
    def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        if orig_func_name in MindSpeedPatchesManager.patches and not force_patch:
            raise RuntimeError(f"the patch of {orig_func_name} exist !")
        MindSpeedPatchesManager.patches[orig_func_name] = (new_func, create_dummy)

    @staticmethod
    def apply_patches():
        for path, (new_func, create_dummy) in MindSpeedPatchesManager.patches.items():
            module_path, name = path.rsplit(".", 1)
            module = MindSpeedPatchesManager._parse_path(module_path, create_dummy)
            old = getattr(module, name, None)
            is_wrapper = new_func.__name__.endswith(("wrapper", "decorator"))
            final = new_func(old) if is_wrapper else new_func
            setattr(module, name, final)
            for other in list(sys.modules.values()):  # every module that imported the name
                if old is not None and getattr(other, name, None) is old:
                    setattr(other, name, final)

    @staticmethod
    def _parse_path(module_path, create_dummy):
        """Patch.parse_path: imports the module, or makes it and its parents where ``create_dummy``."""
        parts = module_path.split(".")
        for i in range(1, len(parts) + 1):
            path, parent = ".".join(parts[:i]), ".".join(parts[: i - 1])
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                if not create_dummy:
                    raise
                sys.modules[path] = types.ModuleType(path)
                if parent:
                    setattr(sys.modules[parent], parts[i - 1], sys.modules[path])
        return sys.modules[module_path]


class MindSpeedFeaturesManager:
    """mindspeed/features_manager/features_manager.py: asks every feature of the list, stage by stage."""

    FEATURES_LIST: ClassVar[list] = []

    @classmethod
    def register_features_args(cls, parser):
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def validate(cls, args):
        for stage in ("pre_validate_args", "validate_args", "post_validate_args"):
            for feature in cls.FEATURES_LIST:
                getattr(feature, stage)(args)

    @classmethod
    def apply_features_pre_patches(cls, args):
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args):
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()


def install(monkeypatch):
    """Puts the stub under MindSpeed's names for one test, with an empty feature list and no patches."""
    monkeypatch.setattr(MindSpeedPatchesManager, "patches", {})
    monkeypatch.setattr(MindSpeedFeaturesManager, "FEATURES_LIST", [])
    for name, content in {
        "mindspeed": {},
        "mindspeed.patch_utils": {"MindSpeedPatchesManager": MindSpeedPatchesManager},
        "mindspeed.features_manager": {"MindSpeedFeaturesManager": MindSpeedFeaturesManager},
        "mindspeed.features_manager.feature": {"MindSpeedFeature": MindSpeedFeature},
        "mindspeed.features_manager.features_manager": {"MindSpeedFeaturesManager": MindSpeedFeaturesManager},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
