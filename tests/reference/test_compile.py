"""``torch.compile`` without a graph break: forward and backward, both operators, and what their fakes promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_kda import Backend, chunk_kda, chunk_kda_bwd_wy_dqkg_fused, flash_attention, ops, use_backend
from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.reference import chunk_kda as reference
from mindspeed_kda.registry import REGISTRY
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.oracle import gradients

COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@COMPILERS
@pytest.mark.parametrize(
    "options",
    [
        {"gate": "softplus", "HV": 2},
        {"gate": "lower_bound", "disable_recompute": True, "lengths": [0, 17, 20, 0], "state_v_first": True},
        {"states": False, "raw": False, "dtype": torch.bfloat16},
    ],
    ids=["softplus", "lower bound, packed, keep", "plain"],
)
def test_a_training_step_compiles_to_one_graph(compiler: str, options: dict[str, Any]) -> None:
    inputs = kda_inputs(**{"T": 40, "H": 1, "K": 8, "V": 6, "BT": 16, **options})

    def model(**x: Any) -> tuple[Tensor, Tensor | None]:
        o, final_state = chunk_kda(**{**x, "q": x["q"] * 1.5})
        return o + 1, final_state

    expected = gradients(model, *inputs)
    got = gradients(torch.compile(model, backend=compiler, fullgraph=True), *inputs)
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


@COMPILERS
def test_inference_compiles_to_one_graph(compiler: str) -> None:
    x = kda_inputs(T=40, H=1, K=8, V=6, BT=16).arguments
    compiled = torch.compile(lambda **x: chunk_kda(**x), backend=compiler, fullgraph=True)
    with torch.no_grad():
        for got, expected in zip(compiled(**x), chunk_kda(**x), strict=True):
            assert torch.equal(got, expected)


def test_other_lengths_reuse_a_dynamic_graph() -> None:
    graphs = 0

    def counting(module: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(lambda **x: chunk_kda(**x), backend=counting, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for T in (40, 50, 70):
            x = kda_inputs(T=T, H=1, K=8, V=6, BT=16).arguments
            assert torch.equal(compiled(**x)[0], chunk_kda(**x)[0])
    assert graphs == 1


@COMPILERS
def test_the_op_compiles_to_one_graph(compiler: str) -> None:
    x = wy_inputs(T=40, H=1, HV=2, K=8, V=6, BT=16)
    compiled = torch.compile(lambda **x: chunk_kda_bwd_wy_dqkg_fused(**x), backend=compiler, fullgraph=True)
    for got, expected in zip(compiled(**x), chunk_kda_bwd_wy_dqkg_fused(**x), strict=True):
        assert torch.equal(got, expected)


def test_the_backend_asked_for_when_tracing_also_runs_backward() -> None:
    """Backward runs outside the block (and on CUDA in another thread), with tensors of that backend's own."""
    ran: list[str] = []

    class Own:
        saved_specs = staticmethod(lambda call: (((3,), torch.float32),))

        def forward(self, call: contract.ChunkKdaCall) -> Any:
            ran.append("forward")
            return (*reference.forward(call)[:2], (torch.arange(3.0),))

        def backward(self, call: contract.ChunkKdaCall, saved: Any, do: Tensor, dht: Tensor | None) -> Any:
            ran.append("backward")
            assert torch.equal(saved[0], torch.arange(3.0))
            return reference.backward(call, (), do, dht)

    inputs = kda_inputs(T=40, H=1, K=8, V=6, BT=16)
    expected = gradients(chunk_kda, *inputs)
    REGISTRY.register(Backend(contract.OP, "own", supports=lambda call: None, load=Own))
    try:
        compiled = torch.compile(lambda **x: chunk_kda(**x), backend="aot_eager", fullgraph=True)
        leaves = {n: inputs.arguments[n].clone().requires_grad_() for n in ("q", "v")}
        with use_backend("own"):
            o, final_state = compiled(**{**inputs.arguments, **leaves})
        torch.autograd.backward([o, final_state], [inputs.do, inputs.dht])
        assert ran == ["forward", "backward"]
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, expected[f"d{name}"])
    finally:
        REGISTRY.unregister(contract.OP, "own")


@pytest.mark.parametrize("lengths", [None, [0, 17, 20, 0]])
def test_the_operators_hold_torchs_own_checks(lengths: list[int] | None) -> None:
    """Schema (no alias, no write), fake against real, autograd registration."""
    inputs = kda_inputs(T=40, H=1, HV=2, K=4, V=4, BT=16, gate="softplus", lengths=lengths, disable_recompute=True)
    x = {n: t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs[0].items()}
    tensors = tuple(x.get(n) for n in contract.ChunkKdaTensors._fields)
    options = {"scale": None, "safe_gate": False, "needs_grad": True, "backend": None, **x}
    args = (*tensors, *(options[n] for n in ops.OPTION_NAMES))
    torch.library.opcheck(
        ops.chunk_kda_fwd, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
    saved = ops.chunk_kda_fwd(*detached)[2]
    torch.library.opcheck(
        ops.chunk_kda_bwd, (inputs.do, inputs.dht, saved, *detached), test_utils=("test_schema", "test_faketensor")
    )


ATTENTION = {
    "all": {"causal": True, "window": (9, None), "softcap": 2.0, "scale": 0.3},
    "packed": {"cu_seqlens_q": torch.tensor([0, 5, 5, 20]), "cu_seqlens_k": torch.tensor([0, 3, 9, 30])},
}


def attention_inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).requires_grad_() for s in ((1, 20, 4, 8), (1, 30, 2, 8), (1, 30, 2, 6))]


@COMPILERS
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_compiles_to_one_graph(compiler: str, options: dict[str, Any]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = flash_attention(q * 1.5, k, v, return_lse=True, **options)
        return o + 1, lse

    x = attention_inputs()
    expected, got = model(*x), torch.compile(model, backend=compiler, fullgraph=True)(*x)
    assert not got[1].requires_grad
    do = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip((*got, *torch.autograd.grad(got[0], x, do)), (*expected, *torch.autograd.grad(expected[0], x, do)),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)
    with torch.no_grad():
        alone = torch.compile(lambda *x: flash_attention(*x, **options), backend=compiler, fullgraph=True)
        assert torch.equal(alone(*x), flash_attention(*x, **options))


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attentions_operators_hold_torchs_own_checks(options: dict[str, Any]) -> None:
    left, right = options.get("window", (None, None))
    args = (
        *attention_inputs(), options.get("cu_seqlens_q"), options.get("cu_seqlens_k"), options.get("causal", False),
        left, right, options.get("softcap", 0.0), options.get("scale"), True, True, None,
    )  # fmt: skip
    torch.library.opcheck(
        ops.flash_attention_fwd, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
    o, lse = ops.flash_attention_fwd(*detached)
    torch.library.opcheck(
        ops.flash_attention_bwd, (torch.ones_like(o), o, lse, *detached), test_utils=("test_schema", "test_faketensor")
    )
