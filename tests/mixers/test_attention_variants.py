"""What the attention variants must equal, written out independently of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mixers import MIXERS
from mixers.attention_layer import AttentionLayer
from mixers.base import Layer, Shape
from mixers.feedback_transformer import FeedbackTransformer
from mixers.models import LanguageModel
from mixers.ops.attention import alibi_slopes
from mixers.ops.path_attention import CHUNK
from mixers.parts import rms_norm
from mixers.rmt import RecurrentMemoryTransformer
from mixers.rt.naive import Weights, naive_recurrence
from mixers.sliding_attention import SlidingAttention
from mixers.staircase import Staircase
from mixers.transformer import Transformer
from mixers.transformer_fam import TransformerFAM
from mixers.transformer_xl import TransformerXL

SHAPE = Shape(width=12, mlp_width=20, layers=2)
ONE = Shape(width=12, mlp_width=20, layers=1)
HEADS, LENGTH = 3, 11


def build(layer: Any, shape: Shape = SHAPE, **values: object) -> Any:
    """A layer in float64, none of whose parameters is still at a constant."""
    torch.manual_seed(0)
    built = layer(layer.Config(heads=HEADS, **values), shape).double()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return built


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, SHAPE.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def attend_each(q: Tensor, pairs: list[tuple[float, Tensor, Tensor]]) -> Tensor:
    """Attention (B, D) of one query to (distance, key, value) triples, head by head."""
    size = q.shape[1] // HEADS
    slopes, outputs = alibi_slopes(HEADS).double(), []
    for h in range(HEADS):
        at = slice(h * size, (h + 1) * size)
        logits = [(q[:, at] * k[:, at]).sum(1) / size**0.5 - slopes[h] * distance for distance, k, _ in pairs]
        weights = torch.stack(logits, 1).softmax(1)
        outputs.append(sum(weights[:, i, None] * v[:, at] for i, (_, _, v) in enumerate(pairs)))
    return torch.cat(outputs, 1)


def branches(x: Tensor, a: Tensor, block: torch.nn.Module, scale: float) -> Tensor:
    """What follows attention in every layer, from the weights."""
    u = x + scale * a @ block.out.weight.T
    hidden = F.gelu(rms_norm(u, block.mlp_norm.gain) @ block.mlp.up.weight.T)
    return u + scale * hidden @ block.mlp.down.weight.T


def twin(layer: AttentionLayer) -> Transformer:
    """The Transformer layer with the layer's parameters."""
    other = build(Transformer, layer.shape)
    known = other.state_dict().keys()
    other.load_state_dict({name: value for name, value in layer.state_dict().items() if name in known})
    return other


@pytest.mark.parametrize("gated", [False, True])
def test_path_goes_from_chunk_to_chunk_as_it_decodes(gated: bool) -> None:
    """Four chunks, of which the last is not full; nearly equal inputs, so that triangular systems are far from 1."""
    layer, x = build(MIXERS["path"], forget_gate=gated), inputs(1) + 0.1 * inputs(3 * CHUNK + 5)
    state, steps = layer.init_state(2), []
    for x_BD in x.unbind(1):
        z_BD, state = layer.step(x_BD, state)
        steps.append(z_BD)
    torch.testing.assert_close(torch.stack(steps, 1), layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [LENGTH, LENGTH + 1, 64])
def test_sliding_attention_over_the_whole_sequence_is_the_transformer(window: int) -> None:
    layer, x = build(SlidingAttention, window=window), inputs()
    same(layer(x), twin(layer)(x))


def test_sliding_attention_at_a_position_is_the_transformer_on_its_window_alone() -> None:
    layer, x = build(SlidingAttention, window=4), inputs()
    transformer = twin(layer)
    for t in range(LENGTH):
        same(layer(x)[:, t], transformer(x[:, max(0, t - 3) : t + 1])[:, -1])


