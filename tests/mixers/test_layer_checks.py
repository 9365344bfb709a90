"""What ``check_layer`` and ``check_held`` find in a layer from outside, and what they must not refuse."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.adapt import adapt
from mixers.base import ContractError, Layer, Shape
from mixers.contract import check_held, check_layer, check_seeded, warn_unused
from mixers.transformer import Transformer

CPU = torch.device("cpu")
COUNTER = count()


def of_others(width: int = 16, **members: Any) -> Transformer:
    return type("Other", (Transformer,), members)(Transformer.Config(heads=2), Shape(width=width, mlp_width=32))


def changed(change: Callable[[Tensor], Tensor]) -> Transformer:
    return of_others(forward=lambda self, x: change(Transformer.forward(self, x)))


def refusal(layer: Layer, positions: int = 32) -> str:
    with pytest.raises(ContractError) as caught:
        check_layer("other", layer, CPU, positions)
    return str(caught.value)


def test_small_leaks_are_found_and_rounding_is_allowed() -> None:
    def check(leak: float) -> None:
        check_layer("leaking", changed(lambda z: z + leak * z.roll(-1, 1)), CPU)

    check(1e-7)
    with pytest.raises(ContractError, match="not causal"):
        check(1e-3)


@pytest.mark.parametrize("chunk", [4, 32])
def test_a_leak_inside_chunks_or_beyond_the_first_is_found_at_the_length_of_training(chunk: int) -> None:
    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        inside = x_BTD.unflatten(1, (-1, chunk))
        mean = inside.mean(2, keepdim=True).expand_as(inside).flatten(1, 2)
        late = torch.arange(x_BTD.shape[1])[:, None] >= 32
        return Transformer.forward(self, x_BTD) + torch.where(late, mean, 0.0)

    check_layer("other", of_others(forward=forward), CPU, 32)
    assert "is not causal" in refusal(of_others(forward=forward), 96)


def rounded(x_BTD: Tensor) -> Tensor:
    """In eight bits, with one scale for all."""
    scale = x_BTD.abs().amax() / 127
    return (x_BTD / scale).round() * scale


def saturated(x_BTD: Tensor) -> Tensor:
    """With a scale that only a channel above all that random inputs have changes."""
    return x_BTD / x_BTD.abs().amax((1, 2), keepdim=True).clamp(min=0.9 * x_BTD.shape[-1] ** 0.5)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x / x.abs().amax((1, 2), keepdim=True),
        lambda x: torch.stack([rounded(x_TD) for x_TD in x]),
        saturated,
    ],
)
@pytest.mark.parametrize(("width", "positions"), [(16, 24), (64, 40), (16, 512)])
def test_what_depends_on_all_of_a_sequence_is_refused(
    forward: Callable[[Tensor], Tensor], width: int, positions: int
) -> None:
    """Behind the norm of the standard layer, wherever the maximum of the inputs lies."""

    class Wrong(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.out = nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(forward(x))

    layer = adapt(Wrong)(adapt(Wrong).Config(), Shape(width=width, mlp_width=32))
    assert "is not causal" in refusal(layer, positions)


def states(advance: Callable[[Tensor, Tensor], Tensor], x_BTD: Tensor) -> Tensor:
    """Return all states of a recurrence ``h = advance(h, x)``, which begins with zeros."""
    h, found = torch.zeros_like(x_BTD[:, 0]), []
    for x_BD in x_BTD.unbind(1):
        h = advance(h, x_BD)
        found.append(h)
    return torch.stack(found, 1)


def test_a_chaotic_layer_is_not_refused() -> None:
    """It enlarges rounding, which differs between products of different shapes."""

    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        return states(lambda h, x_BD: torch.tanh(h @ self.weight + x_BD), self.mlp(x_BTD))

    for seed in range(3):
        torch.manual_seed(seed)
        layer = of_others(64, forward=forward, init_state=Layer.init_state)
        layer.weight = nn.Parameter(2 * torch.randn(64, 64) / 64**0.5)
        check_layer("other", layer, CPU, 128)


def test_a_layer_that_rounds_numbers_is_not_refused() -> None:
    """A mean that forgets, of a product's numbers in eight bits; rounding makes them leap."""

    def eight_bits(self: Transformer, y: Tensor) -> Tensor:
        y = y @ self.weight
        scale = y.abs().amax(-1, keepdim=True) / 127
        return (y / scale).round() * scale

    def step(self: Transformer, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        h = 0.9 * state["h"] + 0.1 * eight_bits(self, x_BD)
        return h, {"h": h}

    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        return states(lambda h, y_BD: 0.9 * h + 0.1 * y_BD, eight_bits(self, x_BTD))

    members = {"init_state": lambda self, batch: {"h": torch.zeros(batch, 128)}, "step": step, "forward": forward}
    for seed in range(2):
        torch.manual_seed(seed)
        layer = of_others(128, **members)
        layer.weight = nn.Parameter(torch.randn(128, 128) / 128**0.5)
        check_layer("other", layer, CPU, 512)


def summing(
    forward: Callable[[Transformer, Tensor], Tensor], output: Callable[[Tensor, Tensor], Tensor]
) -> Transformer:
    """Return a layer whose step computes its output from the input and the sum of all inputs so far."""

    def step(self: Transformer, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        total = state["total"] + x_BD
        return output(x_BD, total), {"total": total}

    return of_others(forward=forward, step=step, init_state=lambda self, batch: {"total": torch.zeros(batch, 16)})


@pytest.mark.parametrize("gain", [1.0, 100.0, 1000.0])
def test_a_small_fault_of_a_step_is_found_however_steep_the_layer(gain: float) -> None:
    layer = summing(lambda self, x: (gain * x.cumsum(1)).sin(), lambda x, total: 1.001 * (gain * total).sin())
    assert "step gives another output" in refusal(layer, 256)


def test_small_rates_keep_their_signs() -> None:
    """With others the sum would grow from position to position, and its rounding in a convolution reach all of them."""

    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        length = x_BTD.shape[1]
        kernel_TD = torch.exp(-self.rates * torch.arange(length)[:, None])
        spectrum = torch.fft.rfft(kernel_TD, 2 * length, 0) * torch.fft.rfft(x_BTD, 2 * length, 1)
        return torch.fft.irfft(spectrum, 2 * length, 1)[:, :length]

    for seed in range(4):
        torch.manual_seed(seed)
        layer = of_others(forward=forward, init_state=Layer.init_state)
        layer.rates = nn.Parameter(torch.logspace(-3, -1, 16))
        check_layer("other", layer, CPU, 512)


@pytest.mark.parametrize("chunk", [16, 256])
def test_a_parallel_form_that_forgets_its_state_between_chunks_is_refused(chunk: int) -> None:
    layer = summing(
        lambda self, x: x + torch.cat([part.cumsum(1) for part in x.split(chunk, 1)], 1), lambda x, total: x + total
    )
    assert f"step gives another output at position {chunk} than forward" in refusal(layer, 2 * chunk)


attend = Transformer.forward
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Tensor], int, str]] = {
    "a gate that starts closed": (
        *(lambda self, x: attend(self, x) + F.linear(x.roll(-1, 1), self.gate), {"gate": torch.zeros(16, 16)}),
        *(32, "is not causal"),
    ),
    "a gate that is one zero of many numbers": (
        *(lambda self, x: self.parts[0] * attend(self, x) + self.parts[1] * x.flip(1), {"parts": torch.eye(2)[0]}),
        *(32, "is not causal"),
    ),
    # With other signs the logarithm of this time constant is not a number, and outputs grow with the length.
    "a small time constant": (
        *(lambda self, x: x.flip(1) + self.rate.log() * x, {"rate": torch.tensor(0.005)}),
        *(512, "is not causal"),
    ),
    "growing outputs": (
        lambda self, x: states(lambda h, x_BD: (1 - self.rate) * h + x_BD, x) + x.flip(1),
        *({"rate": torch.tensor(0.005)}, 512, "is not causal"),
    ),
    "two positions": (
        lambda self, x: attend(self, torch.cat([x[:, :20], x[:, 21:22], x[:, 21:]], 1)),
        *({}, 128, "before 21 change with the input there"),
    ),
    "the first position of another sequence": (
        lambda self, x: attend(self, x) + x[0, 0],
        *({}, 32, "of a sequence change with the inputs of another one"),
    ),
    "the number of sequences": (
        lambda self, x: attend(self, x) / len(x),
        *({}, 32, "when the layer is called with it alone"),
    ),
    "outputs with gradients": (
        lambda self, x: attend(self, x) + (x.mean(1, keepdim=True) if x.requires_grad else 0),
        *({}, 32, "outputs differ when gradients are computed"),
    ),
    "gradients": (
        lambda self, x: attend(self, x) + (x * self.gain).abs().sqrt(),
        *({"gain": torch.zeros(16)}, 32, "the gradient of 'gain' is not finite"),
    ),
}


