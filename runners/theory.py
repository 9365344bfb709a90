"""Check the two theorems of the Recurrent Transformer's paper (Oncescu et al. 2026, arXiv:2604.21215) numerically.

    python -m runners.theory
    python -m runners.theory --out results --seed 1

Theorem 1 (appendix "Simulating Transformers"): without norms, a Recurrent Transformer of width 3 d' computes exactly
what a given Transformer of width d' and the same depth computes, attention scores included. ``simulate`` is the
construction.

Theorem 2 (section "Training Stability"): in the layer z_k = x_k + (alpha / k) (V x_k + V sum_{j<k} z_j), of uniform
attention alone, dz_k/dx_1 = (1/k!) sum_r [k r] alpha^r V^r for k >= 2, where the unsigned Stirling number of the first
kind [k r] counts the permutations of k elements with r cycles. The weights [k r] / k! of the path lengths r are thus
the distribution of the number of cycles of a random permutation, whose mean 1 + 1/2 + ... + 1/k grows like ln k.

Everything is in float64. Writes ``theory/theory.json`` and ``theory/path-lengths.png`` below the results folder; the
exit status is 1 if a check fails.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.attention import alibi_slopes
from mixers.rt.naive import Weights, naive_recurrence
from runners.cli import check_seed, cli, not_understood, run_command, user_errors
from runners.files import write_atomically, write_json

BOUND = 1e-10
MODELS = ((1, 1, 1, 8), (1, 64, 1, 16), (2, 33, 4, 16), (4, 64, 4, 16), (8, 17, 8, 32), (16, 48, 2, 8))
"""Transformers of theorem 1: depth, length, heads, width d'."""
POSITIONS = (2, 3, 4, 8, 16, 32, 64)
"""Positions k of theorem 2."""
WIDTH = 4
"""Model width in theorem 2."""
LONGEST = 512
"""Positions in the figure."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check the two theorems of the Recurrent Transformer's paper numerically.

    Attributes:
        out: folder of results.
        seed: seed of weights and inputs.
    """

    out: Path = Path("results")
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """The largest error of a statement in a setting, as a share of the largest expected value; NaN does not hold."""

    check: str
    setting: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, in which an error that is no number is None."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None, "holds": self.holds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with user_errors(ValueError):
        options, unknown = cli(Options, Options(), sys.argv[1:] if arguments is None else arguments)
        if unknown:
            raise ValueError(not_understood(unknown[0]))
        check_seed(options.seed)
    console, folder = Console(markup=False), options.out / "theory"
    checks = [*check_simulation(options.seed), *check_gradient(options.seed), check_path_lengths()]
    table = Table(title="theorems of arXiv:2604.21215, float64", title_justify="left")
    for heading in ("check", "setting"):
        table.add_column(heading)
    for heading in ("largest\nerror", "bound", "holds"):
        table.add_column(heading, justify="right")
    for c in checks:
        table.add_row(c.check, c.setting, f"{c.error:.1e}", f"{c.bound:.0e}", "yes" if c.holds else "NO")
    console.print(table)
    with user_errors(OSError):
        write_json(folder / "theory.json", [c.to_dict() for c in checks])
        plot_path_lengths(folder / "path-lengths.png")
    console.print(
        f"L layers, N positions, H heads, width d'; positions k up to {POSITIONS[-1]}; "
        "errors as a share of the largest expected value"
    )
    console.print(f"stored in {folder}", soft_wrap=True)
    if not all(c.holds for c in checks):
        raise SystemExit(1)


class NormFree(NamedTuple):
    """Weights of a layer without norms, linear maps as (outputs, inputs)."""

    q_DD: Tensor
    k_DD: Tensor
    v_DD: Tensor
    out_DD: Tensor
    up_FD: Tensor
    down_DF: Tensor


