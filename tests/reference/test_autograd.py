"""How ``chunk_kda`` behaves inside autograd, and what ``testing.capture`` sees of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import Backend, chunk_kda, chunk_kda_bwd_wy_dqkg_fused, use_backend
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.reference import chunk_kda as reference
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.capture import capture, op_inputs, record_calls
from mindspeed_kda.testing.kda_inputs import KdaInputs, kda_inputs
from mindspeed_kda.testing.metrics import assert_accurate
from mindspeed_kda.testing.oracle import DIFFERENTIABLE, gradients

OUTPUTS = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta"}


def inputs_of(**options: Any) -> KdaInputs:
    return kda_inputs(**{"T": 40, "H": 1, "HV": 2, "K": 8, "V": 6, "BT": 16, "gate": "softplus", **options})


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_any_one_input_alone_may_need_a_gradient(name: str) -> None:
    inputs = inputs_of()
    expected = gradients(chunk_kda, *inputs)
    leaf = inputs.arguments[name].clone().requires_grad_()
    o, final_state = chunk_kda(**{**inputs.arguments, name: leaf})
    torch.autograd.backward([o, final_state], [inputs.do, inputs.dht])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected[f"d{name}"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide_beta_and_g", [False, True])
def test_gradients_have_the_shapes_and_dtypes_of_their_inputs(dtype: torch.dtype, wide_beta_and_g: bool) -> None:
    inputs = inputs_of(dtype=dtype, wide_beta_and_g=wide_beta_and_g)
    inputs.arguments["dt_bias"] = inputs.arguments["dt_bias"].flatten()
    leaves = {n: inputs.arguments[n].requires_grad_() for n in DIFFERENTIABLE}
    o, final_state = chunk_kda(**{**inputs.arguments, **leaves})
    assert final_state is not None
    (o.float().sum() + final_state.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype), name


def test_a_gradient_of_the_final_state_alone_or_of_o_alone() -> None:
    inputs = inputs_of()
    assert inputs.dht is not None
    zero_do, zero_dht = torch.zeros_like(inputs.do), torch.zeros_like(inputs.dht)
    for outs, expected in (
        (lambda o, s: ([s], [inputs.dht]), gradients(chunk_kda, inputs.arguments, zero_do, inputs.dht)),
        (lambda o, s: ([o], [inputs.do]), gradients(chunk_kda, inputs.arguments, inputs.do, zero_dht)),
    ):
        leaves = {n: inputs.arguments[n].clone().requires_grad_() for n in OUTPUTS}
        torch.autograd.backward(*outs(*chunk_kda(**{**inputs.arguments, **leaves})))
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, expected[f"d{name}"]), name


def test_no_graph_without_a_need() -> None:
    inputs = inputs_of()
    o, _ = chunk_kda(**inputs.arguments)
    assert not o.requires_grad
    q = inputs.arguments["q"].clone().requires_grad_()
    with torch.no_grad():
        again, _ = chunk_kda(**{**inputs.arguments, "q": q})
    with torch.inference_mode():
        third, _ = chunk_kda(**{**inputs.arguments, "q": q})
    assert not again.requires_grad
    assert torch.equal(o, again)
    assert torch.equal(o, third)


def test_second_derivatives_are_refused_not_wrong() -> None:
    inputs = inputs_of()
    q = inputs.arguments["q"].clone().requires_grad_()
    o, _ = chunk_kda(**{**inputs.arguments, "q": q})
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_writing_over_an_input_between_forward_and_backward_is_caught() -> None:
    inputs = inputs_of()
    v = inputs.arguments["v"].clone()
    q = inputs.arguments["q"].clone().requires_grad_()
    o, _ = chunk_kda(**{**inputs.arguments, "q": q, "v": v})
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(("disable_recompute", "extra"), [(False, 0), (True, 4)])
def test_what_is_kept_for_backward_passes_through_saved_tensor_hooks(disable_recompute: bool, extra: int) -> None:
    """By default the inputs and nothing else; A, Aqk, v_new and h on request."""
    inputs = inputs_of(disable_recompute=disable_recompute)
    leaves = {n: inputs.arguments[n].clone().requires_grad_() for n in DIFFERENTIABLE}
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        o, _ = chunk_kda(**{**inputs.arguments, **leaves})
    assert len(packed) == len(leaves) + extra
    assert all(any(p is leaf for p in packed) for leaf in leaves.values())
    o.backward(inputs.do)
    expected = gradients(chunk_kda, inputs.arguments, inputs.do)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected[f"d{name}"])


def test_checkpointing_recomputes_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = inputs_of()
    expected = gradients(chunk_kda, inputs.arguments, inputs.do)
    q = inputs.arguments["q"].clone().requires_grad_()
    o = checkpoint(lambda q: chunk_kda(**{**inputs.arguments, "q": q})[0], q, use_reentrant=False)
    o.backward(inputs.do)
    assert q.grad is not None
    assert torch.equal(q.grad, expected["dq"])


class Doubling:
    """A backend that answers twice the reference, so that one can see who ran."""

    def __init__(self, drop: str | None = None) -> None:
        self.drop = drop

    def forward(self, call: contract.ChunkKdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        o, final_state, saved = reference.forward(call)
        return 2 * o, final_state, (*saved, o)

    def backward(
        self, call: contract.ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> contract.ChunkKdaGrads:
        assert torch.equal(saved[-1], reference.forward(call)[0])
        grads = reference.backward(call, saved[:-1], 2 * do, dht)
        return grads if self.drop is None else grads._replace(**{self.drop: None})

    def saved_specs(self, call: contract.ChunkKdaCall) -> tuple[contract.Spec, ...]:
        return (*reference.saved_specs(call), contract.output_specs(call)[0])


@pytest.fixture
def doubling() -> Any:
    REGISTRY.register(Backend(contract.OP, "doubling", supports=lambda call: None, load=Doubling))
    yield "doubling"
    REGISTRY.unregister(contract.OP, "doubling")


def test_the_backend_chosen_in_forward_runs_backward(doubling: str) -> None:
    inputs = inputs_of()
    expected = gradients(chunk_kda, inputs.arguments, inputs.do)
    q = inputs.arguments["q"].clone().requires_grad_()
    with use_backend(doubling):
        o, _ = chunk_kda(**{**inputs.arguments, "q": q})
    assert torch.equal(o, 2 * expected["o"])
    o.backward(inputs.do)
    assert q.grad is not None
    assert_accurate("dq", q.grad, 2 * expected["dq"], torch.float32, rms_limit=1e-6)


@pytest.mark.parametrize("drop", ["dv", "dA_log", "dh0"])
def test_a_backend_that_leaves_a_gradient_out_is_an_error(drop: str) -> None:
    REGISTRY.register(Backend(contract.OP, "leaving", supports=lambda call: None, load=lambda: Doubling(drop)))
    try:
        inputs = inputs_of()
        q = inputs.arguments["q"].clone().requires_grad_()
        o, _ = chunk_kda(**{**inputs.arguments, "q": q}, backend="leaving")
        with pytest.raises(RuntimeError, match=f"{drop}: expected a tensor from the backend's backward"):
            o.sum().backward()
    finally:
        REGISTRY.unregister(contract.OP, "leaving")


@pytest.mark.parametrize("lengths", [None, [0, 17, 20, 0]])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_captured_op_inputs_are_those_of_the_training_step(lengths: list[int] | None, state_v_first: bool) -> None:
    """In float64 the op on captured inputs gives the step's own dv, and v_new is A (b (v - kg h)) row by row."""
    inputs = inputs_of(dtype=torch.float64, lengths=lengths, state_v_first=state_v_first)
    expected: dict[str, Tensor] = {}
    (x,) = capture(lambda: expected.update(gradients(chunk_kda, *inputs)), state_v_first=not state_v_first)
    assert x["state_v_first"] is not state_v_first
    out = chunk_kda_bwd_wy_dqkg_fused(**x)
    assert_accurate("dv", out.dv, expected["dv"], torch.float64)
    assert (x["k"].norm(dim=-1)[:, :37] - 1).abs().max() < 1e-5
    h = x["h"].mT if x["state_v_first"] else x["h"]
    C = 16  # the rows of the first chunk
    A, b, v, k, g, v_new = (x[n][0, :C] for n in ("A", "beta", "v", "k", "g", "v_new"))
    for i_h in range(2):
        kg = k[:, 0] * torch.exp2(g[:, i_h])
        row = A[:, i_h] @ (b[:, i_h, None] * (v[:, i_h] - kg @ h[0, 0, i_h]))
        assert_accurate("v_new", v_new[:, i_h], row, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_captured_op_inputs_have_the_dtypes_asked_for(dtype: torch.dtype, state_dtype: torch.dtype | None) -> None:
    if state_dtype is not None and dtype != state_dtype:
        state_dtype = dtype
    inputs = inputs_of(lengths=[0, 17, 20, 0])
    with record_calls() as calls:
        gradients(chunk_kda, *inputs)
    x = op_inputs(calls[0], dtype=dtype, state_dtype=state_dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x[n].dtype for n in ("q", "k", "v", "v_new", "beta", "A", "do", "dv")} == {dtype}
    assert x["g"].dtype == wide
    assert x["h"].dtype == x["dh"].dtype == (state_dtype or wide)
    assert x["h"].shape[1] == 4
    chunk_kda_bwd_wy_dqkg_fused(**x)


def test_record_calls_keeps_copies_and_stops_at_the_end() -> None:
    inputs = inputs_of()
    q = inputs.arguments["q"].clone().requires_grad_()
    with record_calls() as calls:
        for _ in range(2):
            o, _ = chunk_kda(**{**inputs.arguments, "q": q})
            o.backward(inputs.do)
    o, _ = chunk_kda(**{**inputs.arguments, "q": q})
    o.backward(inputs.do)
    assert len(calls) == 2
    with torch.no_grad():
        q.zero_()
    assert torch.equal(calls[0].arguments["q"], inputs.arguments["q"])
    assert torch.equal(calls[0].do, inputs.do)
    assert calls[0].dht is None


def test_capture_of_a_step_without_the_op_says_so() -> None:
    with pytest.raises(RuntimeError, match="got none"):
        capture(lambda: None)
