"""The layer: its parametrisation written out once more in float64, generation, packing, parameter names, dtypes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mindspeed_kda.nn import GatedRMSNorm, KimiDeltaAttention, ShortConvolution
from mindspeed_kda.testing.oracle import recurrence

SIZES = {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5}
VARIANTS = {
    "softplus": {},
    "bound": {"safe_gate": True, "lower_bound": -5.0, "conv_bias": True},
    "negative": {"allow_neg_eigval": True, "conv_size": 3},
    "no_convolution": {"use_short_conv": False},
}


def layer(variant="softplus", dtype=torch.float64, seed=0, **more):
    torch.manual_seed(seed)
    it = KimiDeltaAttention(**SIZES, **VARIANTS[variant], chunk_size=16, **more).to(dtype)
    with torch.no_grad():
        it.o_norm.weight.uniform_(0.5, 1.5)
    return it


def hidden(B=2, T=21, dtype=torch.float64, seed=1):
    return torch.randn(B, T, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def published(it, x):
    """The layer of arXiv 2510.26692 written out, token by token."""

    def convolve(y, conv):
        if conv is None:
            return F.silu(y)
        W, rows = conv.weight.shape[2], []
        for t in range(y.shape[1]):
            taps = [y[:, t - j] * conv.weight[:, 0, W - 1 - j] for j in range(W) if t - j >= 0]
            rows.append(sum(taps) + (0 if conv.bias is None else conv.bias))
        return F.silu(torch.stack(rows, 1))

    q, k, v = (
        convolve(p(x), c) for p, c in ((it.q_proj, it.q_conv1d), (it.k_proj, it.k_conv1d), (it.v_proj, it.v_conv1d))
    )
    o, _ = recurrence(
        q.unflatten(2, (2, 8)),
        k.unflatten(2, (2, 8)),
        v.unflatten(2, (4, 12)),
        it.f_proj(x).unflatten(2, (4, 8)),
        it.b_proj(x),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=it.allow_neg_eigval,
        lower_bound=it.lower_bound,
        A_log=it.A_log,
        dt_bias=it.dt_bias,
    )
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * it.o_norm.weight
    return it.o_proj((o * it.g_proj(x).unflatten(2, (4, 12)).sigmoid()).flatten(2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_the_published_ones(variant):
    it, x = layer(variant), hidden().requires_grad_()
    y, state = it(x)
    assert state is None
    ref = published(it, x)
    torch.testing.assert_close(y, ref, rtol=1e-9, atol=1e-11)
    weights = torch.randn_like(ref)
    tensors = {"x": x, **dict(it.named_parameters())}
    got, want = (torch.autograd.grad((t * weights).sum(), list(tensors.values())) for t in (y, ref))
    for name, a, b in zip(tensors, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pieces", [[21], [1] * 21, [13, 1, 1, 6], [2, 19], [20, 1]])
def test_generation_step_by_step(variant, pieces):
    it, x = layer(variant), hidden()
    with torch.no_grad():
        whole, _ = it(x)
        state, out = None, []
        for part in x.split(pieces, dim=1):
            y, state = it(part, state, keep_state=True)
            out.append(y)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_is_one_by_one(variant):
    it, lengths = layer(variant), [5, 0, 1, 12]
    x = hidden(1, 21)
    cu = torch.tensor([0, 5, 5, 6, 18], dtype=torch.int32)
    whole, state = it(x, cu_seqlens=cu, keep_state=True)
    begin = 0
    for n, length in enumerate(lengths):
        y, one = it(x[:, begin : begin + length], keep_state=True)
        torch.testing.assert_close(whole[:, begin : begin + length], y, rtol=1e-9, atol=1e-11)
        for got, want in zip(state, one, strict=True):
            if want is not None:
                torch.testing.assert_close(got[n], want[0], rtol=1e-9, atol=1e-11)
        begin += length
    more = hidden(1, 8, seed=5)
    again = torch.tensor([0, 2, 5, 5, 8])
    went_on, _ = it(more, state, cu_seqlens=again)
    _, first = it(x[:, :5], keep_state=True)
    y, _ = it(more[:, :2], first)
    torch.testing.assert_close(went_on[:, :2], y, rtol=1e-9, atol=1e-11)


def test_packed_gradients_stay_inside_their_sequence():
    it, x = layer(), hidden(1, 12).requires_grad_()
    y, _ = it(x, cu_seqlens=torch.tensor([0, 5, 12]))
    (g,) = torch.autograd.grad(y[:, 5:].sum(), x)
    assert (g[:, :5] == 0).all()
    assert (g[:, 5:] != 0).any(-1).all()


def test_names_and_shapes_are_flash_linear_attentions():
    shapes = {n: tuple(t.shape) for n, t in layer("bound").state_dict().items()}
    assert shapes == {
        "q_proj.weight": (16, 24),
        "k_proj.weight": (16, 24),
        "v_proj.weight": (48, 24),
        "q_conv1d.weight": (16, 1, 4),
        "q_conv1d.bias": (16,),
        "k_conv1d.weight": (16, 1, 4),
        "k_conv1d.bias": (16,),
        "v_conv1d.weight": (48, 1, 4),
        "v_conv1d.bias": (48,),
        "f_proj.0.weight": (12, 24),
        "f_proj.1.weight": (32, 12),
        "b_proj.weight": (4, 24),
        "A_log": (4,),
        "dt_bias": (32,),
        "g_proj.0.weight": (12, 24),
        "g_proj.1.weight": (48, 12),
        "g_proj.1.bias": (48,),
        "o_norm.weight": (12,),
        "o_proj.weight": (24, 48),
    }


def test_initial_gate():
    it = KimiDeltaAttention(hidden_size=16, head_dim=32, num_heads=8)
    steps = F.softplus(it.dt_bias)
    assert (it.A_log >= 0).all()
    assert (it.A_log <= math.log(16) + 1e-6).all()
    assert (steps >= 0.999e-3).all()
    assert (steps <= 1.001e-1).all()
    assert it.A_log._no_weight_decay
    assert it.dt_bias._no_weight_decay
    assert (layer("bound").A_log == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype):
    it, x = layer(dtype=torch.float64), hidden()
    ref, _ = it(x)
    y, state = it.to(dtype)(x.to(dtype), keep_state=True)
    assert y.dtype == dtype
    assert state.memory.dtype == torch.float32
    limit = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (y.double() - ref).square().mean().sqrt() < limit * ref.square().mean().sqrt()


def test_backend_reaches_the_op():
    with pytest.raises(ValueError, match="backend: expected one of"):
        layer(backend="abacus")(hidden())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expand_v": 0.3}, "expand_v: expected head_dim"),
        ({"num_v_heads": 3}, "num_v_heads: expected a positive multiple of num_heads = 2, got 3"),
        ({"safe_gate": True}, "lower_bound: expected a number below 0 with safe_gate"),
    ],
)
def test_sizes_that_do_not_fit(wrong, message):
    with pytest.raises(ValueError, match=message):
        KimiDeltaAttention(**{**SIZES, **wrong})


def test_short_convolution_alone():
    torch.manual_seed(0)
    conv = ShortConvolution(6, 4).double()
    x = torch.randn(1, 3, 6, dtype=torch.float64)
    y, state = conv(x)
    assert state.shape == (1, 3, 6)
    torch.testing.assert_close(state, x)
    again, _ = conv(torch.zeros_like(x), state)
    torch.testing.assert_close(again[:, 0], F.silu((x[0].T * conv.weight[:, 0, :3]).sum(1)).unsqueeze(0))
    assert y.shape == x.shape


def test_gated_norm_alone():
    x, gate = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    norm = GatedRMSNorm(5).double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gate.sigmoid()
    torch.testing.assert_close(norm(x, gate), want)
