"""Layers made of the matrix recurrence against the equations of their papers, written out position by position."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.base import Shape
from mixers.deltanet import DeltaNet, GatedDeltaNet
from mixers.deltaproduct import DeltaProduct
from mixers.gdn2 import GatedDeltaNet2
from mixers.gla import GatedLinearAttention
from mixers.kda import KimiDeltaAttention
from mixers.linear_attention import LinearAttention
from mixers.mamba2 import Mamba2
from mixers.mamba3 import Mamba3
from mixers.mlstm import MLSTM
from mixers.parts import MixerLayer, ShortConvolution
from mixers.retnet import RetNet
from mixers.rwkv import RWKV6, RWKV7

FAMILY = [
    *(RetNet, GatedLinearAttention, Mamba2, Mamba3, MLSTM, DeltaNet, GatedDeltaNet, RWKV6, RWKV7),
    *(KimiDeltaAttention, GatedDeltaNet2, DeltaProduct),
]
HEADS, SIZE, LENGTH = 2, 4, 19
WIDTH = HEADS * SIZE


def build(layer: type[MixerLayer], **values: Any) -> Any:
    """A layer with two heads in float64, parameters away from their special starting values."""
    torch.manual_seed(0)
    built = layer(layer.Config(heads=HEADS, **values), Shape(width=WIDTH, mlp_width=8)).double().requires_grad_(False)
    for p in built.parameters():
        p += 0.2 * torch.randn_like(p)
    return built


def sequence(length: int = LENGTH) -> Tensor:
    """One sequence (T, D)."""
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def head(y: Tensor, h: int) -> Tensor:
    """Head h of (..., H K)."""
    return y.chunk(HEADS, dim=-1)[h]


def layer_norm(y: Tensor, eps: float) -> Tensor:
    return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + eps).sqrt()


def rms(y: Tensor) -> Tensor:
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def convolve(y: Tensor, convolution: ShortConvolution) -> Tensor:
    """PyTorch's convolution of (T, D), zeros before the first position."""
    weight, bias = convolution.weight_DW, convolution.bias_D
    padded = F.pad(y.T, (weight.shape[1] - 1, 0))
    return F.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0].T


