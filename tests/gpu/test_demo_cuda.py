"""The demo trains on the native step where there is an NVIDIA GPU, and learns there what it learns on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mindspeed_kda.cli import demo
from mindspeed_kda.demo import text
from mindspeed_kda.demo.model import ByteModel, Config
from mindspeed_kda.demo.train import Plan, train
from mindspeed_kda.registry import REGISTRY

pytestmark = pytest.mark.gpu
CONFIG = Config(key_size=64, value_size=64, chunk_size=64, main=torch.bfloat16)
PLAN = Plan(steps=25, rows=2, length=150)


def losses(config: Config, device: str) -> list[float]:
    torch.manual_seed(PLAN.seed)
    model = ByteModel(config).to(device)
    return train(model, text.load(None, shortest=20 * PLAN.length).train, PLAN).losses


def test_the_native_step_is_chosen_for_the_large_model() -> None:
    device = torch.device("cuda")
    assert demo.chosen_backend(demo.model_config(device, None, None, None), device) == "cuda"


def test_the_loss_falls_as_it_does_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference in float32. bfloat16 layers and autocast alone move a step's loss by up to 0.006."""
    plan = REGISTRY.of("chunk_kda")["cuda"].load()
    backward, calls = plan.backward, []

    def counted(*args: object) -> object:
        calls.append(args)
        return backward(*args)

    monkeypatch.setattr(plan, "backward", counted)
    got = losses(CONFIG, "cuda")
    assert len(calls) == PLAN.steps * CONFIG.layers
    expected = losses(dataclasses.replace(CONFIG, main=torch.float32), "cpu")
    apart = [abs(a - b) for a, b in zip(got, expected, strict=True)]
    assert expected[0] - expected[-1] > 1.0
    assert max(apart) < 0.03
    assert sum(apart) / len(apart) < 0.008
