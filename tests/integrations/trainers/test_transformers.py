"""Transformers' real KDA models, tiny and random, on a CPU: loss, gradients and generation with and without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMON = """
import sys
sys.modules["fla"] = None  # else Transformers takes flash-linear-attention's functions, which need a GPU
import torch, transformers
import mindspeed_kda
from mindspeed_kda.integrations import transformers as integration

torch.manual_seed(0)
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16, num_local_experts=4, num_experts=4, num_experts_per_tok=2, linear_head_dim=16,
    linear_num_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=256,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
calls = []
for name in ("chunk_kda", "fused_recurrent_kda"):
    real = getattr(mindspeed_kda, name)
    def spy(*args, _real=real, _name=name, **kwargs):
        calls.append(_name)
        return _real(*args, **kwargs)
    setattr(mindspeed_kda, name, spy)
"""
RUN = """
model = Model(Config(**{n: v for n, v in sizes.items() if n in Config.__dataclass_fields__ or n in FORCE}))
ids = torch.randint(3, 64, (2, 70))
mask = torch.ones_like(ids)
mask[1, :5] = 0

def step():
    model.zero_grad()
    model.train()
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        text = model.eval().generate(ids[:, :9], max_new_tokens=6, do_sample=False, min_new_tokens=6)
    return loss, grads, text

before = step()
assert not calls
found = integration.enable(backend="torch")
assert NAME in found, found
with_ours = step()
assert calls.count("chunk_kda") >= 4 and calls.count("fused_recurrent_kda") >= 10, calls
assert abs(before[0] - with_ours[0]) < 1e-5 * before[0]
for n, g in before[1].items():
    assert (g - with_ours[1][n]).norm() <= 1e-3 * g.norm() + 1e-9, n
assert torch.equal(before[2], with_ours[2])
integration.disable()
calls.clear()
again = step()
assert not calls and torch.equal(again[0], before[0])
print("same", NAME)
"""
MODELS = {"kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM")}


def run(code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_trains_and_generates_the_same(name):
    config, model = MODELS[name]
    head = f"{COMMON}\nNAME, FORCE = {name!r}, ()\nConfig, Model = transformers.{config}, transformers.{model}\n"
    done = run(head + RUN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"same {name}" in done.stdout


def test_all_models_of_this_version_are_found_and_restored():
    code = COMMON + (
        "import importlib, pathlib\n"
        "root = pathlib.Path(transformers.__file__).parent / 'models'\n"
        "files = [p for p in root.glob('*/modeling_*.py') if 'def chunk_kimi_delta' in p.read_text()]\n"
        "there = sorted(p.parent.name for p in files)\n"
        "modules = [importlib.import_module(f'transformers.models.{n}.modeling_{n}') for n in there]\n"
        "before = [m.chunk_kimi_delta_attention for m in modules]\n"
        "assert sorted(integration.enable()) == there == sorted(integration.MODELS), there\n"
        "assert integration.enable(['kimi_linear']) == ('kimi_linear',)\n"
        "assert all(m.chunk_kimi_delta_attention is not b for m, b in zip(modules, before))\n"
        "integration.disable()\n"
        "assert all(m.chunk_kimi_delta_attention is b for m, b in zip(modules, before))\n"
        "for wrong, error in ((dict(models=['bert']), ImportError), (dict(backend='abacus'), ValueError)):\n"
        "    try:\n"
        "        integration.enable(**wrong)\n"
        "    except error as e:\n"
        "        print('refused:', e)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused:") == 2