@pytest.mark.parametrize(("segment", "length"), [(LENGTH, LENGTH), (32, LENGTH), (4, LENGTH), (4, 8), (1, 5)])
def test_transformer_xl_is_masked_relative_attention(segment: int, length: int) -> None:
    """Position by position from the paper's equation, section 3.3, terms (a) to (d) of A_ij; sinusoids are float32."""
    layer, x = build(TransformerXL, segment=segment), inputs(length)
    q, k, v = layer.project(x)
    frequency = 10_000.0 ** -(torch.arange(6) / 6)
    size, expected = SHAPE.width // HEADS, []
    for i in range(length):
        heads = []
        for h in range(HEADS):
            at = slice(h * size, (h + 1) * size)
            js = range(max(0, i // segment - 1) * segment, i + 1)
            logits = []
            for j in js:
                code = torch.cat([((i - j) * frequency).sin(), ((i - j) * frequency).cos()]).double()
                r = (layer.r.weight @ code)[at]
                a, b = (q[:, i, at] * k[:, j, at]).sum(1), q[:, i, at] @ r
                c, d = k[:, j, at] @ layer.u_D[at], layer.v_D[at] @ r
                logits.append((a + b + c + d) / size**0.5)
            weights = torch.stack(logits, 1).softmax(1)
            heads.append(torch.einsum("bj,bjk->bk", weights, v[:, js.start : js.stop, at]))
        expected.append(torch.cat(heads, 1))
    # position codes are float32
    torch.testing.assert_close(layer(x), layer.finish(x, torch.stack(expected, 1)), rtol=1e-6, atol=1e-6)


def test_no_gradient_flows_through_the_memory_of_transformer_xl_to_its_inputs() -> None:
    layer, x = build(TransformerXL, segment=4), inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 4:8].square().sum(), x)
    assert (gradient[:, :4] == 0).all()
    assert (gradient[:, 4:8] != 0).all()
    assert (gradient[:, 8:] == 0).all()


def test_the_memory_of_transformer_xl_teaches_the_key_and_value_maps() -> None:
    """With a segment of one position, attention to the own position alone would give q and k no gradient."""
    layer = build(TransformerXL, segment=1)
    gradients = torch.autograd.grad(layer(inputs()).square().sum(), [layer.q.weight, layer.k.weight])
    assert all((gradient != 0).any() for gradient in gradients)


def feedback_weights(layer: FeedbackTransformer) -> Weights:
    (block,) = layer.blocks
    return Weights(
        wo_DD=block.out.weight,
        mlp_norm_D=block.mlp_norm.gain,
        up_FD=block.mlp.up.weight,
        down_DF=block.mlp.down.weight,
        kv_norm_D=layer.memory_norm.gain,
        wk_DD=layer.k.weight,
        k_norm_D=layer.k_norm.gain,
        wv_DD=layer.v.weight,
    )


def only(layer: FeedbackTransformer, depth: int) -> None:
    """Memory made of one depth alone."""
    layer.depth.data.fill_(-1e6)
    layer.depth.data[depth] = 0


def test_feedback_from_the_output_alone_is_rt_with_zeros_for_its_temporary_pairs() -> None:
    layer, x = build(FeedbackTransformer, ONE), inputs()
    only(layer, 1)
    block = layer.blocks[0]
    q = block.q_norm(block.q(block.attention_norm(x)))
    zeros = torch.zeros_like(x)
    same(layer(x), naive_recurrence(x, q, zeros, zeros, feedback_weights(layer), layer.slopes_H, 1.0))


def test_feedback_from_the_input_alone_attends_to_earlier_inputs() -> None:
    layer, x = build(FeedbackTransformer, ONE), inputs()
    only(layer, 0)
    block, normed = layer.blocks[0], layer.memory_norm(x)
    q, k, v = block.q_norm(block.q(block.attention_norm(x))), layer.k_norm(layer.k(normed)), layer.v(normed)
    nothing = (0.0, torch.zeros(2, 12).double(), torch.zeros(2, 12).double())
    for t in range(LENGTH):
        a = attend_each(q[:, t], [nothing, *((t - j, k[:, j], v[:, j]) for j in range(t))])
        same(layer(x)[:, t], branches(x[:, t], a, block, 1.0))


