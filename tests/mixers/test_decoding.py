"""Decoding with a static key-value cache against the step form, in plain PyTorch and in kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixers.base import Layer, Shape, State
from mixers.decoding import Decoder, has_static_cache
from mixers.models import LanguageModel
from mixers.ops import decoding as operations
from mixers.registry import MIXERS
from mixers.rt.layer import RecurrentTransformer
from mixers.short_convolution import with_short_convolution
from mixers.transformer import Transformer

triton = pytest.importorskip("triton")

from mixers.ops.kernels import decoding as kernels  # noqa: E402
from tests.kernel_marks import interpreted  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")
VOCAB, WIDTH = 13, 9
WAYS = {
    "rt": (RecurrentTransformer, {}),
    "rt-without-norms": (RecurrentTransformer, {"qk_norm": False, "persistent_norm": False}),
    "transformer": (Transformer, {}),
    "transformer-without-norms": (Transformer, {"qk_norm": False}),
}


def build(way: str, width: int = WIDTH, heads: int = 3, layers: int = 2, mlp_width: int = 11) -> LanguageModel:
    """Return a model with gains that are not 1."""
    layer, options = WAYS[way]
    torch.manual_seed(0)
    shape = Shape(width=width, mlp_width=mlp_width, layers=layers)
    model = LanguageModel(layer, layer.Config(heads=heads, **options), shape, VOCAB)
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def draw_tokens(length: int, batch: int) -> Tensor:
    return torch.randint(VOCAB, (length, batch), generator=torch.Generator().manual_seed(1))


class Steps:
    """The step form as a function from tokens (B) to logits (B, V)."""

    def __init__(self, model: LanguageModel, batch: int) -> None:
        self.model, self.states = model, model.init_state(batch)

    def __call__(self, tokens_B: Tensor) -> Tensor:
        logits_BV, self.states = self.model.step(tokens_B, self.states)
        return logits_BV


def by_steps(model: LanguageModel, tokens_TB: Tensor) -> Tensor:
    """Return the logits (T, B, V) of the step form."""
    steps = Steps(model, tokens_TB.shape[1])
    return torch.stack([steps(tokens_B) for tokens_B in tokens_TB])


def cached(decoder: Decoder, tokens_TB: Tensor) -> Tensor:
    """Return the logits (T, B, V) of a decoder."""
    return torch.stack([decoder.step(tokens_B).clone() for tokens_B in tokens_TB])


def greedy(read: Callable[[Tensor], Tensor], prompt_TB: Tensor, count: int) -> Tensor:
    """Return the likeliest continuation (count, B) of a prompt; ``read`` maps tokens (B) to logits (B, V)."""
    logits_BV, found = torch.stack([read(tokens_B).clone() for tokens_B in prompt_TB])[-1], []
    for _ in range(count):
        found.append(logits_BV.argmax(1))
        logits_BV = read(found[-1])
    return torch.stack(found)


@pytest.fixture
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels on the CPU, with tiles so small that every loop has several iterations."""
    monkeypatch.setattr(operations, "runs_in_kernels", lambda x: True)
    for tile, size in (("ROW_TILE", 8), ("ROWS_TILE", 32), ("FEW_PAIRS_TILE", 64), ("PAIRS_TILE", 8)):
        monkeypatch.setattr(kernels, tile, size)


