"""flash-linear-attention's real package on a CPU: wiring, gradients, declined calls, weights of its layer.

Its own kernels need a GPU, so on a CPU a result can only be this package's.
"""

from __future__ import annotations

import importlib
import logging

import fla
import pytest
import torch
from fla.layers.kda import KimiDeltaAttention as FlaLayer
from fla.ops.kda import chunk_kda as fla_chunk_kda
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused as fla_op

import mindspeed_kda
from mindspeed_kda.integrations import fla as integration
from mindspeed_kda.nn import GatedRMSNorm, KimiDeltaAttention
from mindspeed_kda.testing.inputs import kda_inputs, wy_inputs

OLD = fla.__version__.startswith("0.5")
STATE_V_FIRST = "transpose_state_layout" if OLD else "state_v_first"
LOGGER = "fla.ops.backends" if OLD else "fla.backends"


@pytest.fixture(autouse=True)
def _off_again():
    yield
    integration.disable()


def no_kernel_of_theirs():
    """On a CPU flash-linear-attention's own functions end in Triton's missing driver, or in its own checks before."""
    return pytest.raises((RuntimeError, AttributeError, ValueError, AssertionError))


def inputs(**options):
    x, do, dht = kda_inputs(T=70, H=2, K=8, V=12, seed=4, **options)
    if OLD:
        assert not options.get("beta_sigmoid")
        x = {n: v for n, v in x.items() if n not in ("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "chunk_size")}
    x[STATE_V_FIRST] = x.pop("state_v_first")
    return x, do, dht


def ours(x):
    return mindspeed_kda.chunk_kda(**{("state_v_first" if n == STATE_V_FIRST else n): v for n, v in x.items()})


CALLS = {
    "plain": {},
    "gate": {"gate": "softplus", "qk_l2norm": True},
    "bound": {"gate": "lower_bound", "HV": 4, "dtype": torch.bfloat16},
    "packed": {"lengths": [30, 0, 37], "cu_dtype": torch.int64, "initial_state": True, "output_final_state": True},
    "v_first": {"state_v_first": True, "initial_state": True, "output_final_state": True},
}
if not OLD:
    CALLS["sigmoid"] = {"beta_sigmoid": True, "allow_neg_eigval": True, "BT": 32}


@pytest.mark.parametrize("case", CALLS)
def test_chunk_kda_and_its_gradients(case):
    x, do, dht = inputs(**CALLS[case])
    integration.enable()
    grads = []
    for f in (lambda x: fla_chunk_kda(**x), ours):
        leaves = {n: x[n].detach().clone().requires_grad_() for n in ("q", "k", "v", "g", "beta")}
        o, final = f({**x, **leaves})
        loss = (o * do).sum() + (0 if dht is None else (final * dht).sum())
        grads.append([o, *torch.autograd.grad(loss, list(leaves.values()))])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_by_position_and_with_hints():
    x, _, _ = inputs(lengths=[30, 40], cu_dtype=torch.int64)
    integration.enable()
    o, _ = fla_chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], 0.25, cu_seqlens=x["cu_seqlens"], cu_seqlens_cpu=x["cu_seqlens"]
    )
    want, _ = mindspeed_kda.chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], scale=0.25, cu_seqlens=x["cu_seqlens"])
    assert torch.equal(o, want)


@pytest.mark.parametrize("case", [{}, {"lengths": [30, 0, 37], "cu_dtype": torch.int64}, {"state_v_first": True}])
def test_op(case):
    x = wy_inputs(T=70, H=2, HV=4, K=8, V=12, **case)
    want = mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(**x)
    x[STATE_V_FIRST] = x.pop("state_v_first")
    integration.enable([integration.wy_dqkg.OP])
    got = fla_op(**x)
    assert type(got) is tuple
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_off_again_and_parts():
    x, _, _ = inputs()
    with no_kernel_of_theirs():
        fla_chunk_kda(**x)
    integration.enable()
    integration.enable()
    assert integration.serving() == {"chunk_kda", "chunk_kda_bwd_wy_dqkg_fused"}
    fla_chunk_kda(**x)
    integration.enable(["chunk_kda_bwd_wy_dqkg_fused"])
    with no_kernel_of_theirs():
        fla_chunk_kda(**x)
    integration.enable(["chunk_kda"])
    fla_chunk_kda(**x)
    integration.disable()
    assert integration.serving() == frozenset()
    with no_kernel_of_theirs():
        fla_chunk_kda(**x)