@pytest.mark.parametrize("layers", [1, 3])
def test_feedback_layers_share_one_memory(layers: int) -> None:
    shape = Shape(width=12, mlp_width=20, layers=layers)
    layer, x = build(FeedbackTransformer, shape), inputs()
    share = layer.depth.exp() / layer.depth.exp().sum()
    memory: list[Tensor] = []
    for t in range(LENGTH):
        nothing = (0.0, torch.zeros(2, 12).double(), torch.zeros(2, 12).double())
        pairs = [nothing]
        for j, m in enumerate(memory):
            normed = rms_norm(m, layer.memory_norm.gain)
            k = rms_norm(normed @ layer.k.weight.T, layer.k_norm.gain)
            pairs.append((t - j, k, normed @ layer.v.weight.T))
        h = x[:, t]
        m = share[0] * h
        for l, block in enumerate(layer.blocks, start=1):
            q = rms_norm(rms_norm(h, block.attention_norm.gain) @ block.q.weight.T, block.q_norm.gain)
            h = branches(h, attend_each(q, pairs), block, layers**-0.5)
            m = m + share[l] * h
        memory.append(m)
        same(layer(x)[:, t], h)


@pytest.mark.parametrize("name", ["feedback-transformer", "rmt", "staircase"])
def test_a_model_of_several_layers_is_one_deep_layer_and_decodes_as_it_reads(name: str) -> None:
    torch.manual_seed(0)
    small = {"rmt": {"segment": 3, "memory": 2}, "staircase": {"chunk": 3, "steps": 2}}.get(name, {})
    model = LanguageModel(MIXERS[name], MIXERS[name].Config(heads=HEADS, **small), SHAPE, 7).double()
    assert len(model.layers) == 1
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 7
    states, logits = model.init_state(2), []
    for t in range(LENGTH):
        out, states = model.step(tokens[:, t], states)
        logits.append(out)
    same(torch.stack(logits, 1), model(tokens))


@pytest.mark.parametrize("shape", [ONE, SHAPE])
def test_rmt_of_one_segment_is_the_transformer_behind_prefix_tokens(shape: Shape) -> None:
    layer, x = build(RecurrentMemoryTransformer, shape, segment=LENGTH, memory=2), inputs()
    y = torch.cat([rms_norm(layer.memory_MD, layer.memory_norm.gain).expand(2, -1, -1), x], dim=1)
    for block in layer.stack.blocks:
        y = block(y)
    same(layer(x), y[:, 2:])


@pytest.mark.parametrize("shape", [ONE, SHAPE])
@pytest.mark.parametrize("length", [LENGTH, 8, 3])
def test_rmt_hands_on_what_its_layers_make_of_the_tokens_behind_a_segment(shape: Shape, length: int) -> None:
    layer, x = build(RecurrentMemoryTransformer, shape, segment=4, memory=2), inputs(length)

    def layers(y: Tensor) -> Tensor:
        for block in layer.stack.blocks:
            y = block(y)
        return y

    memory, expected = layer.memory_norm(layer.memory_MD).expand(2, -1, -1), []
    for first in range(0, length, 4):
        here = x[:, first : first + 4]
        z = layers(torch.cat([memory, here, memory], 1))
        expected.append(z[:, 2:-2])
        memory = rms_norm(z[:, -2:], layer.memory_norm.gain)
    same(layer(x), torch.cat(expected, 1))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_staircase_over_one_chunk_repeats_the_transformer(steps: int) -> None:
    """The paper's Ladder: the same layers ``steps`` times over the whole sequence."""
    layer, x = build(Staircase, chunk=LENGTH, steps=steps), inputs()
    y = x
    for _ in range(steps):
        for block in layer.stack.blocks:
            y = block(y)
    same(layer(x), y)


def test_a_staircase_chunk_attends_to_chunks_that_are_passes_ahead() -> None:
    """By recursion on (chunk, passes): pass s of chunk c sees chunk c - j before its pass s + j."""
    chunk, steps = 3, 3
    layer, x = build(Staircase, chunk=chunk, steps=steps), inputs()
    chunks = x.split(chunk, 1)

    def before(c: int, s: int) -> Tensor:
        """Chunk c after s passes."""
        if s == 0:
            return chunks[c]
        reach = [c - j for j in range(steps - s, -1, -1) if c >= j]
        y = torch.cat([before(i, s - 1 + c - i) for i in reach], 1)
        for block in layer.stack.blocks:
            y = block(y)
        return y[:, -chunks[c].shape[1] :]

    same(layer(x), torch.cat([before(c, steps) for c in range(len(chunks))], 1))


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_transformer_fam_block_by_block(earlier: int) -> None:
    block, tokens = 3, 2
    layer, x = build(TransformerFAM, block=block, earlier=earlier, memory=tokens), inputs()
    q, k, v = layer.project(x)
    memory = rms_norm(layer.memory_MD, layer.memory_norm.gain).expand(2, -1, -1)
    scale, z = SHAPE.residual_scale, layer(x)
    for first in range(0, LENGTH, block):
        q_m, k_m, v_m = layer.project(memory)
        held = [(0.0, k_m[:, i], v_m[:, i]) for i in range(tokens)]
        here = range(first, min(first + block, LENGTH))
        for t in here:
            seen = range(max(0, first - earlier * block), t + 1)
            a = attend_each(q[:, t], [*held, *((t - j, k[:, j], v[:, j]) for j in seen)])
            same(z[:, t], branches(x[:, t], a, layer, scale))
        pairs = [*held, *((here.stop - 1 - j, k[:, j], v[:, j]) for j in here)]
        attended = torch.stack([attend_each(q_m[:, i], pairs) for i in range(tokens)], 1)
        memory = rms_norm(branches(memory, attended, layer, scale), layer.memory_norm.gain)