@pytest.fixture
def launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what only early launches run. In the interpreter, a launch has ended before the next begins."""
    monkeypatch.setattr(kernels, "launches_early", lambda device: True)
    for name in ("gdc_launch_dependents", "gdc_wait"):
        monkeypatch.setattr(kernels, name, lambda: None)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@interpreted
@pytest.mark.usefixtures("in_kernels")
def test_kernels_equal_the_step_form(way: str, batch: int) -> None:
    model, tokens_TB = build(way).double(), draw_tokens(4, batch)
    expected = by_steps(model, tokens_TB)
    assert torch.allclose(cached(Decoder(model, batch, 6), tokens_TB), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", ["rt", "transformer-without-norms"])
@interpreted
@pytest.mark.usefixtures("in_kernels", "launched_early")
def test_early_launches_equal_the_step_form(way: str) -> None:
    model, tokens_TB = build(way).double(), draw_tokens(3, 1)
    assert torch.allclose(cached(Decoder(model, 1, 3), tokens_TB), by_steps(model, tokens_TB), rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_operations_equal_the_step_form(way: str, batch: int) -> None:
    model, tokens_TB = build(way).double(), draw_tokens(6, batch)
    expected = by_steps(model, tokens_TB)
    assert torch.allclose(cached(Decoder(model, batch, 8), tokens_TB), expected, rtol=0, atol=1e-13)


@interpreted
@pytest.mark.usefixtures("in_kernels")
def test_weights_of_16_bits() -> None:
    """The error against float64 is at most twice that of the step form with the same weights."""
    model, tokens_TB = build("rt", width=32, heads=2).half(), draw_tokens(4, 2)
    found, low = cached(Decoder(model, 2, 4), tokens_TB), by_steps(model, tokens_TB)
    exact = by_steps(model.double(), tokens_TB)
    assert 0 < (found - exact).norm() < 2 * (low - exact).norm()


@interpreted
@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("way", ["rt", "transformer"])
def test_a_reset_decoder_repeats_its_logits_bitwise(way: str, batch: int) -> None:
    model, tokens_TB = build(way), draw_tokens(3, batch)
    decoder = Decoder(model, batch, 3)
    first = cached(decoder, tokens_TB)
    with pytest.raises(ValueError, match="the cache holds 3 positions, and all are in use"):
        decoder.step(tokens_TB[0])
    decoder.reset()
    assert torch.equal(cached(decoder, tokens_TB), first)

    expected = by_steps(model.double(), tokens_TB)
    assert first.dtype == torch.float32
    assert (first - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_lies_beyond_the_newest_position_is_not_read() -> None:
    """Nor written, except at the newest position; RT writes a pair one step later."""
    for way, written in (("transformer", 3), ("rt", 2)):
        decoder = Decoder(build(way), 2, 6)
        logits_TBV = cached(decoder, draw_tokens(3, 2))
        assert logits_TBV.isfinite().all()
        for layer in decoder.layers:
            assert layer.cache_2BJD[:, :, :written].isfinite().all()
            assert layer.cache_2BJD[:, :, written:].isnan().all()


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 5, kernels.MOST_ROWS])
@pytest.mark.parametrize(("maps", "normed", "gelu", "added"), [(3, True, False, False), (1, False, True, True)])
def test_products_of_rows(rows: int, maps: int, normed: bool, gelu: bool, added: bool) -> None:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_BI, gain_I = normal(rows, 45), 1 + normal(45) if normed else None
    weights_OI = [normal(13, 45) for _ in range(maps)]
    residual_BO = normal(rows, 13) if added else None
    arguments = (x_BI, weights_OI, gain_I, gelu, residual_BO, 0.7)
    y_WBO = torch.empty(maps, rows, 13, dtype=torch.float64)
    kernels.row_products(*arguments, y_WBO)
    assert torch.allclose(y_WBO, operations.naive_row_products(*arguments), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("in_kernels")
def test_more_rows_than_the_kernel_takes_run_in_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(kernels, "row_products", refuse)
    x_BI, weight_OI = torch.ones(kernels.MOST_ROWS + 1, 4), torch.ones(2, 4)
    assert torch.equal(operations.row_products(x_BI, weight_OI), torch.full((1, len(x_BI), 2), 4.0))
    with pytest.raises(AssertionError):
        operations.row_products(x_BI[1:], weight_OI)


class Doubled(Transformer):
    """A layer of another user, with another projection."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k, 2 * v


@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        (Transformer, {}, True),
        (RecurrentTransformer, {}, True),
        (RecurrentTransformer, {"block": 2}, False),
        (Doubled, {}, False),
        (with_short_convolution(Transformer, 4), {}, False),
        (MIXERS["mamba2"], {}, False),
        (MIXERS["feedback-transformer"], {}, False),
    ],
)
def test_which_models_have_a_decoder(layer: type[Layer], options: dict[str, Any], expected: bool) -> None:
    model = LanguageModel(layer, layer.Config(**options), Shape(width=32, mlp_width=32), VOCAB)
    assert has_static_cache(model) == expected
    if not expected:
        with pytest.raises(ValueError, match="a decoder takes"):
            Decoder(model, 1, 4)


