"""The MindSpeed feature against a stub of MindSpeed, and the import path of MindSpeed-Ops."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import types

import mindspeed_stub
import pytest
import torch

import mindspeed_kda
from mindspeed_kda.integrations import mindspeed
from mindspeed_kda.registry import REGISTRY, Backend
from mindspeed_kda.testing.inputs import kda_inputs, wy_inputs

OP = "chunk_kda_bwd_wy_dqkg_fused"


@pytest.fixture(autouse=True)
def _clean_modules():
    """Modules that a test makes under other packages' names are gone after it."""
    before = set(sys.modules)
    yield
    mindspeed.remove_ops_path()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("mindspeed", "mindspeed_ops", "fla"):
            del sys.modules[name]


@pytest.fixture
def manager(monkeypatch):
    mindspeed_stub.install(monkeypatch)
    return mindspeed_stub.MindSpeedFeaturesManager


@pytest.fixture
def fake_fla(monkeypatch):
    """A flash-linear-attention of two modules, and a model module that took ``chunk_kda`` from it."""

    def chunk_kda(q, k, v, g, beta, scale=None, **kwargs):
        raise AssertionError("flash-linear-attention's own function ran")

    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.chunk", "somemodel"):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla.ops.kda", "fla.ops.kda.chunk", "somemodel"):
        sys.modules[name].chunk_kda = chunk_kda
    return chunk_kda


def start(manager, *flags, optimization_level=0):
    """What MindSpeed does with its features, in its order."""
    feature = mindspeed.register()
    parser = argparse.ArgumentParser()
    manager.register_features_args(parser)
    args = parser.parse_args(flags)
    args.optimization_level = optimization_level
    manager.apply_features_pre_patches(args)
    manager.validate(args)
    manager.apply_features_patches(args)
    return feature


def test_registering_once(manager):
    feature = mindspeed.register()
    assert mindspeed.register() is feature
    assert len(manager.FEATURES_LIST) == 1
    own = []
    assert mindspeed.register(own) is own[0]


def test_interface_is_mindspeeds():
    """Every method of MindSpeed's base class is there and takes the same arguments."""
    for name, method in inspect.getmembers(mindspeed_stub.MindSpeedFeature, inspect.isfunction):
        if name != "__init__":
            ours = inspect.signature(getattr(mindspeed.MindSpeedKdaFeature, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_without_the_flag_nothing_is_patched(manager):
    start(manager)
    assert mindspeed_stub.MindSpeedPatchesManager.patches == {}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_op_under_mindspeed_ops_path(manager, level):
    start(manager, "--use-mindspeed-kda", optimization_level=level)
    from mindspeed_ops.api.triton.chunk_kda_bwd import chunk_kda_bwd_wy_dqkg_fused

    x = wy_inputs(T=20, K=8, V=8, BT=16)
    x.pop("state_v_first")
    got = chunk_kda_bwd_wy_dqkg_fused(**x)
    want = mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**x)
    assert type(got) is tuple
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_chunk_kda_of_models(manager, fake_fla):
    start(manager, "--use-mindspeed-kda")
    x, do, _ = kda_inputs(T=20, K=8, V=8, BT=16, gate="softplus")
    want, _ = mindspeed_kda.chunk_kda(**x)
    for name in ("fla.ops.kda", "fla.ops.kda.chunk", "somemodel"):
        x["v"] = x["v"].detach().requires_grad_()
        o, _ = sys.modules[name].chunk_kda(**x)
        o.backward(do)
        assert torch.equal(o, want)
        assert x["v"].grad is not None
    with pytest.raises(TypeError, match="after beta by name"):
        sys.modules["somemodel"].chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], 1.0)


