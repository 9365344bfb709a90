"""State-space layers, recurrent nets and Hyena: how they start, and what plain forms do not say of them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mixers.base import Shape
from mixers.hyena import Hyena
from mixers.lru import LRU
from mixers.lstm import LSTM
from mixers.m2rnn import M2RNN
from mixers.mamba import Mamba
from mixers.ops.convolution import DIRECT, direct_convolution, fft_convolution
from mixers.ops.slstm import slstm
from mixers.parts import MixerLayer
from mixers.s5 import S5, hippo_normal
from mixers.slstm import SLSTM

SHAPE = Shape(width=6, mlp_width=12)
LAYERS: list[type[MixerLayer]] = [Mamba, S5, LRU, LSTM, SLSTM, M2RNN, Hyena]


def build(layer: type[MixerLayer], **values: object) -> MixerLayer:
    torch.manual_seed(0)
    heads = {"heads": 2} if hasattr(layer.Config, "heads") else {}
    return layer(layer.Config(**heads | values), SHAPE).double()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lstm_is_that_of_pytorch() -> None:
    layer, other = build(LSTM), torch.nn.LSTM(6, 6, batch_first=True).double()
    weights = {"weight_ih_l0": layer.input.weight, "weight_hh_l0": layer.recurrent.weight, "bias_ih_l0": layer.bias}
    other.load_state_dict({name: w.detach() for name, w in weights.items()} | {"bias_hh_l0": torch.zeros(24)})
    x = normal(3, 9, 6)
    torch.testing.assert_close(layer.mix(x), other(x)[0] @ layer.out.weight.T)


def test_lstm_opens_its_forget_gates_at_the_start() -> None:
    input_K, forget_K, cell_K, output_K = build(LSTM).bias.chunk(4)
    assert (forget_K == 1).all()
    assert not torch.cat([input_K, cell_K, output_K]).any()


def test_slstm_starts_without_recurrent_weights_and_with_forget_gates_from_open_to_shut() -> None:
    layer = build(SLSTM)
    assert not layer.recurrent_HGK.any()
    i_HK, f_HK, z_HK, o_HK = layer.bias.view(2, 4, 3).unbind(1)
    assert not torch.cat([i_HK, z_HK, o_HK]).any()
    torch.testing.assert_close(f_HK, torch.tensor([5.0, 5 - 12 * 0.5**0.3, -7.0]).expand(2, 3).double())


def test_slstm_gives_gates_of_any_size_their_share_of_the_past() -> None:
    """exp(±500) overflows float32; what the larger input gate has written remains."""
    layer = build(SLSTM).float()
    inputs_HBTG = torch.zeros(2, 1, 2, 12)
    inputs_HBTG[0, :, 0, :3], inputs_HBTG[1, :, :, :3] = 500, torch.tensor([-500.0, 500.0])[:, None]
    inputs_HBTG[:, :, :, 6:9] = torch.tensor([1.0, -1.0])[:, None]
    h_HBTK = slstm(inputs_HBTG, layer.recurrent_HGK, torch.zeros(2, 12))
    for head, written in enumerate((1.0, -1.0)):
        torch.testing.assert_close(h_HBTK[head, 0, 1], torch.full((3,), 0.5 * math.tanh(written)))


def test_m2rnn_starts_with_the_identity() -> None:
    assert torch.equal(build(M2RNN, key_size=4).state_HVV, torch.eye(3).double().expand(2, 3, 3))


def test_lru_starts_on_its_ring_with_states_of_unit_scale() -> None:
    layer = build(LRU, state_size=4000, r_min=0.5, r_max=0.9, max_phase=0.3)
    decay, gain = (y.detach() for y in layer.dynamics())
    assert 0.5 <= decay.abs().min() < 0.51
    assert 0.89 < decay.abs().max() <= 0.9
    assert 0 <= decay.angle().min() < decay.angle().max() <= 0.3
    torch.testing.assert_close(
        decay.abs().square().mean(), torch.tensor((0.5**2 + 0.9**2) / 2).double(), rtol=0.02, atol=0
    )
    stationary = gain.square() / (1 - decay.abs().square())
    torch.testing.assert_close(stationary, torch.ones_like(stationary), rtol=1e-5, atol=0)


@pytest.mark.parametrize("states", [2, 6, 64])
def test_s5_starts_at_the_normal_part_of_hippo_legs(states: int) -> None:
    """Built from the published LegS matrix and its rank-one term (arXiv:2206.11893); one of each conjugate pair."""
    n = torch.arange(states).double()
    legs = -torch.sqrt(torch.outer(2 * n + 1, 2 * n + 1)).tril(-1) - torch.diag(n + 1)
    low_rank = torch.sqrt(n + 0.5)
    matrix = (legs + torch.outer(low_rank, low_rank)).to(torch.complex128)
    values, vectors = hippo_normal(states)
    torch.testing.assert_close(matrix @ vectors, vectors * values)
    torch.testing.assert_close(values.real, torch.full_like(values.real, -0.5))
    assert (values.imag > 0).all()
    both = torch.cat([vectors, vectors.conj()], dim=1)
    torch.testing.assert_close(both.mH @ both, torch.eye(states, dtype=both.dtype), atol=1e-12, rtol=0)


def test_s5_is_the_real_system_sampled_by_zero_order_hold() -> None:
    """The diagonal form against matrix exponentials of a real state matrix with the same eigenvalues."""
    layer, states, step = build(S5, state_size=8), 8, 0.2
    layer.log_dt.data.fill_(math.log(step))
    values, vectors = hippo_normal(states)
    A = (vectors * values @ vectors.mH).real * 2
    B = (vectors @ torch.complex(*layer.B.weight.detach().chunk(2))).real * 2
    C = (torch.complex(*layer.C.weight.detach().chunk(2, dim=1)).conj() @ vectors.mH).real
    A_bar = torch.linalg.matrix_exp(step * A)
    B_bar = torch.linalg.solve(A, (A_bar - torch.eye(states).double()) @ B)
    x, h, want = normal(9, 6), torch.zeros(states).double(), []
    for x_D in x:
        h = A_bar @ h + B_bar @ x_D
        want.append(layer.activate(C @ h + layer.skip * x_D))
    torch.testing.assert_close(layer.mix(x[None])[0], torch.stack(want), rtol=1e-6, atol=1e-6)


def test_s5_starts_with_its_time_steps_and_maps_of_unit_scale() -> None:
    """The real maps of the real system, recovered as above: ``C h`` has the scale of h and ``B x`` that of x."""
    torch.manual_seed(0)
    layer = S5(S5.Config(state_size=200, dt_min=0.01, dt_max=0.3), Shape(width=50)).double()
    dt = layer.log_dt.exp()
    assert 0.01 <= dt.min() < 0.013
    assert 0.25 < dt.max() <= 0.3
    assert 0.03 < dt.median() < 0.1  # the middle in the logarithm is 0.055
    _, vectors = hippo_normal(200)
    B = (vectors @ torch.complex(*layer.B.weight.chunk(2))).real * 2
    C = (torch.complex(*layer.C.weight.chunk(2, dim=1)).conj() @ vectors.mH).real
    assert B.std().item() == pytest.approx(50**-0.5, rel=0.03)
    assert C.std().item() == pytest.approx(200**-0.5, rel=0.03)


def test_mamba_starts_with_the_published_decays_and_time_steps() -> None:
    layer = build(Mamba, state_size=5)
    torch.testing.assert_close(layer._dynamics()[0], -torch.arange(1.0, 6).double().expand(12, 5), rtol=1e-6, atol=0)
    dt = torch.nn.functional.softplus(layer.dt.bias)
    assert (dt > 0.0009).all()
    assert (dt < 0.1001).all()


def toeplitz(h: Tensor) -> Tensor:
    """Matrices (D, T, T) with h_{t-s} at row t and column s."""
    return torch.stack(
        [torch.stack([torch.roll(h[:, d], s) for s in range(len(h))], 1).tril() for d in range(h.shape[1])]
    )


@pytest.mark.parametrize("convolution", [direct_convolution, fft_convolution])
@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_long_convolution_is_a_toeplitz_product(convolution: Callable[..., Tensor], length: int) -> None:
    """Outputs and gradients, alone and as runs under vmap."""
    x, h = normal(3, 2, length, 5).requires_grad_(), normal(3, length, 5, seed=2).requires_grad_()
    want = torch.stack(
        [torch.einsum("dts,bsd->btd", toeplitz(filters), inputs) for inputs, filters in zip(x, h, strict=True)]
    )
    got = torch.func.vmap(convolution)(x, h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(convolution(x[0], h[0]), want[0])
    gradients = [torch.autograd.grad(y.square().sum(), (x, h)) for y in (got, want)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_hyena_filters_start_at_the_frequency_of_the_settings() -> None:
    assert (build(Hyena, frequency=2.0).filters.frequency == 2).all()


def test_hyena_decodes_beyond_the_length_from_which_it_uses_the_fft() -> None:
    layer, x = build(Hyena), normal(2, DIRECT + 10, 6)
    state, outputs = layer.init_state(2), []
    with torch.no_grad():
        for x_BD in x.unbind(1):
            y, state = layer.mix_one(x_BD, state)
            outputs.append(y)
        torch.testing.assert_close(torch.stack(outputs, 1), layer.mix(x), rtol=1e-11, atol=1e-11)
    assert state["past"].shape == (2, DIRECT + 10, 1, 6)


@pytest.mark.parametrize("layer", LAYERS)
def test_long_float32_sequences_stay_near_float64(layer: type[MixerLayer]) -> None:
    double = build(layer)
    single = build(layer).float()
    x = normal(1, 700, 6)
    with torch.no_grad():
        torch.testing.assert_close(single.mix(x.float()).double(), double.mix(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_recurrences_keep_float32_under_autocast(layer: type[MixerLayer]) -> None:
    """Only products with weights are in bfloat16: the error does not grow with the length."""
    single, x = build(layer).float(), normal(2, 200, 6).float()
    with torch.no_grad():
        exact = single.mix(x)
        with torch.autocast("cpu", torch.bfloat16):
            error = (single.mix(x).float() - exact).square().mean((0, 2)).sqrt()
            state = single.init_state(2)
            for x_BD in x.unbind(1):
                _, state = single.mix_one(x_BD, state)
    scale = exact.square().mean().sqrt()
    assert error.max() < 0.1 * scale
    assert all(y.dtype in (torch.float32, torch.complex64) for name, y in state.items() if name != "convolution")
