"""The layer as people train it: torch.compile, autocast, both kinds of checkpointing, DDP and FSDP2 on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mindspeed_kda
from mindspeed_kda.nn import KimiDeltaAttention
from mindspeed_kda.testing.inputs import kda_inputs

WORKER = Path(distributed_worker.__file__)


def layer(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "chunk_size": 16}
    return KimiDeltaAttention(**{**sizes, **options})


def batch(dtype=torch.float32):
    return torch.randn(2, 21, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(module, run, x):
    """Output and the gradients of x and of every parameter, of ``run(x)``."""
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def same(a, b, exact=True):
    for p, q in zip(a, b, strict=True):
        if exact:
            assert torch.equal(p, q)
        else:
            torch.testing.assert_close(p, q)


class TestCompile:
    """Full graphs: a graph break is an error."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("options", [{}, {"safe_gate": True, "lower_bound": -5.0, "use_short_conv": False}])
    def test_training_step(self, options):
        it, x = layer(**options), batch()
        compiled = torch.compile(lambda x: it(x)[0], backend="aot_eager", fullgraph=True)
        same(gradients(it, compiled, x), gradients(it, lambda x: it(x)[0], x), exact=False)

    def test_packed_and_with_a_state(self):
        it, x = layer(), batch()[:1]
        cu = torch.tensor([0, 5, 21], dtype=torch.int32)

        def run(x):
            y, state = it(x, cu_seqlens=cu, keep_state=True)
            return y, state.memory

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        same(compiled(x), run(x), exact=False)

    def test_backend_of_the_block_is_in_the_graph(self):
        it, x = layer(), batch()
        with mindspeed_kda.use_backend("torch"):
            compiled = torch.compile(lambda x: it(x)[0], backend="aot_eager", fullgraph=True)
            same([compiled(x)], [it(x)[0]], exact=False)


class TestAutocast:
    def test_bfloat16(self):
        it, x = layer(), batch()
        want = gradients(it, lambda x: it(x)[0], x)
        seen = []
        real = mindspeed_kda.api.chunk_kda

        def spy(**arguments):
            seen.append({n: t.dtype for n, t in arguments.items() if isinstance(t, torch.Tensor)})
            return real(**arguments)

        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
            patch.setattr(mindspeed_kda.api, "chunk_kda", spy)
            got = gradients(it, lambda x: it(x)[0], x)
        assert {seen[0][n] for n in ("q", "k", "v", "g", "beta")} == {torch.bfloat16}
        assert {seen[0][n] for n in ("A_log", "dt_bias")} == {torch.float32}
        assert got[0].dtype == torch.bfloat16
        for a, b in zip(got, want, strict=True):
            assert (a.float() - b).norm() < 0.1 * b.norm()
        assert [t.dtype for t in got[1:]] == [t.dtype for t in want[1:]]

    def test_the_op_itself_is_not_autocast(self):
        """Float32 inputs inside an autocast region give float32's precision."""
        x, _, _ = kda_inputs(T=20, K=8, V=8, BT=16)
        want, _ = mindspeed_kda.chunk_kda(**x)
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = mindspeed_kda.chunk_kda(**x)
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    it, x = layer(), batch()
    plain = gradients(it, lambda x: it(x)[0], x)

    def run(x):
        return checkpoint(lambda x: it(x)[0], x, use_reentrant=reentrant)

    y = run(x)
    y.square().sum().backward()  # the reentrant kind serves backward() only
    got = [y.detach(), x.grad, *(p.grad for p in it.parameters())]
    same(got, plain)


def test_checkpointing_keeps_nothing_of_the_op():
    """Between forward and backward no tensor of the op is alive: the layer's own inputs are all that is saved."""
    it, x = layer(), batch()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checkpoint(lambda x: it(x)[0], x, use_reentrant=False)
    assert not kept or max(t.numel() for t in kept) <= x.numel()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes found with DDP and FSDP2, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(distributed_worker.RANKS)
    ]
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert all(p.returncode == 0 for p in processes), "\n".join(e[-2000:] for e in errors)
    return [torch.load(folder / f"{rank}.pt") for rank in range(distributed_worker.RANKS)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradients_of_one(kind, ranks):
    model, x, target = distributed_worker.model_and_batch()
    distributed_worker.loss_of(model, x, target).backward()
    want = distributed_worker.gradients_of(model)
    for found in ranks:
        assert found[kind].keys() == want.keys()
        for name, grad in found[kind].items():
            torch.testing.assert_close(grad, want[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