def test_choice_of_backend(manager, fake_fla):
    names = []

    def spy(op):
        real = REGISTRY.of(op)["torch"].load()

        def run(*args):
            names.append(op)
            return (real if op == OP else real.forward)(*args)

        return run if op == OP else types.SimpleNamespace(forward=run, backward=None, saved_specs=None)

    for op in (OP, "chunk_kda"):
        REGISTRY.register(Backend(op, "spy", supports=lambda call: None, load=lambda op=op: spy(op)))
    try:
        start(manager, "--use-mindspeed-kda", "--mindspeed-kda-backend", "spy")
        x = wy_inputs(T=20, K=8, V=8, BT=16)
        x.pop("state_v_first")
        sys.modules["mindspeed_ops.api.triton.chunk_kda_bwd"].chunk_kda_bwd_wy_dqkg_fused(**x)
        sys.modules["fla.ops.kda"].chunk_kda(**kda_inputs(T=20, K=8, V=8, BT=16)[0])
        assert names == [OP, "chunk_kda"]
        mindspeed_kda.chunk_kda(**kda_inputs(T=20, K=8, V=8, BT=16)[0])  # others are left alone
        assert len(names) == 2
    finally:
        for op in (OP, "chunk_kda"):
            REGISTRY.unregister(op, "spy")


def test_unknown_backend(manager):
    with pytest.raises(ValueError, match=r"--mindspeed-kda-backend: expected one of .*torch.*, got 'abacus'"):
        start(manager, "--use-mindspeed-kda", "--mindspeed-kda-backend", "abacus")


def test_no_patch_is_taken_for_a_wrapper(manager, fake_fla):
    start(manager, "--use-mindspeed-kda", "--mindspeed-kda-backend", "torch")
    patches = mindspeed_stub.MindSpeedPatchesManager.patches
    assert len(patches) == 3
    assert not any(f.__name__.endswith(("wrapper", "decorator")) for f, _ in patches.values())


def test_without_mindspeed():
    with pytest.raises(ImportError, match="MindSpeed is not installed"):
        mindspeed.register()


def test_import_touches_nothing_of_mindspeed():
    code = "import sys, mindspeed_kda.integrations.mindspeed\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in ('mindspeed', 'mindspeed_ops', 'fla', 'triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class TestOpsPath:
    def test_signature_is_the_op_pages(self):
        parameters = inspect.signature(mindspeed.chunk_kda_bwd_wy_dqkg_fused).parameters
        tensors = ["q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv"]
        assert list(parameters) == [*tensors, "scale", "cu_seqlens", "chunk_size", "chunk_indices"]
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        assert defaults == {"scale": None, "cu_seqlens": None, "chunk_size": 64, "chunk_indices": None}

    def test_made_and_removed(self):
        mindspeed.install_ops_path()
        mindspeed.install_ops_path()
        from mindspeed_ops.api.triton import chunk_kda_bwd

        assert chunk_kda_bwd.chunk_kda_bwd_wy_dqkg_fused is mindspeed.chunk_kda_bwd_wy_dqkg_fused
        mindspeed.remove_ops_path()
        assert not any(m.split(".")[0] == "mindspeed_ops" for m in sys.modules)
        with pytest.raises(ModuleNotFoundError):
            __import__("mindspeed_ops.api.triton.chunk_kda_bwd")
        mindspeed.remove_ops_path()

    def test_over_an_installed_package(self, tmp_path, monkeypatch):
        folder = tmp_path / "mindspeed_ops" / "api" / "triton"
        folder.mkdir(parents=True)
        (folder / "chunk_kda_bwd.py").write_text(f"def {OP}(*args):\n    return 'theirs'\n\nother = 1\n")
        monkeypatch.syspath_prepend(tmp_path)
        mindspeed.install_ops_path()
        import mindspeed_ops.api.triton.chunk_kda_bwd as module

        assert getattr(module, OP) is mindspeed.chunk_kda_bwd_wy_dqkg_fused
        assert module.other == 1
        mindspeed.remove_ops_path()
        assert getattr(module, OP)() == "theirs"

    def test_a_broken_package_is_an_error(self, tmp_path, monkeypatch):
        folder = tmp_path / "mindspeed_ops"
        folder.mkdir()
        (folder / "__init__.py").write_text("import a_module_that_is_absent\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_absent"):
            mindspeed.install_ops_path()