class Halved(LanguageModel):
    """A model of another user, with another step."""

    def step(self, tokens_B: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        logits_BV, states = super().step(tokens_B, states)
        return logits_BV / 2, states


def with_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGES: dict[str, Callable[[Any], object]] = {
    "subclass of the model": lambda model: setattr(model, "__class__", Halved),
    "hook on the embedding": lambda model: with_hook(model.embedding),
    "hook on the norm": lambda model: with_hook(model.norm),
    "hook on the readout": lambda model: with_hook(model.readout),
    "hook on attention": lambda model: with_hook(model.stack[1].out),
    "no norm": lambda model: setattr(model, "norm", nn.Identity()),
    "no readout": lambda model: setattr(model, "readout", nn.Identity()),
    "bias of the readout": lambda model: setattr(model.readout, "bias", nn.Parameter(torch.ones(VOCAB))),
    "bias of attention": lambda model: setattr(model.stack[1].out, "bias", nn.Parameter(torch.ones(WIDTH))),
    "adapter of attention": lambda model: setattr(model.stack[1], "out", Adapted(model.stack[1].out)),
}


class Adapted(nn.Module):
    """A linear map with another beside it, as in LoRA."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.flip(-1)


@pytest.mark.parametrize("change", CHANGES)
def test_models_that_compute_something_else_have_no_decoder(change: str) -> None:
    model, tokens_TB = build("rt"), draw_tokens(2, 1)
    before = by_steps(model, tokens_TB)
    assert has_static_cache(model)
    CHANGES[change](model)
    after = by_steps(model, tokens_TB)
    assert after.shape != before.shape or not torch.allclose(after, before)
    assert not has_static_cache(model)


@pytest.mark.parametrize("way", ["rt", "transformer"])
def test_weights_may_be_replaced_or_shared(way: str) -> None:
    """The step form reads the weights of these modules and calls none of them."""
    model, tokens_TB = build(way).double(), draw_tokens(4, 2)
    layer: Any = model.stack[0]
    model.readout.weight = model.embedding.weight
    layer.mlp.up = Adapted(layer.mlp.up)
    with_hook(layer)
    nn.utils.parametrizations.weight_norm(layer.q)
    assert has_static_cache(model)
    expected = by_steps(model, tokens_TB)
    assert torch.allclose(cached(Decoder(model, 2, 4), tokens_TB), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", ["rt", "transformer"])
def test_conversions_of_the_model_do_not_reach_a_decoder(way: str) -> None:
    """The graph of a GPU would read memory that belongs to others."""
    model, tokens_TB = build(way), draw_tokens(4, 2)
    decoder = Decoder(model, 2, 4)
    first = cached(decoder, tokens_TB)
    decoder.reset()
    model.half()
    assert torch.equal(cached(decoder, tokens_TB), first)


@pytest.mark.parametrize("way", ["rt", "transformer"])
def test_autocast_does_not_reach_a_decoder(way: str) -> None:
    """Its kernels compute in the dtype of the weights, and so must its plain operations beside them."""
    model, tokens_TB = build(way), draw_tokens(4, 2)
    first = cached(Decoder(model, 2, 4), tokens_TB)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cached(Decoder(model, 2, 4), tokens_TB), first)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(33, 3, 70), (1408, 22, 5632), (96, 1, 64)], ids=["odd", "wide", "one head"])
@pytest.mark.parametrize("batch", [1, 3, kernels.MOST_ROWS + 1])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_graph(way: str, batch: int, sizes: tuple[int, int, int]) -> None:
    """The cache takes several tiles. The graph is captured once, and two replays of a prompt agree bitwise."""
    width, heads, mlp_width = sizes
    model, prompt_TB = build(way, width, heads, mlp_width=mlp_width).cuda(), draw_tokens(290, batch).cuda()
    expected = by_steps(model.double(), prompt_TB)
    likeliest = greedy(Steps(model, batch), prompt_TB, 9)

    decoder = Decoder(model.float(), batch, 299)
    first = cached(decoder, prompt_TB)
    assert (first - expected).abs().max() < 1e-5 * expected.abs().max()

    decoder.reset()
    assert torch.equal(cached(decoder, prompt_TB), first)
    decoder.reset()
    assert torch.equal(greedy(decoder.step, prompt_TB, 9), likeliest)
    with pytest.raises(ValueError, match="the cache holds 299 positions"):
        decoder.step(prompt_TB[0])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, kernels.MOST_ROWS + 1])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_graph_with_weights_of_16_bits(way: str, batch: int) -> None:
    """The error against float64 is at most twice that of the step form with the same weights."""
    model, prompt_TB = build(way, 256, 4).cuda().bfloat16(), draw_tokens(40, batch).cuda()
    found, low = cached(Decoder(model, batch, 40), prompt_TB), by_steps(model, prompt_TB)
    exact = by_steps(model.double(), prompt_TB)
    assert 0 < (found - exact).norm() < 2 * (low - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_decoders_on_two_devices_in_one_process() -> None:
    tokens_TB = draw_tokens(5, 2)
    first, second = (cached(Decoder(build("rt").to(f"cuda:{i}"), 2, 5), tokens_TB).cpu() for i in range(2))
    assert torch.equal(second, first)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_graph_of_plain_operations(way: str) -> None:
    """Nothing runs in kernels in float64, or where Triton is missing."""
    model, tokens_TB = build(way).double().cuda(), draw_tokens(9, 2).cuda()
    expected_TBV = by_steps(model, tokens_TB)
    assert torch.allclose(cached(Decoder(model, 2, 9), tokens_TB), expected_TBV, rtol=0, atol=1e-12)
