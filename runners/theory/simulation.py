"""Theorem 1 (appendix "Simulating Transformers"): a Recurrent Transformer reproduces a Transformer.

Without norms, a Recurrent Transformer of width 3 d' computes exactly what a given Transformer of width d' and the same
depth computes, attention scores included. ``simulate`` is the construction.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.attention import alibi_slopes
from runners.theory.checks import BOUND, Check, largest, scaled_error

MODELS = ((1, 1, 1, 8), (1, 64, 1, 16), (2, 33, 4, 16), (4, 64, 4, 16), (8, 17, 8, 32), (16, 48, 2, 8))
"""Transformers to simulate: depth L, length N, heads H, width d'."""


class NormFree(NamedTuple):
    """Weights of a layer without norms. Linear maps have the shape (outputs, inputs)."""

    q_DD: Tensor
    k_DD: Tensor
    v_DD: Tensor
    out_DD: Tensor
    up_FD: Tensor
    down_DF: Tensor


def run_layer(
    x_TD: Tensor, weights: NormFree, slopes_H: Tensor, scale: float, recurrent: bool
) -> tuple[Tensor, Tensor]:
    """Compute a layer as in ``mixers``, but without norms.

    Heads, ALiBi, logits scaled by 1/sqrt(K), the output projection and the scaled residual branches are those of
    ``mixers``. With one head, slope 0, scale 1 and the identity as output projection these are the paper's equations.

    Args:
        x_TD: inputs of one sequence.
        weights: weights of the layer.
        slopes_H: ALiBi slope of each head.
        scale: factor of both residual branches.
        recurrent: compute keys and values of earlier positions from the outputs z instead of the inputs x.

    Returns:
        Outputs (T, D) and attention scores before the softmax (H, T, T), zero above the diagonal.
    """

    def heads(x: Tensor, weight_DD: Tensor) -> Tensor:
        return F.linear(x, weight_DD).unflatten(-1, (len(slopes_H), -1))

    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    scores: list[Tensor] = []
    for i, x_D in enumerate(x_TD):
        # The position attends to earlier positions and, with its temporary key and value, to itself.
        q_HK = heads(x_D, weights.q_DD)
        k_JHK = torch.stack([*keys, heads(x_D, weights.k_DD)])
        v_JHK = torch.stack([*values, heads(x_D, weights.v_DD)])
        bias_HJ = slopes_H[:, None] * (torch.arange(i + 1) - i)
        score_HJ = torch.einsum("hk,jhk->hj", q_HK, k_JHK) * q_HK.shape[-1] ** -0.5 + bias_HJ
        a_D = torch.einsum("hj,jhk->hk", score_HJ.softmax(-1), v_JHK).flatten()

        # Residual branches.
        u_D = x_D + scale * F.linear(a_D, weights.out_DD)
        z_D = u_D + scale * F.linear(F.gelu(F.linear(u_D, weights.up_FD)), weights.down_DF)

        # Persistent key and value, which later positions read.
        source_D = z_D if recurrent else x_D
        keys.append(heads(source_D, weights.k_DD))
        values.append(heads(source_D, weights.v_DD))

        outputs.append(z_D)
        scores.append(F.pad(score_HJ, (0, len(x_TD) - i - 1)))

    return torch.stack(outputs), torch.stack(scores, dim=1)


def blocks(width: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the embeddings (3 d', d') of the blocks carry, live and scratch.

    Carry and live change places from layer to layer.
    """
    first, second, scratch = torch.eye(3 * width, dtype=torch.float64).split(width, dim=1)
    return (first, second, scratch) if layer % 2 == 0 else (second, first, scratch)


def simulate(weights: NormFree, heads: int, scale: float, layer: int) -> NormFree:
    """Return the Recurrent Transformer layer that computes a Transformer layer: (x; *; 0) -> (x; y; 0).

    Keys and values read the block carry alone, which holds x before and after the layer. The block scratch receives the
    attention output.

    Each head has its d'/H features in the first third of a head of the wider layer. The wider layer divides its logits
    by a square root that is sqrt(3) times as large; the queries make up for this.

    The MLP holds the given MLP and, beside it, the linear maps that the proof asks for. These are exact because
    gelu(t) - gelu(-t) = t. With F = 4 d' they fill 8 d' of the 12 d' hidden units of an MLP of usual width.

    Args:
        weights: the Transformer layer, of width d'.
        heads: heads H of both layers.
        scale: factor of the residual branches of both layers.
        layer: index of the layer, from 0.

    Returns:
        Weights of the layer of width 3 d'.
    """
    width = weights.q_DD.shape[0]
    carry, live, scratch = blocks(width, layer)

    # Features of the narrow heads inside the wide heads.
    identity = torch.eye(3 * width, dtype=torch.float64)
    head = identity.unflatten(1, (heads, -1))[:, :, : width // heads].flatten(1)

    # Linear maps in the MLP.
    replace_live = (carry + scratch - live).T
    clear_scratch = scratch.T

    return NormFree(
        q_DD=math.sqrt(3) * head @ weights.q_DD @ carry.T,
        k_DD=head @ weights.k_DD @ carry.T,
        v_DD=head @ weights.v_DD @ carry.T,
        out_DD=scratch @ weights.out_DD @ head.T,
        up_FD=torch.cat(
            [weights.up_FD @ (carry + scratch).T, replace_live, -replace_live, clear_scratch, -clear_scratch]
        ),
        down_DF=torch.cat([live @ weights.down_DF, live / scale, -live / scale, -scratch / scale, scratch / scale], 1),
    )


def check_simulation(seed: int) -> Iterator[Check]:
    """Check theorem 1 for ``MODELS`` with random weights and inputs, from a generator seeded with ``seed``."""
    for depth, length, heads, width in MODELS:
        output_error, score_error = simulation_errors(depth, length, heads, width, seed)
        setting = f"L {depth}, N {length}, H {heads}, d' {width}"
        yield Check(check="theorem 1, outputs", setting=setting, error=output_error, bound=BOUND)
        yield Check(check="theorem 1, scores", setting=setting, error=score_error, bound=BOUND)


def simulation_errors(depth: int, length: int, heads: int, width: int, seed: int) -> tuple[float, float]:
    """Return the largest errors of outputs and attention scores over the layers of one simulated Transformer.

    The block live starts with noise, which must not matter.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.float64, generator=generator)

    sizes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    slopes_H = alibi_slopes(heads).double()
    scale = depth**-0.5

    # Inputs of the Transformer and of its simulation.
    x_TD, noise_TD = draw(length, width), draw(length, width)
    carry, live, _ = blocks(width, 0)
    wide_TD = x_TD @ carry.T + noise_TD @ live.T

    output_errors, score_errors = [], []
    for layer in range(depth):
        weights = NormFree(*(draw(*size) * size[1] ** -0.5 for size in sizes))
        y_TD, scores = run_layer(x_TD, weights, slopes_H, scale, recurrent=False)
        simulation = simulate(weights, heads, scale, layer)
        wide_TD, wide_scores = run_layer(wide_TD, simulation, slopes_H, scale, recurrent=True)

        # After the layer, carry holds its input and live its output.
        carry, live, _ = blocks(width, layer)
        output_errors.append(scaled_error(wide_TD, x_TD @ carry.T + y_TD @ live.T))
        score_errors.append(scaled_error(wide_scores, scores))
        x_TD = y_TD

    return largest(output_errors), largest(score_errors)