DECLINED = {
    "head_size": (lambda x: {**x, "v": torch.zeros(1, 70, 2, 300)}, "v: expected V from 1 to 256, got 300"),
    "dtype": (lambda x: {**x, "k": x["k"].half()}, "k: expected dtype float32, got float16"),
    "states": (lambda x: {**x, "return_intermediate_states": True}, "the states of chunks are not returned"),
    "context": (lambda x: {**x, "cp_context": object()}, "context parallelism"),
    "unknown": (lambda x: {**x, "head_first": True}, "unexpected keyword argument 'head_first'"),
}
if not OLD:
    DECLINED["graph"] = (lambda x: {**x, "use_graph": True}, "use_graph: expected False")
    DECLINED["no_sigmoid"] = (lambda x: {**x, "allow_neg_eigval": True}, "error of flash-linear-attention's own")


@pytest.mark.parametrize("case", DECLINED)
def test_what_is_not_served_is_declined_with_its_reason(case, caplog, monkeypatch):
    change, reason = DECLINED[case]
    x, _, _ = inputs()
    x = {n: v for n, v in x.items() if n not in ("allow_neg_eigval",)}
    integration.enable()
    monkeypatch.setattr(mindspeed_kda, "chunk_kda", lambda *args, **kwargs: pytest.fail("the call was served"))
    backends = importlib.import_module(LOGGER)
    registries = [backends.BackendRegistry._registries["kda"]] if OLD else list(backends._function_registries.values())
    for registry in registries:
        registry._logged.clear()  # it logs each kind of rejection once
    with caplog.at_level(logging.INFO, logger=LOGGER), pytest.raises(Exception):  # noqa: B017, PT011
        fla_chunk_kda(**change(x))
    assert any("mindspeed_kda rejected" in r.getMessage() and reason in r.getMessage() for r in caplog.records)


def test_backend_by_name():
    x, _, _ = inputs()
    integration.enable(backend="torch")
    fla_chunk_kda(**x)
    with pytest.raises(ValueError, match="backend: expected one of"):
        integration.enable(backend="abacus")
    with pytest.raises(ValueError, match="functions: expected some of"):
        integration.enable(["chunk_gla"])


def layers(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, **options}
    return FlaLayer(**sizes), KimiDeltaAttention(**sizes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_v_heads": 4, "expand_v": 0.5},
        {"safe_gate": True, "lower_bound": -5.0, "conv_bias": True, "conv_size": 3},
        {"use_short_conv": False, "allow_neg_eigval": True},
    ],
)
def test_weights_pass_both_ways(options):
    theirs, own = layers(**options)
    own.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2, **options).state_dict())
    shapes = [{n: (t.shape, t.dtype) for n, t in layer.state_dict().items()} for layer in (theirs, own)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "options", [{"allow_neg_eigval": True, "num_v_heads": 4}, {"safe_gate": True, "lower_bound": -5.0}]
)
def test_their_layer_is_ours(options):
    """With the same weights, outputs and gradients agree. The convolution and the norm of flash-linear-attention are
    Triton kernels, which a CPU has not: the one is left out, the other replaced."""
    theirs, own = layers(use_short_conv=False, **options)
    own.load_state_dict(theirs.state_dict())
    norm = GatedRMSNorm(16)
    norm.load_state_dict(theirs.o_norm.state_dict())
    theirs.o_norm = norm
    integration.enable()
    x = torch.randn(2, 70, 32)
    (a, *_), (b, _) = theirs.train()(x), own(x)
    torch.testing.assert_close(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for (name, p), (_, q) in zip(theirs.named_parameters(), own.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")