def run_layer(
    x_TD: Tensor, weights: NormFree, slopes_H: Tensor, scale: float, recurrent: bool
) -> tuple[Tensor, Tensor]:
    """Outputs (T, D) and attention scores (H, T, T) of a layer as in ``mixers``, but without norms.

    Heads, ALiBi, 1/sqrt(K) scaled logits, output projection and branches scaled by ``scale`` are as there; with one
    head, no slope, scale 1 and an identity as output projection these are the paper's equations.
    """

    def heads(x: Tensor, weight_DD: Tensor) -> Tensor:
        return F.linear(x, weight_DD).unflatten(-1, (len(slopes_H), -1))

    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    scores: list[Tensor] = []
    for i, x_D in enumerate(x_TD):
        q_HK = heads(x_D, weights.q_DD)
        k_JHK = torch.stack([*keys, heads(x_D, weights.k_DD)])
        v_JHK = torch.stack([*values, heads(x_D, weights.v_DD)])
        bias_HJ = slopes_H[:, None] * (torch.arange(i + 1) - i)
        score_HJ = torch.einsum("hk,jhk->hj", q_HK, k_JHK) * q_HK.shape[-1] ** -0.5 + bias_HJ
        a_D = torch.einsum("hj,jhk->hk", score_HJ.softmax(-1), v_JHK).flatten()
        u_D = x_D + scale * F.linear(a_D, weights.out_DD)
        z_D = u_D + scale * F.linear(F.gelu(F.linear(u_D, weights.up_FD)), weights.down_DF)
        source_D = z_D if recurrent else x_D
        keys.append(heads(source_D, weights.k_DD))
        values.append(heads(source_D, weights.v_DD))
        outputs.append(z_D)
        scores.append(F.pad(score_HJ, (0, len(x_TD) - i - 1)))
    return torch.stack(outputs), torch.stack(scores, dim=1)


