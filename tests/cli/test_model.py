"""The demo's model, text, training and captured inputs."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from mindspeed_kda.demo import real_inputs, text
from mindspeed_kda.demo.model import ByteModel, Config
from mindspeed_kda.demo.train import Plan, held_out_loss, sample, train
from mindspeed_kda.testing.capture import op_inputs
from mindspeed_kda.testing.judge import SUBJECTS

TINY = Config(width=32, layers=2, heads=1, value_heads=2, key_size=16, value_size=8, mlp=32, chunk_size=16)


def model(**changes):
    torch.manual_seed(0)
    return ByteModel(Config(**{**TINY.__dict__, **changes}))


def tokens(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cut", [1, 2, 17, 32, 39])
def test_a_carried_state_equals_one_pass(cut):
    net, x = model(), tokens(2, 40)
    whole, _ = net(x)
    first, states = net(x[:, :cut], keep=True)
    second, _ = net(x[:, cut:], states)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-4)


def test_the_model_is_causal_and_reads_the_past():
    net, x = model(), tokens(1, 40)
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    difference = (net(x)[0] - net(changed)[0]).abs().amax(2)[0]
    assert (difference[:10] == 0).all()
    assert (difference[10:30] > 0).all(), "twenty tokens on, the change is still seen: far beyond the convolution"


def test_zero_kda_sees_one_byte_at_a_time():
    net, x = model(zero_kda=True), tokens(1, 40)
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    difference = (net(x)[0] - net(changed)[0]).abs().amax(2)[0]
    assert difference.nonzero().flatten().tolist() == [10]


def test_held_out_loss_counts_every_byte_once():
    net, x = model(), tokens(151)
    logits, _ = net(x[None, :-1])
    expected = F.cross_entropy(logits[0], x[1:]).item()
    assert held_out_loss(net, x, rows=1, length=32) == pytest.approx(expected, rel=1e-5)
    assert held_out_loss(net, x, rows=3, length=16) == pytest.approx(expected, rel=0.05)


def test_training_learns_and_repeats():
    x = torch.tensor(list(b"abcdefgh" * 100))
    runs = []
    for _ in range(2):
        net = model()
        runs.append(train(net, x, Plan(steps=20, rows=2, length=32, rate=1e-2)).losses)
    assert runs[0] == runs[1]
    assert runs[0][-1] < 0.5 * runs[0][0]


def test_time_ends_training_annealed():
    history = train(model(), tokens(500), Plan(steps=10_000, seconds=0.3, rows=1, length=16))
    assert history.cut_short
    assert 1 <= len(history.losses) < 10_000


def test_a_loss_that_is_not_finite_stops():
    with pytest.raises(FloatingPointError, match="at step"):
        train(model(), tokens(500), Plan(steps=50, rows=1, length=16, rate=math.inf))


def test_the_learning_rate_rises_then_falls():
    plan = Plan(rate=1.0, warmup=0.1)
    assert plan.rate_at(0.05) == pytest.approx(0.5)
    assert plan.rate_at(0.1) == pytest.approx(1.0)
    assert plan.rate_at(1.0) == pytest.approx(0.05)
    assert plan.rate_at(2.0) == pytest.approx(0.05)


def test_sampling_repeats_by_seed():
    net, prompt = model(), tokens(20)
    first, second = (list(sample(net, prompt, 5, seed=3)) for _ in range(2))
    assert first == second
    assert all(0 <= byte < 256 for byte in first)


def test_bigram_entropy():
    assert text.bigram_entropy(torch.tensor([1, 2] * 50)) == pytest.approx(0.0, abs=1e-12)
    assert text.bigram_entropy(torch.randint(0, 2, (200_000,))) == pytest.approx(math.log(2), abs=1e-3)


def test_the_documentation_is_plain_text_cut_into_two():
    read = text.load(None, shortest=1000)
    assert len(read) > 300_000
    assert len(read.held_out) == len(read) // 10
    assert not re.search(r"^[*=~^-]{4,}$", text.python_documentation(), re.MULTILINE), "rules under headings are gone"
    assert 2.3 < text.bigram_entropy(torch.cat((read.train, read.held_out))) < 2.6


def test_captured_inputs_are_those_of_training():
    net, x = model(), tokens(2, 41)
    calls = real_inputs.record(net, x[:, :-1], x[:, 1:])
    assert len(calls) == TINY.layers
    for layer, call in zip(net.kda_layers, calls, strict=True):
        assert torch.equal(call.arguments["A_log"], layer.A_log), "first layer first"
        assert 0.5 < call.do.square().mean().sqrt() < 2.0, "scaled as by loss scaling"
        kwargs = op_inputs(call)
        A = kwargs["A"][:, :16].transpose(1, 2)
        assert torch.equal(A, A.tril()), "A is the inverse of a unit lower triangular matrix"
        assert torch.equal(A.diagonal(dim1=2, dim2=3), torch.ones_like(A[..., 0]))
        assert (kwargs["g"].diff(dim=1)[:, :15] <= 0).all(), "g falls inside a chunk"
        assert kwargs["h"][:, 0].abs().max() == 0
        assert kwargs["h"][:, 1:].abs().min(dim=1).values.max() > 0
    assert all(p.grad is None for p in net.parameters())


def test_packing_keeps_tokens_and_cuts_sequences():
    net, x = model(), tokens(2, 41)
    call = real_inputs.record(net, x[:, :-1], x[:, 1:])[0]
    packed = real_inputs.packed(call, [0, 33, 1, 40])
    assert packed.arguments["cu_seqlens"].tolist() == [0, 0, 33, 34, 74]
    assert torch.equal(packed.arguments["q"][0, 40:], call.arguments["q"][1])
    subject = SUBJECTS["chunk_kda_bwd_wy_dqkg_fused"]
    kwargs = op_inputs(packed)
    assert all(not v.misses for v in subject.verdicts(kwargs, subject.run(kwargs, "torch")))
    with pytest.raises(ValueError, match="sum to at most 80 tokens, got 81"):
        real_inputs.packed(call, [81])


def test_a_zeroed_model_has_no_inputs_to_capture():
    x = tokens(1, 20)
    with pytest.raises(RuntimeError, match="KDA output is zeroed"):
        real_inputs.record(model(zero_kda=True), x, x)
