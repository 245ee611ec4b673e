"""flash-linear-attention's layer and a small KDA language model on a GPU, with this package and without.

Needs fla-core, flash-linear-attention's layers and einops beside torch and Triton. Both sides run in bfloat16, so that
they differ by bfloat16's rounding and nothing more.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mindspeed_kda
from mindspeed_kda.integrations import fla as integration
from mindspeed_kda.nn import KimiDeltaAttention
from mindspeed_kda.registry import REGISTRY

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "head_dim": 64, "num_heads": 4}


def fla_layer(**options):
    from fla.layers.kda import KimiDeltaAttention as FlaLayer

    return FlaLayer(**{**SIZES, **options})


@pytest.fixture(params=integration.FUNCTIONS)
def served(request, monkeypatch):
    """Serves one of the two functions and counts its calls; on the torch backend where no other serves it on CUDA."""
    name, calls = request.param, []
    real = getattr(mindspeed_kda, name)

    def spy(*args, **kwargs):
        calls.append(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(mindspeed_kda, name, spy)
    fast = [b for b in REGISTRY.of(name).values() if b.name != "torch" and b.rank("cuda") is not None]

    def enable():
        integration.enable([name], backend=None if fast else "torch")

    yield enable, calls
    integration.disable()


def rms_ratio(a, b):
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt().clamp(min=1e-12))


@pytest.mark.parametrize(
    "options", [{}, {"num_v_heads": 8, "allow_neg_eigval": True}, {"safe_gate": True, "lower_bound": -5.0}]
)
def test_the_layer_gives_the_same(served, options):
    enable, calls = served
    torch.manual_seed(0)
    layer = fla_layer(**options).cuda().bfloat16().train()
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for on in (False, True):
        enable() if on else integration.disable()
        y = layer(x)[0]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    assert calls
    for a, b, name in zip(*results, ["y", "x", *(n for n, _ in layer.named_parameters())], strict=True):
        assert rms_ratio(b, a) < 3e-2, name


def test_own_layer_takes_their_weights():
    torch.manual_seed(0)
    theirs = fla_layer().cuda().bfloat16().train()
    own = KimiDeltaAttention(**SIZES).cuda().bfloat16()
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    assert rms_ratio(own(x)[0], theirs(x)[0]) < 3e-2


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=128, width=256, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.kda = nn.ModuleList(fla_layer() for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )

    def forward(self, ids):
        x = self.embedding(ids)
        for i, (kda, mlp) in enumerate(zip(self.kda, self.mlp, strict=True)):
            x = x + kda(self.norms[2 * i](x))[0]
            x = x + mlp(self.norms[2 * i + 1](x))
        return F.linear(x, self.embedding.weight)


def train(steps=60):
    """Losses of a model that learns to repeat the first half of each sequence."""
    torch.manual_seed(1)
    model = LanguageModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        half = torch.randint(0, 128, (8, 64), generator=generator)
        ids = torch.cat((half, half), 1).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return torch.tensor(losses)


def test_a_language_model_trains_along_the_same_curve(served):
    enable, calls = served
    integration.disable()
    without = train()
    assert not calls
    enable()
    with_ours = train()
    assert len(calls) >= 2 * 60
    assert without[-1] < 0.9 * without[0]
    curves = f"without {without[::10].tolist()}, with {with_ours[::10].tolist()}"
    assert ((with_ours - without).abs() < 0.03 * without).all(), curves