def blocks(width: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings (3 d', d') of carry, live and scratch; carry and live change places from layer to layer."""
    first, second, scratch = torch.eye(3 * width, dtype=torch.float64).split(width, dim=1)
    return (first, second, scratch) if layer % 2 == 0 else (second, first, scratch)


def simulate(weights: NormFree, heads: int, scale: float, layer: int) -> NormFree:
    """Weights of the Recurrent Transformer layer that computes a Transformer layer: (x; *; 0) -> (x; y; 0).

    Keys and values read carry alone, which holds x before and after the layer; scratch takes the attention output.
    Each head has its d'/H features in the first third of a head of the wider layer, and the square root of 3 undoes
    that layer's scaling of the logits. The MLP holds the given one beside the linear maps that the proof asks of it,
    exact since gelu(t) - gelu(-t) = t: with F = 4 d' they fill 8 d' of the 12 d' hidden units of an MLP of usual width.
    """
    width = weights.q_DD.shape[0]
    carry, live, scratch = blocks(width, layer)
    identity = torch.eye(3 * width, dtype=torch.float64)
    head = identity.unflatten(1, (heads, -1))[:, :, : width // heads].flatten(1)
    replace_live, clear_scratch = (carry + scratch - live).T, scratch.T
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
    """Theorem 1 on random weights and inputs; the live block starts with noise, which must not matter."""
    for depth, length, heads, width in MODELS:
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(rows, columns, dtype=torch.float64, generator=generator)

        sizes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        slopes_H, scale = alibi_slopes(heads).double(), depth**-0.5
        x_TD, noise_TD = draw(length, width), draw(length, width)
        carry, live, _ = blocks(width, 0)
        wide_TD = x_TD @ carry.T + noise_TD @ live.T
        output_errors, score_errors = [], []
        for layer in range(depth):
            weights = NormFree(*(draw(*size) * size[1] ** -0.5 for size in sizes))
            y_TD, scores = run_layer(x_TD, weights, slopes_H, scale, recurrent=False)
            simulation = simulate(weights, heads, scale, layer)
            wide_TD, wide_scores = run_layer(wide_TD, simulation, slopes_H, scale, recurrent=True)
            carry, live, _ = blocks(width, layer)
            output_errors.append(relative_error(wide_TD, x_TD @ carry.T + y_TD @ live.T))
            score_errors.append(relative_error(wide_scores, scores))
            x_TD = y_TD
        setting = f"L {depth}, N {length}, H {heads}, d' {width}"
        yield Check(check="theorem 1, outputs", setting=setting, error=largest(output_errors), bound=BOUND)
        yield Check(check="theorem 1, scores", setting=setting, error=largest(score_errors), bound=BOUND)


def stirling(rows: int) -> Iterator[list[int]]:
    """Rows k = 1, 2, ... of the unsigned Stirling numbers of the first kind, [k 0] ... [k k]."""
    row = [0, 1]
    for k in range(1, rows + 1):
        yield row
        row = [k * stay + join for stay, join in zip([*row, 0], [0, *row], strict=True)]


def stirling_gradient(k: int, matrix_DD: Tensor) -> Tensor:
    """``(1/k!) sum_r [k r] matrix^r`` by Horner's rule."""
    *_, row = stirling(k)
    total_DD = torch.zeros_like(matrix_DD)
    for number in reversed(row[1:]):
        total_DD = matrix_DD @ (total_DD + number / math.factorial(k) * torch.eye(len(matrix_DD)).to(matrix_DD))
    return total_DD


def uniform_layer(x_TD: Tensor, v_DD: Tensor, alpha: float) -> Tensor:
    """Outputs (T, D) of the layer of theorem 2: ``naive_recurrence`` with queries, keys and MLP zero, no norm on z."""
    none_DD, identity_DD = torch.zeros_like(v_DD), torch.eye(len(v_DD)).to(v_DD)
    weights = Weights(
        wo_DD=identity_DD,
        mlp_norm_D=torch.ones_like(v_DD[0]),
        up_FD=none_DD,
        down_DF=none_DD,
        kv_norm_D=None,
        wk_DD=none_DD,
        k_norm_D=None,
        wv_DD=v_DD,
    )
    x_BTD = x_TD[None]
    none_BTD = torch.zeros_like(x_BTD)
    return naive_recurrence(x_BTD, none_BTD, none_BTD, F.linear(x_BTD, v_DD), weights, torch.zeros(1), alpha)[0]


def check_gradient(seed: int) -> Iterator[Check]:
    """Theorem 2: Jacobians by autograd through the project's recurrence against exact Stirling numbers."""
    gaussian_DD = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    orthogonal_DD, _ = torch.linalg.qr(gaussian_DD)
    rest_TD = torch.zeros(POSITIONS[-1] - 1, WIDTH, dtype=torch.float64)
    for name, v_DD in (("orthogonal", orthogonal_DD), ("Gaussian", gaussian_DD * WIDTH**-0.5)):
        for alpha in (0.5, 1.0, 2.0):

            def outputs(x_D: Tensor, v_DD: Tensor = v_DD, alpha: float = alpha) -> Tensor:
                return uniform_layer(torch.cat([x_D[None], rest_TD]), v_DD, alpha)[[k - 1 for k in POSITIONS]]

            x_D = torch.ones(WIDTH, dtype=torch.float64)
            jacobians = torch.autograd.functional.jacobian(outputs, x_D, vectorize=True)
            formulas = [stirling_gradient(k, alpha * v_DD) for k in POSITIONS]
            error = largest(list(map(relative_error, jacobians, formulas)))
            setting = f"{name} V, alpha {alpha:g}"
            yield Check(check="theorem 2, gradients", setting=setting, error=error, bound=BOUND)


def check_path_lengths() -> Check:
    """The weights of all path lengths sum to 1 and their mean is the harmonic number, in exact fractions."""
    error, harmonic = Fraction(0), Fraction(0)
    for k, row in enumerate(stirling(POSITIONS[-1]), start=1):
        harmonic += Fraction(1, k)
        total = Fraction(sum(row), math.factorial(k))
        mean = Fraction(sum(r * number for r, number in enumerate(row)), math.factorial(k))
        error = max(error, abs(total - 1), abs(mean - harmonic))
    setting = "sum and mean"
    return Check(check="theorem 2, path lengths", setting=setting, error=float(error), bound=0.0)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if one is NaN."""
    return float(np.max(errors))


def plot_path_lengths(path: Path) -> None:
    """PNG of the weights [k r] / k!: all k up to ``LONGEST`` with their mean, and some k as curves."""
    rows = [[number / math.factorial(k) for number in row] for k, row in enumerate(stirling(LONGEST), start=1)]
    shown = 16
    grid = np.array([[*row[: shown + 1], *[0.0] * (shown + 1 - len(row))][1:] for row in rows]).T
    k = np.arange(1, LONGEST + 1)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    edges = np.append(k - 0.5, LONGEST + 0.5), np.arange(0.5, shown + 1)
    mesh = left.pcolormesh(*edges, np.ma.masked_less(grid, 1e-4), norm=LogNorm(1e-4, 1.0), cmap="Blues")
    figure.colorbar(mesh, ax=left, label="weight  [k r] / k!")
    left.plot(k, np.cumsum(1 / k), color="darkorange", label="mean  1 + 1/2 + ... + 1/k")
    left.plot(k, np.log(k), color="darkorange", linestyle="dotted", label="ln k")
    left.set(xscale="log", xlabel="position k", ylabel="path length r", xlim=(1, LONGEST), ylim=(0.5, shown + 0.5))
    left.legend(loc="upper left", fontsize=8)
    for n, position in enumerate((2, 8, 32, 128, LONGEST)):
        weights = rows[position - 1][1 : shown + 1]
        right.plot(
            range(1, len(weights) + 1), weights, marker="o", markersize=3, color=f"C{n}", label=f"k = {position}"
        )
    right.set(xlabel="path length r", ylabel="weight  [k r] / k!", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle("Theorem 2: weights of the paths of length r from position 1 to position k")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


if __name__ == "__main__":
    run_command(main, "interrupted: the checks were not finished")
