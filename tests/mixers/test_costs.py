"""Counts against formulas written down by hand."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers import MIXERS
from mixers.base import Layer, Shape, State
from mixers.costs import (
    LENGTHS,
    Costs,
    costs,
    count_flops,
    count_parameters,
    count_state,
    operations,
)
from mixers.matching import count
from mixers.parts import MLP
from mixers.transformer import Transformer

costs_module = sys.modules["mixers.costs"]  # of the package, ``costs`` is the function
WIDTH, HIDDEN, HEADS = 32, 64, 4
SHAPE = Shape(width=WIDTH, mlp_width=HIDDEN)
PROJECTIONS = 2 * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN)
"""Operations a position of four square maps and the MLP."""


def build(name: str, **values: object) -> Layer:
    return MIXERS[name](MIXERS[name].Config(**values), SHAPE)


class Fused(Layer):
    """PyTorch's fused CPU attention and LSTM, of which the counter by itself sees nothing; no step form."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.lstm = nn.LSTM(shape.width, shape.width, batch_first=True, bias=False)
        self.mlp = MLP(shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.lstm(F.scaled_dot_product_attention(x_BTD, x_BTD, x_BTD, is_causal=True))[0]

    def init_state(self, batch: int) -> State:
        return {}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError


class GPUOnly(Fused):
    """A layer that cannot run on the CPU."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        raise RuntimeError("CUDA is needed")


@pytest.mark.parametrize(
    ("name", "values", "state"),
    [
        ("transformer", {"heads": HEADS}, lambda n: 2 * n * WIDTH),
        ("fox", {"heads": HEADS}, lambda n: 2 * n * WIDTH + n * HEADS),
        ("path", {"heads": HEADS}, lambda n: 2 * n * WIDTH + 2 * WIDTH),  # and the convolution's inputs
        ("rt", {"heads": HEADS}, lambda n: 2 * n * WIDTH),
        ("rt", {"heads": HEADS, "block": 4}, lambda n: 2 * n * WIDTH + 2 * WIDTH * (n % 4)),
        ("linear-attention", {"heads": HEADS}, lambda n: WIDTH**2 // HEADS + WIDTH + 1),  # and the position
        ("retnet", {"heads": HEADS}, lambda n: WIDTH**2 // HEADS + 1),  # and the position
        ("gla", {"heads": HEADS}, lambda n: WIDTH**2 // (2 * HEADS)),  # keys of half the width
        ("lstm", {}, lambda n: 2 * WIDTH),
        ("slstm", {"heads": HEADS}, lambda n: 6 * WIDTH),  # half of it the newest inputs of the convolution
        ("m2rnn", {"heads": HEADS, "key_size": 5}, lambda n: 5 * WIDTH + 3 * (2 * 5 + WIDTH)),
        ("lru", {"state_size": 24}, lambda n: 2 * 24),  # complex numbers
        ("sliding-attention", {"heads": HEADS, "window": 6}, lambda n: 2 * min(n, 6) * WIDTH),
    ],
)
def test_state_is_what_the_layer_must_remember(name: str, values: dict[str, object], state: Any) -> None:
    """The largest state up to N positions, because that is what decoding needs room for."""
    lengths = (1, 2, 5, 12)
    assert count_state(build(name, **values), lengths) == {n: max(map(state, range(n + 1))) for n in lengths}


class Forgetful(Transformer):
    """A layer of somebody else, which forgets all when it has seen 7 positions."""

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        z_BD, state = super().step(x_BD, state)
        return z_BD, {name: y[:, :0] if y.shape[1] == 7 else y for name, y in state.items()}


def test_what_is_known_of_the_transformer_is_not_assumed_of_layers_derived_from_it() -> None:
    layer = Forgetful(Forgetful.Config(heads=HEADS), SHAPE)
    lengths = (1, 6, 7, 8, 1024)
    assert count_state(layer, lengths) == {n: 2 * min(n, 6) * WIDTH for n in lengths}


@pytest.mark.parametrize(
    ("name", "values", "steps"),
    [("lstm", {}, 1), ("rt", {"heads": HEADS, "block": 4}, 4), ("sliding-attention", {"heads": HEADS, "window": 6}, 7)],
)
def test_few_steps_tell_the_state_after_many(
    monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, object], steps: int
) -> None:
    layer, taken = build(name, **values), []
    step = layer.step
    monkeypatch.setattr(layer, "step", lambda *inputs: taken.append(inputs) or step(*inputs))
    count_state(layer, LENGTHS)
    assert len(taken) == steps


@pytest.mark.parametrize(
    ("name", "values", "parameters"),
    [
        ("transformer", {"heads": HEADS}, 4 * WIDTH**2 + 2 * WIDTH * HIDDEN + 4 * WIDTH),
        ("rt", {"heads": HEADS, "qk_norm": False}, 4 * WIDTH**2 + 2 * WIDTH * HIDDEN + 2 * WIDTH),
        ("linear-attention", {"heads": HEADS}, 4 * WIDTH**2 + 2 * WIDTH * HIDDEN + 2 * WIDTH),
        ("lstm", {}, 9 * WIDTH**2 + 4 * WIDTH + 2 * WIDTH * HIDDEN + 2 * WIDTH),
    ],
)
def test_parameters(name: str, values: dict[str, object], parameters: int) -> None:
    assert count_parameters(build(name, **values)) == parameters


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize(
    ("name", "values", "products"),
    [
        # The whole square of attention.
        *(("transformer", {"heads": heads}, lambda n: 4 * WIDTH**2 + 2 * n * WIDTH) for heads in (1, 4)),
        ("lstm", {}, lambda _: 9 * WIDTH**2),
        ("slstm", {"heads": HEADS}, lambda _: 8 * WIDTH**2 // HEADS),
        (
            *("m2rnn", {"heads": HEADS, "key_size": 5}),
            lambda _: WIDTH * (10 + 3 * WIDTH + HEADS) + 5 * WIDTH * (WIDTH // HEADS + 1),
        ),
    ],
)
def test_flops_are_two_for_each_product_of_a_position(
    name: str, values: dict[str, object], products: Callable[[int], int], length: int
) -> None:
    assert count_flops(build(name, **values), length) == length * 2 * (products(length) + 2 * WIDTH * HIDDEN)


@pytest.mark.parametrize("product", [torch.matmul, partial(torch.einsum, "btd,de->bte")])
def test_a_complex_product_counts_as_four_real_ones(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Product(nn.Module):
        def forward(self, x_BTD: Tensor) -> Tensor:
            return product(x_BTD, torch.ones(WIDTH, HIDDEN, dtype=x_BTD.dtype))

    real, complex_ = (torch.ones(2, 5, WIDTH, dtype=dtype) for dtype in (torch.float32, torch.complex64))
    assert operations(Product(), real) == 2 * 2 * 5 * WIDTH * HIDDEN
    assert operations(Product(), complex_) == 8 * 2 * 5 * WIDTH * HIDDEN


@pytest.mark.parametrize("implementation", ["naive", "tiled"])
@pytest.mark.parametrize("length", [2, 33, 64])
def test_flops_of_the_recurrent_transformer_hardly_depend_on_the_implementation(
    implementation: str, length: int
) -> None:
    """Keys and values twice, and half the square; the pair of a position with itself is not always a matrix product."""
    by_hand = length * (PROJECTIONS + 4 * WIDTH**2) + 4 * WIDTH * length * (length + 1) // 2
    counted = count_flops(build("rt", heads=HEADS, implementation=implementation), length)
    assert by_hand - 4 * WIDTH * length <= counted <= by_hand


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("rt", values) for values in ({}, {"block": 3}, {"block": 8})),
        *((name, {}) for name in ("feedback-transformer", "lstm", "slstm", "m2rnn")),
    ],
)
def test_flops_that_follow_from_short_sequences_are_those_of_the_long_one(
    name: str, values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs_module, "LENGTHS", (26,))
    layer = build(name, **values, **({"implementation": "naive"} if name == "rt" else {}))
    assert count("flops", type(layer), layer.config, SHAPE) == count_flops(layer, 26)


def test_kernels_do_not_hide_the_products_of_the_recurrent_transformer() -> None:
    layer = MIXERS["rt"]
    configs = [layer.Config(heads=HEADS, implementation=name) for name in ("naive", "tiled", "fused", "auto")]
    assert len({count("flops", layer, config, SHAPE) for config in configs}) == 1


def test_fused_operations_of_pytorch_are_counted_and_its_settings_left_as_they_were() -> None:
    before = torch.backends.mkldnn.enabled
    by_hand = 4 * 10**2 * WIDTH + 10 * 2 * 8 * WIDTH**2
    assert count_flops(Fused(Fused.Config(), SHAPE), 10) == by_hand
    assert torch.backends.mkldnn.enabled == before


def test_counting_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    count("flops", MIXERS["transformer"], MIXERS["transformer"].Config(), SHAPE)
    assert torch.equal(torch.rand(3), expected)


def test_costs_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, config, shape = MIXERS["transformer"], MIXERS["transformer"].Config(heads=2), Shape(width=8, mlp_width=16)
    figures = costs(layer, config, shape)
    monkeypatch.setattr(costs_module, "count_state", None)
    assert costs(layer, config, shape) is figures
    assert figures == Costs(
        parameters=4 * 64 + 2 * 128 + 4 * 8,
        state_floats={n: 16 * n for n in LENGTHS},
        flops_per_token={LENGTHS[0]: 2 * (4 * 64 + 2 * 128) + 4 * LENGTHS[0] * 8},
    )


def test_what_cannot_be_counted_is_unknown_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    figures = costs(GPUOnly, GPUOnly.Config(), SHAPE)
    assert (figures.state_floats, figures.flops_per_token) == (None, None)
    assert "FLOPs over 128 positions of GPUOnly not counted: RuntimeError: CUDA is needed" in caplog.text
