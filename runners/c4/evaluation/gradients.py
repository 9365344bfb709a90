"""Measure how far back trained models use their inputs: the gradient norm at each distance.

    python -m runners.c4 gradients results/c4/RT_RUN results/c4/TRANSFORMER_RUN
    python -m runners.c4 gradients my_model --data my_corpus    # an exported model, and validation text

The figure at distance d is the norm of the gradient of the loss at position t with respect to the input embedding at
position t - d, averaged over positions t and over sequences of validation text. Oncescu et al. 2026 (arXiv:2604.21215),
section 4, "Dampening long paths without eliminating long-range access", state without a measurement that longer chains
have a smaller effect in the Recurrent Transformer, and that direct edges of attention remain.

``gradients.json`` and ``gradients.png`` in ``--out`` hold all distances. The table and the chart show the norm divided
by the norm at d = 0, because embeddings of different models have different scales. Everything runs in float32, because
the rounding of bfloat16 would hide small gradients. ``runners.c4.reference`` measures its models in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tyro.conf import Positional

from mixers.models import LanguageModel
from runners.c4.compare import labels_of
from runners.c4.data.sources import find_files, read
from runners.c4.data.tokenizer import Tokenizer, end_of_text
from runners.c4.export import load_config, load_model, load_settings
from runners.device import find_devices
from runners.ending import user_errors
from runners.files import rounded, write_json
from runners.intervals import mean_and_interval
from runners.options import parse
from runners.progress import bar, open_console

SEQUENCES, TARGETS, BATCH_SIZE = 32, 16, 16
"""Number of sequences, of positions t in each, and of sequences per backward pass, unless the user says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the size of the gradient by distance in trained models.

    Attributes:
        checkpoints: folders of runs, checkpoint files, or exported folders.
        data: C4-format files or folders of them; unless given, each run's own data.
        sequences: number of sequences of validation text.
        targets: number of positions t per sequence, evenly spaced up to the last position.
        batch_size: sequences per backward pass.
        out: folder for gradients.json and gradients.png.
        device: auto takes the GPU if there is one.
    """

    checkpoints: Positional[tuple[Path, ...]]
    data: tuple[str, ...] = ()
    sequences: int = SEQUENCES
    targets: int = TARGETS
    batch_size: int = BATCH_SIZE
    out: Path = Path("results/gradients")
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Sizes(NamedTuple):
    """Gradient norms by distance.

    Attributes:
        targets: positions t whose losses were differentiated.
        loss: mean of these losses in nats per token.
        gradient: mean gradient norm at distances 0, 1, ..., T - 1.
        half_width: half of the 95% t-interval of each mean over the sequences.
    """

    targets: Sequence[int]
    loss: float
    gradient: Sequence[float]
    half_width: Sequence[float]


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    console = open_console()
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)
        if not options.checkpoints:
            raise ValueError("no models: name folders of runs, such as results/c4/RUN")
        device = find_devices(options.device)[0]
        checkpoints = list(dict.fromkeys(options.checkpoints))
        labels = labels_of({str(path): load_settings(path) for path in checkpoints})

        found, rows = {}, []
        for path, label in zip(checkpoints, labels.values(), strict=True):
            config = load_config(path)
            model, tokenizer = load_model(path)
            texts = (text for _, text in read(find_files(options.data or config.data)["validation"], [], 0))
            tokens_ST = first_windows(texts, tokenizer, options.sequences, config.seq_len)
            sizes = sizes_by_distance(model.to(device), tokens_ST, device, options.targets, options.batch_size)
            console.print(f"{path}: loss {sizes.loss:.4f} nats per token", soft_wrap=True)

            found[label] = np.array([sizes.gradient, sizes.half_width]) / sizes.gradient[0]
            described = {name: getattr(config, name) for name in ("mixer", "layers", "parametrisation", "seq_len")}
            described |= {"checkpoint": path.name, "width": config.shape().width, "sequences": len(tokens_ST)}
            rows.append(described | sizes._asdict())

        # Write file and chart, and print the means at distances 0, 1, 2, 4, ..., and at the largest distance.
        import pandas

        from runners.c4.charts import plot_gradients  # imports Matplotlib

        write_json(options.out / "gradients.json", rows)
        plot_gradients(found, options.out / "gradients.png")
        table = pandas.DataFrame({label: pandas.Series(mean_T) for label, (mean_T, _) in found.items()})
        distances = sorted({0, len(table) - 1, *(2**n for n in range((len(table) - 1).bit_length()))})
        table = table.loc[distances].rename_axis("distance")
        figures = table.to_string(float_format="{:.2e}".format)
        console.print("gradient relative to distance 0", figures, sep="\n", soft_wrap=True)
        console.print(f"chart: {options.out / 'gradients.png'}", soft_wrap=True)


def sizes_by_distance(
    model: LanguageModel,
    tokens_ST: Tensor,
    device: torch.device,
    targets: int = TARGETS,
    batch_size: int = BATCH_SIZE,
) -> Sizes:
    """Measure a model, whose parameters need no gradients afterwards.

    Args:
        model: a model on ``device``.
        tokens_ST: two or more windows (S, T + 1).
        device: device of the model.
        targets: number of positions t per sequence, evenly spaced up to the last position.
        batch_size: sequences per backward pass.
    """
    length = tokens_ST.shape[1] - 1
    count = min(targets, length)
    at = [length * (n + 1) // count - 1 for n in range(count)]

    # Losses and gradient norms of all sequences.
    model.requires_grad_(False)
    batches = bar(tokens_ST.split(batch_size), "measuring gradients")
    parts = [gradient_sizes(model, part_BT.to(device), at) for part_BT in batches]
    losses_SP, sizes_SPT = (torch.cat(y).double().cpu() for y in zip(*parts, strict=True))

    # Mean over targets, then over sequences.
    by_distance_ST = np.array([mean_by_distance(sizes_PT.numpy(), at) for sizes_PT in sizes_SPT])
    mean_T, half_T = zip(*map(mean_and_interval, by_distance_ST.T.tolist()), strict=True)
    return Sizes(at, losses_SP.mean().item(), [*map(rounded, mean_T)], [*map(rounded, half_T)])


def first_windows(texts: Iterator[str], tokenizer: Tokenizer, count: int, length: int) -> Tensor:
    """Return the first windows (count, length + 1) of the concatenated texts.

    An end-of-text token stands before the first text and after each text. As in training, the last token of a window is
    also the first token of the next window.

    Raises:
        ValueError: the texts have too few tokens.
    """
    end = end_of_text(tokenizer)
    tokens, needed = [end], count * length + 1
    for text in texts:
        tokens += [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        if len(tokens) >= needed:
            return torch.tensor(tokens[:needed]).unfold(0, length + 1, length)

    fitting = (len(tokens) - 1) // length
    raise ValueError(f"the validation text fills {fitting} sequences of {length} tokens: lower --sequences {count}")


def gradient_sizes(model: LanguageModel, tokens_BT: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the losses at the targets and the norms of their gradients.

    Args:
        model: a model; matrix products run in the dtype of its parameters.
        tokens_BT: windows (B, T + 1).
        targets: P positions t; the loss at t is the loss of predicting the token at t + 1.

    Returns:
        Losses (B, P) in nats, and norms (B, P, T) of their gradients with respect to the input embedding of each
        position.
    """
    at_P = torch.tensor(targets, device=tokens_BT.device)
    x_BTD = model.embedding(tokens_BT[:, :-1]).detach().requires_grad_()
    hidden_BPD = model.norm(model.layers(x_BTD))[:, at_P]
    target_BP = tokens_BT[:, 1:][:, at_P]
    losses_BP = F.cross_entropy(model.readout(hidden_BPD).mT, target_BP, reduction="none")

    # Sequences do not depend on each other, so one backward pass of their sum gives the gradient of each.
    sizes = []
    for loss_B in losses_BP.unbind(1):
        (dx_BTD,) = torch.autograd.grad(loss_B.sum(), x_BTD, retain_graph=True)
        sizes.append(torch.linalg.vector_norm(dx_BTD, dim=-1))
    return losses_BP.detach(), torch.stack(sizes, dim=1)


def mean_by_distance(sizes_PT: NDArray[np.float64], targets: Sequence[int]) -> NDArray[np.float64]:
    """Return the mean norm (T,) at each distance d over the targets t >= d; the last position must be a target."""
    sums_T, counts_T = np.zeros(sizes_PT.shape[1]), np.zeros(sizes_PT.shape[1])
    for t, sizes_T in zip(targets, sizes_PT, strict=True):
        sums_T[: t + 1] += sizes_T[t::-1]
        counts_T[: t + 1] += 1
    return sums_T / counts_T
