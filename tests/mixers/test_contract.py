"""What every registered layer must satisfy; new layers are picked up by themselves."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mixers import MIXERS
from mixers.base import NO_RECURRENCE, NO_WINDOW, Layer, Shape, State, decayed
from mixers.costs import build_frozen, count_state
from mixers.models import AutoEncoder, LanguageModel
from mixers.parts import linear
from tests.mixers.errors import error

SHAPE = Shape(width=32, mlp_width=64, layers=2)
LENGTHS = [1, 2, 5, 8, 13]
VARIANTS: dict[str, list[dict[str, object]]] = {
    "transformer": [{"heads": 4}, {"heads": 2, "qk_norm": False}],
    "rt": [
        {"heads": 4},
        {"heads": 4, "implementation": "naive"},
        {"heads": 4, "persistent_norm": False},
        {"heads": 4, "qk_norm": False},
        {"heads": 4, "block": 3},
    ],
    "sliding-attention": [{"heads": 4, "window": 3}, {"heads": 4, "window": 2, "qk_norm": False}, {"heads": 4}],
    "transformer-xl": [{"heads": 4, "segment": 3}, {"heads": 4, "segment": 1, "qk_norm": False}, {"heads": 4}],
    "fox": [{"heads": 4}, {"heads": 2, "qk_norm": False}],
    "path": [{}, {"heads": 2, "rank": 3, "convolution": 1, "forget_gate": True, "qk_norm": False}],
    "feedback-transformer": [{"heads": 4}, {"heads": 2, "qk_norm": False}],
    "staircase": [{"heads": 4, "chunk": 3, "steps": 3}, {"heads": 4, "chunk": 1, "steps": 2}, {"heads": 4}],
    "transformer-fam": [
        {"heads": 4, "block": 3, "memory": 2},
        {"heads": 4, "block": 2, "memory": 1, "earlier": 2},
        {"heads": 4, "block": 3, "earlier": 0, "qk_norm": False},
        {"heads": 4, "block": 13},
    ],
    "rmt": [{"heads": 4, "segment": 3, "memory": 2}, {"heads": 4, "segment": 1, "memory": 1}, {"heads": 4}],
    "linear-attention": [{}, {"heads": 2, "positions": "none"}],
    "retnet": [{}, {"heads": 2}],
    "mamba2": [{}, {"heads": 2, "state_size": 5, "convolution": 2}],
    "mamba3": [{}, {"heads": 2, "state_size": 6, "rotated": 1.0, "rank": 3}],
    "mlstm": [{}, {"heads": 2, "expand": 1, "convolution": 1, "block": 2}],
    "deltanet": [{}, {"negative_eigenvalues": True}],
    "gated-deltanet": [{}, {"heads": 8, "convolution": 1}],
    "rwkv7": [{}, {"negative_eigenvalues": True}],
    "kda": [{}, {"heads": 2, "negative_eigenvalues": True}],
    "deltaproduct": [{}, {"householders": 3, "gated": False, "negative_eigenvalues": False}],
    "mamba": [{}, {"expand": 1, "state_size": 3, "convolution": 1, "negative_eigenvalues": True}],
    "s5": [{}, {"state_size": 2}],
    "slstm": [{}, {"heads": 2, "convolution": 1}],
    "m2rnn": [{}, {"heads": 2, "key_size": 16}],
    "lru": [{}, {"state_size": 3, "r_min": 0.9, "r_max": 0.99, "max_phase": 0.3}],
    "hyena": [{}, {"order": 3, "convolution": 1, "bands": 2, "reach": 5, "frequency": 10.0}],
}
REACH: dict[str, Callable[[Any, int], int]] = {
    "sliding-attention": lambda config, position: position + config.window,
    "transformer-xl": lambda config, position: (position // config.segment + 2) * config.segment,
}
"""The first position that no longer depends on an earlier one, for layers that do not read the whole past."""

CASES = [(name, values) for name in MIXERS for values in VARIANTS.get(name, [{}])]
each_layer = pytest.mark.parametrize(("name", "values"), CASES, ids=lambda value: str(value))
each_precision = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])


def build(name: str, values: dict[str, object], dtype: torch.dtype = torch.float64) -> Layer:
    torch.manual_seed(0)
    return MIXERS[name](MIXERS[name].Config(**values), SHAPE).to(dtype)


def inputs(length: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """The same numbers in every dtype, up to its rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, length, SHAPE.width, generator=generator, dtype=torch.float64).to(dtype)


