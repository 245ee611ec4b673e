"""The package's own backends: registered for every op, ranked as the contract says, chosen by the tensors' device."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mindspeed_kda
from mindspeed_kda.backends import triton_backend
from mindspeed_kda.contracts import chunk_kda, flash_attention, wy_dqkg
from mindspeed_kda.registry import REGISTRY, Registry, select
from mindspeed_kda.testing.inputs import wy_inputs

RANKS = {"npu": ["triton", "torch"], "cuda": ["cuda", "library", "triton", "torch"], "cpu": ["torch"]}
BUILT_IN = {"torch", "triton", "cuda", "library"}


def small(**kwargs):
    return wy_inputs(T=16, H=1, K=8, V=8, BT=16, **kwargs)


def ranked(op, device):
    of = [b for b in REGISTRY.of(op).values() if b.rank(device) is not None and b.name in BUILT_IN]
    return [b.name for b in sorted(of, key=lambda b: -b.rank(device))]


@pytest.mark.parametrize("op", REGISTRY.ops())
@pytest.mark.parametrize("device", RANKS)
def test_ranks_by_device_type(op, device):
    """The contract's order, of those backends that serve the op."""
    names = list(REGISTRY.of(op))
    assert ranked(op, device) == [n for n in RANKS[device] if n in names]
    assert "torch" in names


@pytest.mark.parametrize("op", [wy_dqkg.OP, chunk_kda.OP])
def test_the_op_and_the_training_step_have_all_three(op):
    assert set(REGISTRY.of(op)) >= BUILT_IN - {"library"}


def test_every_op_is_a_public_function():
    assert all(callable(getattr(mindspeed_kda, op)) for op in REGISTRY.ops())


@pytest.mark.parametrize("name", [n for n in REGISTRY.of(wy_dqkg.OP) if n != "torch"])
@pytest.mark.parametrize(("dtype", "actual"), [(torch.float64, "float64"), (torch.float32, "cpu")])
def test_reasons_are_sentences_with_the_actual_value(name, dtype, actual, monkeypatch):
    """Neither a compiler nor a library decides here: what the call itself lacks is said even where they are missing."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend = REGISTRY.of(wy_dqkg.OP)[name]
    reason = backend.why_not(wy_dqkg.check(**small(dtype=dtype)))
    assert reason
    if backend.available() is None:
        assert actual in reason, reason
        assert re.search(r"\w+ \w+", reason)


def test_torch_takes_any_device_and_float():
    torch_backend = REGISTRY.of(wy_dqkg.OP)["torch"]
    for dtype in wy_dqkg.MAIN_DTYPES:
        assert torch_backend.why_not(wy_dqkg.check(**small(dtype=dtype))) is None
    meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in small().items()}
    assert torch_backend.why_not(wy_dqkg.check(**meta)) is None


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_cuda_availability_does_not_decide(device, monkeypatch):
    """A shim may say that CUDA is there on an NPU machine: the tensors' device type is what counts."""
    asked = []

    def available():
        asked.append(True)
        return True

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("MINDSPEED_KDA_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if device == "cpu":
        assert REGISTRY.choose(wy_dqkg.OP, wy_dqkg.check(**small()), "cpu").name == "torch"
        mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**small())
    else:
        yes = {n: b for n, b in REGISTRY.of(wy_dqkg.OP).items() if b.rank("npu") is not None}
        assert "triton" in yes
        assert "cuda" not in yes
    assert not asked


def test_choice_follows_the_tensors_not_the_default_device(monkeypatch):
    monkeypatch.delenv("MINDSPEED_KDA_BACKEND", raising=False)
    kwargs = small()
    with torch.device("meta"):
        out = mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**kwargs)
    assert all(t.device.type == "cpu" for t in out)


def test_registering_twice_says_so():
    from mindspeed_kda.backends import register_builtin

    fresh = Registry()
    register_builtin(fresh)
    with pytest.raises(ValueError, match="is already registered for"):
        register_builtin(fresh)


def test_public_register_backend_serves_a_call(monkeypatch):
    monkeypatch.delenv("MINDSPEED_KDA_BACKEND", raising=False)

    def run(call):
        out = wy_dqkg.empty_outputs(call)
        for t in out:
            t.fill_(7)
        return out

    mindspeed_kda.register_backend(
        mindspeed_kda.Backend(wy_dqkg.OP, "sevens", lambda call: None, lambda: run, priority={"cpu": 1000})
    )
    try:
        assert (mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**small()).db == 7).all()
        assert not (mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**small(), backend="torch").db == 7).any()
    finally:
        REGISTRY.unregister(wy_dqkg.OP, "sevens")


def test_select_needs_no_registry():
    choice = select(REGISTRY.of(wy_dqkg.OP), wy_dqkg.OP, wy_dqkg.check(**small()), "cpu", None)
    assert (choice.backend.name, choice.rejected) == ("torch", ())


@pytest.mark.parametrize(
    ("device", "options", "dtype", "expected"),
    [
        ("cuda", {}, torch.bfloat16, "triton"),
        ("cuda", {"deterministic": False}, torch.bfloat16, "library"),
        ("cuda", {"needs_grad": False}, torch.float16, "library"),
        ("cuda", {"deterministic": False, "softcap": 2.0}, torch.bfloat16, "triton"),
        ("cuda", {"deterministic": False, "window": (5, None)}, torch.bfloat16, "triton"),
        ("cuda", {"deterministic": False}, torch.float32, "triton"),
        ("cuda", {}, torch.float64, "torch"),
        ("cpu", {}, torch.float32, "torch"),
    ],
)
def test_who_takes_attention_that_names_nobody(device, options, dtype, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(triton_backend, "available", lambda: None)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 9, 2, 64, dtype=dtype, device=device) for _ in range(3))
        call = flash_attention.check(q, k, v, **options)
    choice = select(REGISTRY.of(flash_attention.OP), flash_attention.OP, call, device, None)
    assert choice.backend.name == expected