@pytest.mark.parametrize(("forward", "parameters", "positions", "message"), REFUSED.values(), ids=REFUSED)
def test_leaks_and_faults_are_found_wherever_they_hide(
    forward: Callable[[Any, Tensor], Tensor], parameters: dict[str, Tensor], positions: int, message: str
) -> None:
    layer = of_others(forward=forward)
    for name, y in parameters.items():
        setattr(layer, name, nn.Parameter(y.clone()))
    assert message in refusal(layer, positions)


@pytest.mark.parametrize(
    ("forward", "members", "positions"),
    [
        (lambda self, x: attend(self, x.view(*x.shape[:2], 4, -1).flatten(2)), {}, 1),  # one position is a sequence
        (
            lambda self, x: attend(self, x.unflatten(1, (-1, 16)).flatten(1, 2)),  # takes some lengths alone
            *({"init_state": Layer.init_state}, 32),
        ),
    ],
)
def test_a_layer_of_some_lengths_is_not_refused(
    forward: Callable[[Any, Tensor], Tensor], members: dict[str, Any], positions: int
) -> None:
    check_layer("other", of_others(forward=forward, **members), CPU, positions)


def test_steps_that_differ_from_the_whole_are_refused_and_none_at_all_are_not() -> None:
    def step(self: Transformer, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        z_BD, state = Transformer.step(self, x_BD, state)
        return 1.01 * z_BD, state

    def undefined(self: Transformer, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        z_BD, state = Transformer.step(self, x_BD, state)
        return torch.nan * z_BD, state

    for wrong in (step, undefined):
        assert "step gives another output at position 0" in refusal(of_others(step=wrong))
    check_layer("other", of_others(init_state=Layer.init_state), CPU)


def test_a_step_may_write_into_the_output_of_the_one_before() -> None:
    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        return states(lambda h, x_BD: 0.9 * h + x_BD, x_BTD)

    def step(self: Transformer, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        state["h"].mul_(0.9).add_(x_BD)
        return state["h"], state

    def init_state(self: Transformer, batch: int) -> Any:
        return {"h": torch.zeros(batch, 16)}

    check_layer("other", of_others(forward=forward, step=step, init_state=init_state), CPU)


def holding(hold: Callable[[Transformer], Any]) -> list[Transformer]:
    """Two layers of different seeds; each keeps in a plain attribute what ``hold`` returns."""
    layers = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        layers.append(of_others())
        layers[-1].held = hold(layers[-1])
    return layers


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        (lambda layer: [nn.GELU(), nn.Linear(16, 16)], r"Other.held\[1\] is not trained.* torch.nn.ModuleList or"),
        (
            lambda layer: {"gain": nn.Parameter(torch.ones(16))},
            r"Other.held\['gain'\] is not trained.*ParameterList or",
        ),
        (lambda layer: torch.ones(16, requires_grad=True), "Other.held is not trained.*a torch.nn.Parameter, or"),
        (lambda layer: torch.randn(16), "Other.held depends on the seed"),
        (lambda layer: np.random.default_rng().normal(size=16), "Other.held depends on the seed"),
        (lambda layer: ((), (torch.randn(16),)), r"Other.held\[1\]\[0\] depends on the seed"),
        (lambda layer: [nn.Linear(16, 16).requires_grad_(False)], r"Other.held\[0\].weight depends on the seed"),
    ],
)
def test_tensors_that_pytorch_does_not_know_are_refused_if_they_are_trained_or_depend_on_the_seed(
    hold: Callable[[Transformer], Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        check_held("other", *holding(hold))


@pytest.mark.parametrize(
    "hold",
    [
        lambda layer: [layer, *layer.children(), *layer.parameters()],
        lambda layer: {"activation": nn.GELU()},
        lambda layer: [nn.LayerNorm(16).requires_grad_(False)],
        lambda layer: (torch.arange(16), torch.tensor(torch.nan), np.array(["a"]), "text", None),
        lambda layer: (np.arange(16)[::-1], np.ones(4, dtype=">f4"), np.ones(2, dtype=np.longdouble)),
        lambda layer: torch.eye(16).to_sparse(),
        lambda layer: next(layer.parameters()) * 2,
        lambda layer: layer.add_module("normed", nn.utils.weight_norm(nn.Linear(16, 16))),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_other_names_of_parameters_and_constants_are_allowed(hold: Callable[[Transformer], Any]) -> None:
    check_held("other", *holding(hold))


@pytest.mark.parametrize(
    ("draw", "refused"),
    [
        (lambda: torch.empty(8).fill_(next(COUNTER)), True),
        (lambda: torch.tensor(np.random.default_rng().normal(size=8)).float(), True),
        (lambda: torch.tensor([random.random()]), True),
        (lambda: torch.randn(8), False),
        (lambda: torch.full((8,), torch.nan), False),
    ],
    ids=["unset", "numpy", "python", "pytorch", "nan"],
)
@pytest.mark.parametrize("as_buffer", [False, True])
def test_layers_of_one_seed_are_equal(draw: Callable[[], Tensor], refused: bool, as_buffer: bool) -> None:
    def build() -> Transformer:
        torch.manual_seed(0)
        layer = of_others()
        layer.register_buffer("own", draw()) if as_buffer else setattr(layer, "own", nn.Parameter(draw()))
        return layer

    with pytest.raises(ContractError, match="'own' is another one") if refused else nullcontext():
        check_seeded("other", build(), build())


def test_a_table_that_the_first_call_fills_is_allowed() -> None:
    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        self.table.copy_(torch.arange(16.0))
        return Transformer.forward(self, x_BTD + self.table)

    layer = of_others(forward=forward, init_state=Layer.init_state)
    layer.register_buffer("table", torch.zeros(16))
    check_layer("other", layer, CPU)


def test_a_buffer_that_a_call_changes_is_refused() -> None:
    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        return Transformer.forward(self, x_BTD) + (self.calls > 400)

    layer = of_others(forward=forward)
    layer.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    assert "a call changes its buffer 'calls'" in refusal(layer)


def test_parameters_that_get_no_gradient_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A gate that starts closed gets one."""

    def forward(self: Transformer, x_BTD: Tensor) -> Tensor:
        return Transformer.forward(self, x_BTD) + self.gate * x_BTD + self.fixed.detach()

    layer = of_others(forward=forward, init_state=Layer.init_state)
    layer.gate, layer.fixed = (torch.nn.Parameter(torch.zeros(16)) for _ in range(2))
    layer.spare = torch.nn.Linear(16, 16)
    for _task in range(2):
        warn_unused("other", check_layer("other", layer, CPU))
    names = "fixed, spare.weight, spare.bias"
    assert caplog.messages == [f"mixer 'other': no gradient reaches {names}, which count as parameters all the same"]