def check(layer: Any, x: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(layer.mix(x[None])[0], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", FAMILY)
def test_decoding_over_several_chunks_equals_the_parallel_pass(layer: type[MixerLayer]) -> None:
    built, x = build(layer), torch.stack([sequence(37), sequence(37).flip(0)])
    state, outputs = built.init_state(2), []
    for t in range(37):
        y, state = built.mix_one(x[:, t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), built.mix(x), rtol=1e-11, atol=1e-11)


def test_retnet_equals_the_parallel_form_of_the_paper() -> None:
    """(Q K^T ⊙ D) V of equation 5, with Q and K as complex numbers; group norm and gate of equation 8."""
    layer, x = build(RetNet), sequence()
    n = torch.arange(LENGTH, dtype=torch.float64)
    heads = []
    for h in range(HEADS):
        q, k, v = (head(f(x), h) for f in (layer.q, layer.k, layer.v))
        turn = torch.polar(torch.ones(LENGTH, 2).double(), n[:, None] * torch.tensor([1.0, 1e-4]).double())
        Q, K = (torch.complex(y[:, :2], y[:, 2:]) * turn for y in (q, k))
        gamma = 1 - 2.0 ** (-5 - h)
        D = torch.where(n[:, None] >= n, gamma ** (n[:, None] - n), 0.0)
        heads.append(layer_norm(((Q @ K.conj().T).real * D) @ v / SIZE**0.5, 1e-5))
    y = torch.cat(heads, -1) * layer.norm.weight + layer.norm.bias
    want = layer.out(F.silu(layer.gate(x)) * y)  # the layer holds frequencies and decays in float32
    torch.testing.assert_close(layer.mix(x[None])[0], want, rtol=1e-5, atol=1e-5)


def test_gla_equals_a_double_loop() -> None:
    """o_t is the sum over i of (q_t ⊙ the decays between i and t) k_i v_i."""
    layer, x = build(GatedLinearAttention), sequence()
    alpha = torch.sigmoid(layer.decay(x)) ** (1 / 16)
    y = torch.zeros(LENGTH, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        q, k, v, a = (head(z, h) for z in (layer.q(x), layer.k(x), layer.v(x), alpha))
        for t in range(LENGTH):
            for i in range(t + 1):
                weight = (q[t] * k[i] * a[i + 1 : t + 1].prod(0)).sum() / (SIZE / 2) ** 0.5
                head(y, h)[t] += weight * v[i]
    normed = torch.cat([rms(head(y, h)) * layer.norm.gain for h in range(HEADS)], -1)
    check(layer, x, layer.out(F.silu(layer.gate(x)) * normed))


@pytest.mark.parametrize("convolution", [1, 4])
def test_mamba2_equals_its_state_space_model(convolution: int) -> None:
    """h_t = exp(A Δ_t) h_{t-1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t for every channel of every head."""
    layer, u = build(Mamba2, state_size=3, convolution=convolution), sequence()
    z, xBC, raw = layer.inputs(u).split([2 * WIDTH, 2 * WIDTH + 6, HEADS], -1)
    x, B, C = F.silu(convolve(xBC, layer.convolution)).split([2 * WIDTH, 3, 3], -1)
    dt, A = torch.log1p(torch.exp(raw + layer.decay.bias_H)), -torch.exp(layer.decay.log_rate_H)
    y = torch.zeros_like(x)
    for h in range(HEADS):
        for channel in range(2 * SIZE):
            inputs, state = head(x, h)[:, channel], torch.zeros(3, dtype=torch.float64)
            for t in range(LENGTH):
                state = torch.exp(A[h] * dt[t, h]) * state + dt[t, h] * B[t] * inputs[t]
                head(y, h)[t, channel] = C[t] @ state + layer.skip_H[h] * inputs[t]
    check(layer, u, layer.out(rms(y * F.silu(z)) * layer.norm.gain))


@pytest.mark.parametrize("gated", [False, True])
def test_deltanet_equals_the_delta_rule(gated: bool) -> None:
    """S_t = α_t S_{t-1} (I - β_t k_t k_t^T) + β_t v_t k_t^T with values as rows, as the papers write it.

    As in the authors' code, reads are S q / √K, and the norm of the outputs adds 1e-5.
    """
    layer, x = build(GatedDeltaNet if gated else DeltaNet), sequence()
    q, k, v = F.silu(convolve(layer.qkv(x), layer.convolution)).chunk(3, -1)
    beta, alpha = layer.strength(x).sigmoid(), torch.ones(LENGTH, HEADS, dtype=torch.float64)
    if gated:
        alpha = torch.exp(-layer.decay.log_rate_H.exp() * F.softplus(layer.step_size(x) + layer.decay.bias_H))
    y = torch.zeros(LENGTH, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        S = torch.zeros(SIZE, SIZE, dtype=torch.float64)
        for t in range(LENGTH):
            q_t, k_t = (head(z, h)[t] / (head(z, h)[t].square().sum() + 1e-6).sqrt() for z in (q, k))
            b = beta[t, h]
            S = alpha[t, h] * S @ (torch.eye(SIZE) - b * torch.outer(k_t, k_t)) + b * torch.outer(head(v, h)[t], k_t)
            head(y, h)[t] = S @ q_t / SIZE**0.5
    inverse = [(head(y, h).square().mean(-1, keepdim=True) + 1e-5).rsqrt() for h in range(HEADS)]
    normed = torch.cat([head(y, h) * inverse[h] * layer.norm.gain for h in range(HEADS)], -1)
    check(layer, x, layer.out(normed * F.silu(layer.gate(x)) if gated else normed))


def test_deltanet_overwrites_the_value_under_a_key() -> None:
    """At full strength, a key seen again and again returns the newest value, not the sum of all."""
    layer, x = build(DeltaNet, convolution=1), sequence(3)
    x[:, : WIDTH // 2] = x[0, : WIDTH // 2]
    layer.qkv.weight[: 2 * WIDTH, WIDTH // 2 :] = 0
    layer.strength.weight.copy_(100 * x[0] * (torch.arange(WIDTH) < WIDTH // 2))
    state = layer.init_state(1)
    for x_D in x:
        _, state = layer.mix_one(x_D[None], state)
        _, k, v = F.silu(layer.convolution.weight_DW[:, 0] * layer.qkv(x_D)).view(3, HEADS, SIZE)
        returned = torch.einsum("hkv,hk->hv", state["S"][0], F.normalize(k, dim=-1))
        # keys are of length one up to an eps of 1e-6
        torch.testing.assert_close(returned, v, rtol=1e-4, atol=1e-4)


def test_rwkv6_equals_the_equations_of_the_paper() -> None:
    """ddlerp of x_t and x_{t-1}, wkv as a sum over the past with the bonus at its own position."""
    layer, x = build(RWKV6), sequence()
    before = torch.cat([torch.zeros(1, WIDTH).double(), x[:-1]])

    def lora(module: Any, y: Tensor) -> Tensor:
        return module.bias_D + torch.tanh(y @ module.down.weight.T) @ module.up.weight.T

    def ddlerp(name: str) -> Tensor:
        return x + (before - x) * lora(layer.shifts[name], x + (before - x) * layer.shift_D)

    r, k, v, g = (getattr(layer, name)(ddlerp(name)) for name in ("r", "k", "v", "gate"))
    w = torch.exp(-torch.exp(lora(layer.decay, ddlerp("decay"))))
    y = torch.zeros_like(x)
    for h in range(HEADS):
        R, K, V, W, u = (head(z, h) for z in (r, k, v, w, layer.bonus_D))
        for t in range(LENGTH):
            wkv = torch.outer(u * K[t], V[t])
            for i in range(t):
                wkv = wkv + torch.outer(W[i + 1 : t].prod(0) * K[i], V[i])
            head(y, h)[t] = R[t] @ wkv
    normed = torch.cat([layer_norm(head(y, h), 64e-5) for h in range(HEADS)], -1)
    check(layer, x, layer.out(F.silu(g) * (normed * layer.norm.weight + layer.norm.bias)))


def test_rwkv7_equals_the_equations_of_the_paper() -> None:
    """S_t = S_{t-1} (diag(w_t) - κ̂_t^T (a_t ⊙ κ̂_t)) + v_t^T k̃_t with values as rows, and the bonus ρ."""
    layer, x = build(RWKV7), sequence()
    before = torch.cat([torch.zeros(1, WIDTH).double(), x[:-1]])
    x_ = {name: torch.lerp(x, before, mu) for name, mu in layer.shifts_D.items()}
    r, k, v = (getattr(layer, name)(x_[name]) for name in ("r", "k", "v"))
    a = torch.sigmoid(x_["rate"] @ layer.rate.down.weight.T @ layer.rate.up.weight.T + layer.rate.bias_D)
    d = torch.tanh(x_["decay"] @ layer.decay.down.weight.T) @ layer.decay.up.weight.T + layer.decay.bias_D
    g = torch.sigmoid(x_["gate"] @ layer.gate[0].weight.T) @ layer.gate[2].weight.T
    w = torch.exp(-torch.sigmoid(d) / torch.e**0.5)
    kappa, k = k * layer.removal_D, k * torch.lerp(torch.ones_like(a), a, layer.replacement_D)
    p = torch.zeros_like(x)
    for h in range(HEADS):
        R, K, V, A, W, kap, rho = (head(z, h) for z in (r, k, v, a, w, kappa, layer.bonus_D))
        gain, shift = head(layer.norm.weight, h), head(layer.norm.bias, h)
        S = torch.zeros(SIZE, SIZE, dtype=torch.float64)
        for t in range(LENGTH):
            removed = kap[t] / (kap[t].square().sum() + 1e-6).sqrt()
            S = S @ (torch.diag(W[t]) - torch.outer(removed, A[t] * removed)) + torch.outer(V[t], K[t])
            bonus = (R[t] * rho * K[t]).sum() * V[t]
            head(p, h)[t] = layer_norm(S @ R[t], 64e-5) * gain + shift + bonus
    check(layer, x, layer.out(g * p))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_short_convolution_equals_that_of_pytorch(length: int, size: int, bias: bool) -> None:
    torch.manual_seed(0)
    convolution, x = ShortConvolution(WIDTH, size, bias).double(), sequence(length)
    want, state, steps = convolve(x, convolution), convolution.init_state(1), []
    for x_D in x:
        y, state = convolution.step(x_D[None], state)
        steps.append(y[0])
    torch.testing.assert_close(convolution(x[None])[0], want)
    torch.testing.assert_close(torch.stack(steps), want)


@pytest.mark.parametrize(
    ("layer", "values", "message"),
    [
        (RetNet, {"heads": 8}, "heads: 8 must leave heads of even size, not 1"),
        (GatedLinearAttention, {"heads": 8}, "heads: 8 must divide half the model width 8"),
        (Mamba2, {"heads": 2, "state_size": 0}, "state_size: 0 must be at least 1"),
        (
            Mamba3,
            {"heads": 2, "state_size": 4, "rotated": 0.4},
            "rotated: 0.4: rows are rotated in pairs",
        ),
        (MLSTM, {"heads": 2, "block": 3}, "block: 3 must divide the width inside the mixer, 16"),
        (DeltaNet, {"heads": 2, "convolution": 0}, "convolution size: 0 must be at least 1"),
        (DeltaProduct, {"heads": 2, "householders": 0}, "householders: 0 must be at least 1"),
        (RWKV7, {"heads": 2, "rank": 0}, "rank: 0 must be at least 1"),
        (RWKV7, {"heads": 8}, "heads: 8 leave heads of size 1"),
        (RWKV6, {"heads": 2, "shift_rank": 0}, "shift_rank: 0 must be at least 1"),
        (GatedLinearAttention, {"heads": 2, "gate_rank": 0}, "gate_rank: 0, gate_temperature: 16.0: give both > 0"),
    ],
)
def test_bad_settings_are_refused(layer: type[MixerLayer], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(layer.Config(**values), Shape(width=WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_is_finite_where_all_features_of_a_head_vanish(dtype: torch.dtype) -> None:
    """Heads of one channel and weights 50 times as large: features under 1e-40 or rounded to 0 in many positions."""
    torch.manual_seed(0)
    layer = LinearAttention(LinearAttention.Config(heads=WIDTH), Shape(width=WIDTH))
    for projection in (layer.q, layer.k):
        projection.weight.data *= 50
    x_BTD = sequence(64)[None].float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        z_BTD = layer(x_BTD)
    (gradient,) = torch.autograd.grad(z_BTD.sum(), x_BTD)
    assert z_BTD.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("positions", ["none", "sinusoidal"])
def test_linear_attention_equals_weights_of_features_over_their_sum(positions: str) -> None:
    layer, x = build(LinearAttention, positions=positions), sequence()
    if positions == "sinusoidal":
        angle = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        x = x + torch.cat([angle.sin(), angle.cos()], dim=1)
    q, k, v = (x @ p.weight.T for p in (layer.q, layer.k, layer.v))
    outputs = []
    for h in range(HEADS):
        weights = ((F.elu(head(q, h)) + 1) @ (F.elu(head(k, h)) + 1).T).tril()
        outputs.append(weights / weights.sum(1, keepdim=True) @ head(v, h))
    want = torch.cat(outputs, dim=1) @ layer.out.weight.T
    # The codes are float32.
    torch.testing.assert_close(layer.mix(sequence()[None])[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("positions", "told_apart"), [("none", False), ("sinusoidal", True)])
def test_one_layer_of_linear_attention_knows_the_order_of_tokens_by_its_positions(
    positions: str, told_apart: bool
) -> None:
    layer, x = build(LinearAttention, positions=positions), sequence()[None]
    swapped = x[:, [1, 0, *range(2, LENGTH)]]
    difference = (layer(x) - layer(swapped))[:, 2:].abs().amax()
    assert (difference.item() > 1e-3) == told_apart
    assert told_apart or difference < 1e-12


@pytest.mark.parametrize("heads", [1, 2])
def test_mlstm_has_the_same_maps_as_dense_products(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    torch.manual_seed(0)
    layer = MLSTM(MLSTM.Config(heads=heads, block=2), Shape(width=WIDTH, mlp_width=8)).double()
    layer.gates.data.normal_()
    blocks = layer.mix(sequence()[None])
    monkeypatch.setattr("mixers.mlstm.runs_fused", lambda x: True)
    torch.testing.assert_close(layer.mix(sequence()[None]), blocks, rtol=1e-12, atol=1e-12)


def test_rwkv6_has_finite_gradients_at_the_strongest_decays() -> None:
    layer = build(RWKV6)
    layer.decay.bias_D.data.fill_(1000.0)
    x_BTD = sequence()[None].requires_grad_()
    assert torch.autograd.grad(layer(x_BTD).square().sum(), x_BTD)[0].isfinite().all()