def test_the_shape_is_checked_within_a_compiled_graph() -> None:
    class Doubling(Layer):
        def forward(self, x_BTD: Tensor) -> Tensor:
            return 2 * x_BTD

    layer = Doubling(Doubling.Config(), SHAPE)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(inputs(5)), 2 * inputs(5))


@pytest.mark.parametrize("name", MIXERS)
def test_names_the_paper_it_follows(name: str) -> None:
    cited = re.search(r"arXiv:\S|doi:\S|https?://|new here", MIXERS[name].paper)
    assert cited, "``paper`` cites a source, or says that the layer is new here"


@pytest.mark.parametrize("name", MIXERS)
def test_each_start_of_a_name_that_is_left_out_of_weight_decay_is_one_of_matrices(name: str) -> None:
    layer = build(name, VARIANTS.get(name, [{}])[0])
    matrices = [label for label, p in layer.named_parameters() if p.ndim > 1]
    for start in layer.undecayed:
        assert any(label.startswith(start) for label in matrices)
    kept = [label for label in matrices if not label.startswith(layer.undecayed)]
    assert [label for (label, _), d in zip(layer.named_parameters(), decayed(layer), strict=True) if d] == kept


SPANS = {
    "rt": "block",
    "sliding-attention": "window",
    "transformer-xl": "segment",
    "staircase": "chunk",
    "transformer-fam": "block",
    "rmt": "segment",
}
"""The option of each layer that sets the longest sequence on which its recurrence or window does nothing."""


@pytest.mark.parametrize(("name", "option"), SPANS.items())
def test_a_layer_says_up_to_which_length_its_recurrence_or_window_does_nothing(name: str, option: str) -> None:
    """There it gives the outputs and gradients of a span of 64, and at one more position it does not.

    Transformer-XL gives the same outputs there, but passes no gradient to the segment before.
    """
    short, long = (build(name, {"heads": 4, option: span}) for span in (6, 64))

    def same(length: int) -> bool:
        found = []
        for layer in (short, long):
            x = inputs(length).requires_grad_()
            z = layer(x)
            found.append(torch.cat([z, *torch.autograd.grad(z[:, -1].square().sum(), x)]))
        return torch.allclose(*found, rtol=1e-9, atol=1e-9)

    for length in (5, 6):
        assert short.remark(short.config, length) in (NO_RECURRENCE, NO_WINDOW)
        assert same(length)
    assert short.remark(short.config, 7) is None
    assert not same(7)


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in SPANS])
def test_other_layers_have_nothing_to_say_of_short_sequences(name: str) -> None:
    assert [MIXERS[name].remark(MIXERS[name].Config(), length) for length in (1, 8, 1024)] == [None] * 3


@each_layer
def test_a_batch_may_be_empty(name: str, values: dict[str, object]) -> None:
    assert build(name, values, torch.float32)(torch.randn(0, 5, SHAPE.width)).shape == (0, 5, SHAPE.width)


@pytest.mark.parametrize("name", MIXERS)
def test_an_input_of_another_shape_is_told_the_shape_of_a_batch(name: str) -> None:
    layer = build(name, {}, torch.float32)
    for wrong in ((5, 32), (1, 3, 5, 32), (3, 5, 1), (3, 5, 16), (3, 5, 64), (3, 0, 32)):
        told = re.escape(f"width 32), with at least one position, not {wrong}")
        with pytest.raises(ValueError, match=f"maps inputs of the shape .*{told}"):
            layer(torch.randn(wrong))