def memories(layer: Layer, blocks: int, length: int) -> list[Tensor]:
    """The memory before each of some blocks, and behind the last, over random inputs."""
    x = inputs(blocks * length)
    state = layer.init_state(2)
    found = [state["memory"]]
    with torch.no_grad():
        for t in range(blocks * length):
            _, state = layer.step(x[:, t], state)
            if (t + 1) % length == 0:
                found.append(state["memory"])
    return found


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(
    ("layer", "values"), [(RecurrentMemoryTransformer, {"segment": 2}), (TransformerFAM, {"block": 2})]
)
def test_the_memory_stays_at_one_scale_and_takes_in_late_blocks(layer: Any, values: Any, scale: float) -> None:
    """Over 64 blocks, also under larger weights, as training may make them; unnormed it grew 50 times."""
    built = build(layer, **values, memory=2)
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.data *= scale
    found = memories(built, 64, 2)
    sizes = torch.stack([memory.square().mean().sqrt() for memory in found])
    assert sizes.max() < 1.5 * built.memory_norm.gain.square().mean().sqrt()
    assert sizes.min() > 0.5 * built.memory_norm.gain.square().mean().sqrt()

    # The change from one block to the next is as large at the end as at the start.
    changes = torch.stack([(b - a).norm() / a.norm() for a, b in pairwise(found)])
    assert changes[-8:].mean() > 0.3 * changes[:8].mean()


BAD: list[tuple[type[Layer], dict[str, int], str]] = [
    (SlidingAttention, {"window": 0}, "window: 0 must be at least 1"),
    (TransformerXL, {"segment": 0}, "segment: 0 must be at least 1"),
    (RecurrentMemoryTransformer, {"segment": 0}, "segment: 0 must be at least 1"),
    (RecurrentMemoryTransformer, {"memory": 0}, "memory: 0 must be at least 1"),
    (Staircase, {"chunk": 0}, "chunk: 0 must be at least 1"),
    (Staircase, {"steps": 0}, "steps: 0 must be at least 1"),
    (TransformerFAM, {"block": 0}, "block: 0 must be at least 1"),
    (TransformerFAM, {"earlier": -1}, "earlier: -1 must be at least 0"),
    (TransformerFAM, {"memory": 0}, "memory: 0 must be at least 1"),
]


@pytest.mark.parametrize(("layer", "values", "message"), BAD)
def test_settings_out_of_range_are_refused(layer: type[Layer], values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(layer, **values)


@pytest.mark.parametrize("layer", [Transformer, SlidingAttention, Staircase])
def test_equal_tokens_are_one_to_attention_without_positions(layer: type[Layer]) -> None:
    """An average of equal values is that value, whatever the weights: relative positions cannot count equal tokens.

    So these layers cannot tell the parity of ``1`` from that of ``1 1``, at any depth; RT can.
    """
    x_BTD = inputs(1).expand(-1, LENGTH, -1)
    for blocks in (build(layer), torch.nn.Sequential(*(build(layer) for _ in range(3)))):
        z_BTD = blocks(x_BTD)
        same(z_BTD, z_BTD[:, :1].expand_as(z_BTD))

    z_BTD = build(MIXERS["rt"])(x_BTD)
    assert (z_BTD[:, 1:] - z_BTD[:, :-1]).norm(dim=-1).min() > 1e-6