@each_layer
def test_depends_on_no_later_position(name: str, values: dict[str, object]) -> None:
    layer, x = build(name, values), inputs(13)
    z = layer(x)
    for position in (0, 6, 12):
        changed = x.clone()
        changed[:, position] += 1.0
        difference = (layer(changed) - z).abs().amax((0, 2))
        assert (difference[:position] == 0).all()
        reach = REACH[name](layer.config, position) if name in REACH else len(difference)
        assert (difference[position:reach] > 0).all()
        assert (difference[reach:] == 0).all()


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gradients_are_finite(name: str, values: dict[str, object], dtype: torch.dtype) -> None:
    layer, x = build(name, values, torch.float32), inputs(7, torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        layer(x).square().mean().backward()
    for label, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None, label
        assert tensor.grad.isfinite().all(), label
        assert tensor.grad.abs().sum() > 0, label


def check_16_bits(name: str, values: dict[str, object], dtype: torch.dtype, device: str) -> None:
    layer, x = build(name, values, dtype).to(device), inputs(5, dtype).to(device).requires_grad_()
    z = layer(x)
    gradients = torch.autograd.grad(z.float().square().mean(), [x, *layer.parameters()])
    state, steps = layer.init_state(3), []
    with torch.no_grad():
        for x_BD in x.unbind(1):
            y, state = layer.step(x_BD, state)
            steps.append(y)

    assert {y.dtype for y in (z, *steps, *gradients)} == {dtype}
    assert all(gradient.isfinite().all() for gradient in gradients)
    wanted = layer.double()(x.double()).detach()
    for result in (z.detach(), torch.stack(steps, 1)):
        assert error(result, wanted) <= 2 * torch.finfo(dtype).eps


@each_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_16_bits_compute_what_their_parameters_say(
    name: str, values: dict[str, object], dtype: torch.dtype
) -> None:
    check_16_bits(name, values, dtype, "cpu")


@pytest.mark.gpu
@each_layer
def test_gpu_layers_of_16_bits_compute_what_their_parameters_say(name: str, values: dict[str, object]) -> None:
    check_16_bits(name, values, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", MIXERS)
def test_without_mlp_a_layer_is_one_whose_mlp_gives_nothing(name: str) -> None:
    """In both forms, but where recurrence or memory runs through the MLP."""
    kind, config = MIXERS[name], MIXERS[name].Config()
    if name in ("rt", "feedback-transformer", "transformer-fam", "rmt"):
        with pytest.raises(ValueError, match=r"^mlp_width: 0 must be at least 1$"):
            kind(config, replace(SHAPE, mlp_width=0))
        return
    whole, bare = build(name, {}), kind(config, replace(SHAPE, mlp_width=0)).double()
    for label, p in whole.named_parameters():
        if "mlp.down" in label:
            p.data.zero_()
    bare.load_state_dict({label: y for label, y in whole.state_dict().items() if "mlp" not in label})
    torch.testing.assert_close(bare(inputs(5)), whole(inputs(5)), rtol=1e-12, atol=1e-12)
    steps = [layer.step(inputs(1)[:, 0], layer.init_state(3))[0] for layer in (bare, whole)]
    torch.testing.assert_close(*steps, rtol=1e-12, atol=1e-12)


HAVING_HEADS = [name for name in MIXERS if hasattr(MIXERS[name].Config(), "heads")]


@pytest.mark.parametrize(
    ("name", "values", "positions"),
    [
        *((name, values, max(13, 2 * values.get("block", 1) + 1)) for name, values in CASES),
        *((name, {"heads": heads}, 5) for name in HAVING_HEADS for heads in (1, 2, 4)),
    ],
    ids=lambda value: str(value),
)
def test_decoding_step_by_step_equals_the_parallel_pass_and_carries_the_state_that_is_counted(
    name: str, values: dict[str, object], positions: int
) -> None:
    """The largest state so far is counted: one that is emptied at the end of a segment still needs its room."""

    def size(state: State) -> int:
        return sum(y.numel() * (1 + y.is_complex()) for y in state.values())

    layer, x = build(name, values), inputs(positions)
    state = layer.init_state(3)
    steps, sizes = [], [size(state)]
    with torch.no_grad():
        for x_BD in x.unbind(1):
            z, state = layer.step(x_BD, state)
            steps.append(z)
            sizes.append(max(sizes[-1], size(state)))
        for length in {min(length, positions) for length in (*LENGTHS, positions)}:
            torch.testing.assert_close(torch.stack(steps[:length], 1), layer(x[:, :length]), rtol=1e-11, atol=1e-11)
    counted = count_state(build_frozen(type(layer), layer.config, SHAPE), range(1, positions + 1))  # as for tables
    assert [3 * y for y in counted.values()] == sizes[1:]


@each_layer
def test_runs_stacked_under_vmap_equal_single_runs(name: str, values: dict[str, object]) -> None:
    """Outputs and gradients of two runs of one shape, together and one by one."""
    layers = []
    for seed in range(2):
        torch.manual_seed(seed)
        layers.append(MIXERS[name](MIXERS[name].Config(**values), SHAPE).double())
    params, _ = torch.func.stack_module_state(layers)
    x = torch.stack([inputs(9, seed=seed) for seed in range(2)])

    def one(run: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
        return torch.func.functional_call(layers[0], run, (x_BTD,))

    z = torch.func.vmap(one)(params, x)
    together = torch.autograd.grad(z.square().sum(), list(params.values()))
    for r, layer in enumerate(layers):
        alone = layer(x[r])
        torch.testing.assert_close(z[r], alone, rtol=1e-11, atol=1e-11)
        gradients = torch.autograd.grad(alone.square().sum(), list(layer.parameters()))
        for (label, _), a, b in zip(layer.named_parameters(), together, gradients, strict=True):
            torch.testing.assert_close(a[r], b, rtol=1e-9, atol=1e-9, msg=f"gradient of {label}")


def long_inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    """Under these, bfloat16 puts no gradient off by more than 6%; under others, a gated DeltaNet's by half."""
    return inputs(37, dtype, seed=2)


def output_and_gradients(layer: Layer, x_BTD: Tensor, autocast: bool) -> dict[str, Tensor]:
    with torch.autocast(x_BTD.device.type, torch.bfloat16, enabled=autocast):
        z_BTD = layer(x_BTD.requires_grad_())
    leaves = {"x": x_BTD, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(z_BTD.double().square().sum(), list(leaves.values()))
    return {"z": z_BTD.detach(), **dict(zip(leaves, gradients, strict=True))}


@cache
def in_float64(name: str, values: tuple[tuple[str, object], ...]) -> dict[str, Tensor]:
    """What a layer should give for ``long_inputs``, in both precisions; its readers change nothing."""
    return output_and_gradients(build(name, dict(values)), long_inputs(), False)


def on_a_cpu(
    name: str, values: dict[str, object], autocast: bool
) -> tuple[Layer, dict[str, Tensor], dict[str, Tensor]]:
    """A layer in float32, what it should give for ``long_inputs`` (in float64), and what it gives on a CPU."""
    exact = in_float64(name, tuple(values.items()))
    single = build(name, values, torch.float32)
    return single, exact, output_and_gradients(single, long_inputs(torch.float32), autocast)


def further_off(
    got: dict[str, Tensor], rounded: dict[str, Tensor], exact: dict[str, Tensor], autocast: bool
) -> list[str]:
    """Names of tensors whose error is more than three times that of the layer ``rounded`` on a CPU.

    The error of few numbers may be small by chance, so 2% of the tensor in bfloat16 and 3e-5 in float32 are allowed
    besides.
    """

    def error(tensors: dict[str, Tensor], name: str) -> Tensor:
        return (tensors[name].double().cpu() - exact[name]).norm()

    share = 2e-2 if autocast else 3e-5
    return [name for name, y in exact.items() if not error(got, name) <= 3 * error(rounded, name) + share * y.norm()]


@pytest.mark.gpu
@each_layer
@each_precision
def test_gpu_equals_float64(name: str, values: dict[str, object], autocast: bool) -> None:
    """In float32 to its rounding; in bfloat16 about as well as the same layer in bfloat16 on a CPU.

    The comparison refuses zeros, halves, and the output for other inputs.
    """
    single, exact, rounded = on_a_cpu(name, values, autocast)
    got = output_and_gradients(single.cuda(), long_inputs(torch.float32).cuda(), autocast)
    assert not further_off(got, rounded, exact, autocast)

    for share in (0.0, 0.5, torch.nan):
        wrong = {label: share * y for label, y in exact.items()}
        assert further_off(wrong, rounded, exact, autocast) == list(exact)
    with torch.no_grad():
        other = {**got, "z": single(inputs(37, torch.float32, seed=3).cuda())}
    assert further_off(other, rounded, exact, autocast) == ["z"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        *((name, {"heads": 5}, "heads: 5 must divide the model width 32") for name in HAVING_HEADS),
        ("sliding-attention", {"window": 0}, "window: 0 must be at least 1"),
        ("transformer-xl", {"segment": 0}, "segment: 0 must be at least 1"),
        ("rmt", {"segment": 0}, "segment: 0 must be at least 1"),
        ("rmt", {"memory": 0}, "memory: 0 must be at least 1"),
        ("staircase", {"chunk": 0}, "chunk: 0 must be at least 1"),
        ("staircase", {"steps": 0}, "steps: 0 must be at least 1"),
        ("transformer-fam", {"block": 0}, "block: 0 must be at least 1"),
        ("transformer-fam", {"earlier": -1}, "earlier: -1 must be at least 0"),
        ("transformer-fam", {"memory": 0}, "memory: 0 must be at least 1"),
        ("retnet", {"heads": 32}, "heads: 32 must leave heads of even size, not 1"),
        ("gla", {"heads": 32}, "heads: 32 must divide half the model width 32"),
        ("gla", {"heads": 2, "gate_rank": 0}, "gate_rank: 0, gate_temperature: 16.0: give both > 0"),
        ("mamba2", {"heads": 2, "state_size": 0}, "state_size: 0 must be at least 1"),
        ("mamba3", {"heads": 2, "state_size": 4, "rotated": 0.4}, "rotated: 0.4: rows are rotated in pairs"),
        ("mlstm", {"heads": 2, "block": 3}, "block: 3 must divide the width inside the mixer, 64"),
        ("deltanet", {"heads": 2, "convolution": 0}, "convolution size: 0 must be at least 1"),
        ("deltaproduct", {"heads": 2, "householders": 0}, "householders: 0 must be at least 1"),
        ("rwkv6", {"heads": 2, "shift_rank": 0}, "shift_rank: 0 must be at least 1"),
        ("rwkv7", {"heads": 2, "rank": 0}, "rank: 0 must be at least 1"),
        ("rwkv7", {"heads": 32}, "heads: 32 leave heads of size 1"),
        ("mamba", {"state_size": 0}, "state_size: 0 must be at least 1"),
        ("mamba", {"convolution": 0}, "convolution size: 0 must be at least 1"),
        ("s5", {"state_size": 7}, "state_size: 7 must be even"),
        ("s5", {"dt_min": 0.2}, "choose 0 < dt_min <= dt_max"),
        ("lru", {"state_size": 0}, "state_size: 0 must be at least 1"),
        ("lru", {"r_min": 0.9, "r_max": 0.5}, "choose 0 <= r_min < r_max <= 1"),
        ("lru", {"max_phase": 0.0}, "max_phase: 0.0 must be positive"),
        ("slstm", {"heads": 32}, "heads: 32 leave heads of size 1, whose norm is always 0"),
        ("m2rnn", {"heads": 2, "key_size": 0}, "key_size: 0 must be at least 1"),
        ("hyena", {"order": 1}, "order: 1 must be at least 2"),
        ("hyena", {"reach": 0}, "reach: 0 must be at least 1"),
        ("hyena", {"frequency": 0.0}, "frequency: 0.0 must be greater than 0"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, values)


@pytest.mark.parametrize(
    ("name", "values", "layers"),
    [
        ("rt", {}, 2),
        ("feedback-transformer", {}, 1),
        ("rmt", {"segment": 3, "memory": 2}, 1),
        ("staircase", {"chunk": 3, "steps": 2}, 1),
    ],
)
def test_a_language_model_of_two_layers_decodes_as_it_reads(name: str, values: dict[str, object], layers: int) -> None:
    """Of some kinds, one module is all layers."""
    torch.manual_seed(0)
    shape = Shape(width=32, mlp_width=48, layers=2)
    model = LanguageModel(MIXERS[name], MIXERS[name].Config(heads=4, **values), shape, 11).double()
    assert len(model.layers) == layers
    tokens = torch.arange(14).reshape(2, 7) % 11
    states, logits = model.init_state(2), []
    for t in range(7):
        out, states = model.step(tokens[:, t], states)
        logits.append(out)
    torch.testing.assert_close(torch.stack(logits, 1), model(tokens), rtol=1e-11, atol=1e-11)


def test_the_autoencoder_decodes_from_the_last_position_alone() -> None:
    """With the last layer output held fixed, no other position's output reaches the logits."""
    torch.manual_seed(0)
    model = AutoEncoder(MIXERS["rt"], MIXERS["rt"].Config(heads=4), SHAPE, 11).double()
    seen: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda module, args, out: seen.append(out) or None)
    logits = model(torch.arange(7)[None])
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.square().sum(), seen)
    assert (gradient[:, :-1] == 0).all()
    assert (gradient[:, -1] != 0).any()
    assert logits.shape == (1, 7, 11)


def test_the_autoencoder_decodes_each_position_by_its_code() -> None:
    """Sines and cosines of t / 10000^(i/16) are added to the vector; the logits written out."""
    torch.manual_seed(0)
    model = AutoEncoder(MIXERS["gla"], MIXERS["gla"].Config(heads=4), SHAPE, 11).double()
    tokens_BT = torch.arange(14).reshape(2, 7) % 11
    angle = torch.arange(7.0)[:, None] / 10_000 ** (torch.arange(16) / 16)
    coded_BTD = model.hidden(tokens_BT)[:, -1:] + torch.cat([angle.sin(), angle.cos()], dim=1)
    hidden_BTD = torch.nn.functional.gelu(coded_BTD @ model.decoder_in.weight.T)
    logits_BTV = model(tokens_BT)
    expected_BTV = hidden_BTD @ model.decoder_out.weight.T @ model.readout.weight.T
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-5, atol=1e-5)
    assert (logits_BTV[:, 1:] - logits_BTV[:, :-1]).abs().amax(2).min() > 0.01


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1024), (1024, 16)])
def test_weights_start_at_the_scale_that_keeps_that_of_inputs(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    assert linear(inputs, outputs).weight.std().item() == pytest.approx(1 / inputs**0.5, rel=0.03)


@pytest.mark.parametrize("name", ["rt", "transformer"])
def test_a_record_of_a_layer_computes_what_the_layer_computes(name: str) -> None:
    """``torch.export`` makes such records; what C writes would not be in them."""
    layer, x, other = build(name, {}), inputs(5), inputs(5, seed=2)
    with torch.no_grad():
        recorded = make_fx(layer)(x)
        torch.testing.assert_close(recorded(other), layer(other), rtol=1e-12, atol=1e-12)
