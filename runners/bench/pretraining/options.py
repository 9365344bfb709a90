"""Options of the benchmark ``pretraining``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from runners.bench.implementations import Implementation
from runners.bench.options import LEAST_REPEATS, check_names, parse_options
from runners.bench.pretraining.implementations import DECODERS, LAYERS
from runners.c4.config import HEAD_WIDTH, SIZES, Config
from runners.c4.reference.experiments import WIDTHS_30M

Part = Literal["layers", "training", "decode"]
VOCABULARY = 32_100
"""Tokens of T5's vocabulary, which the paper uses."""
LEARNING_RATE = 1e-6
"""Small, so that training steps on random tokens stay finite."""
OF_SIZES: Mapping[str, Mapping[int, int | None]] = {
    "30m": WIDTHS_30M,
    **{size: {layers: widths.width for layers, widths in models.items()} for size, models in SIZES.items()},
}
"""Widths of models by size and number of layers."""
WAYS = "ways to compute a layer; training takes those that run as graphs on a GPU, and the Transformer."


@dataclass(frozen=True, kw_only=True)
class PretrainingOptions:
    """Time layers at the width of language models, whole training steps, and decoding.

    Attributes:
        parts: layers; training, steps of whole models; decode, one token of whole models.
        widths: model widths D; all comparisons but that of widths use the first.
        batches: sequences of a forward pass; forward+backward takes the smallest and --batch-size.
        lengths: sequence lengths N, with the smallest of the batches, and with --batch-size up to --most-tokens.
        batch_size: sequences at every width, and of a training step.
        length: sequence length of widths, batches and training; context of decoding.
        most_tokens: tokens of the largest batch in the comparison of lengths.
        size: size of the models, which with their layers gives their width: the paper's; 30m, those of
            python -m runners.c4.reference --experiment transition and variants; or tiny, of width 64.
        layers: layers of the models; in decoding the Transformer has twice the number.
        stack: layers that are timed on top of each other, beside single layers.
        model_width: width of the models, in place of that of their size.
        head_width: head dim.
        vocabulary: tokens of the models' vocabulary.
        decode_batches: sequences decoded together.
        repeats: repeats of each figure, at least 5; the budget may leave out those after 5.
        limit: seconds; a cell is skipped if one eager pass takes longer for each of its layers.
        budget: seconds; once they are spent, only cells that take less than a second altogether are timed.
        device: auto takes a GPU if there is one.
        out: folder of results.
    """

    parts: tuple[Part, ...] = ("layers", "training", "decode")
    implementations: Annotated[tuple[str, ...], tyro.conf.arg(help=f"{WAYS} Names: {', '.join(LAYERS)}.")]
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_size: int
    length: int
    most_tokens: int
    size: Literal["tiny", "30m", "150m", "300m"]
    layers: tuple[int, ...]
    stack: int = 12
    model_width: int | None = None
    head_width: int = HEAD_WIDTH
    vocabulary: int = VOCABULARY
    decode_batches: tuple[int, ...]
    repeats: int = LEAST_REPEATS
    limit: float = 3.0
    budget: float = 300.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")


PRESETS = {
    "cuda": PretrainingOptions(
        implementations=tuple(LAYERS),
        widths=(1024, 1408, 2048),
        batches=(32, 128, 512, 2048),
        lengths=(128, 256, 512, 1024, 2048, 4096),
        batch_size=512,
        length=512,
        most_tokens=2**19,
        size="300m",
        layers=(12, 6),
        decode_batches=(1, 64),
    ),
    "cpu": PretrainingOptions(
        implementations=("rt-tiled", "transformer"),
        widths=(64,),
        batches=(2,),
        lengths=(16, 32, 64),
        batch_size=4,
        length=16,
        most_tokens=128,
        size="tiny",
        layers=(2,),
        stack=2,
        vocabulary=256,
        decode_batches=(1, 2),
        budget=60.0,
    ),
}
"""Defaults by type of device."""


def parse(arguments: Sequence[str]) -> PretrainingOptions:
    """Read the command line, with the defaults of the device.

    Raises:
        ValueError: an option does not fit; the message says what to do.
    """
    several = ("parts", "implementations", "widths", "batches", "lengths", "layers", "decode_batches")
    counts = (*several[2:], "stack", "batch_size", "length", "most_tokens", "model_width", "head_width", "vocabulary")
    options: PretrainingOptions
    options, device = parse_options(PretrainingOptions, PRESETS, arguments, several, counts)
    check_names(options.implementations, [name for name, i in LAYERS.items() if device.type == "cuda" or not i.graph])

    # All models must exist, and heads must divide every width.
    decoded = [2 * count for count in options.layers if "decode" in options.parts]
    models = {*options.layers, *decoded} if {"training", "decode"} & set(options.parts) else set()
    widths = (model_config(options, DECODERS["rt-step"], count, 1).shape().width for count in sorted(models))
    if bad := [width for width in (*options.widths, *widths) if width % options.head_width]:
        raise ValueError(f"width {bad[0]} is no multiple of --head-width {options.head_width}")
    return options


def model_config(options: PretrainingOptions, implementation: Implementation, layers: int, sequences: int) -> Config:
    """Return the pretraining run of a model.

    Args:
        options: ``model_width`` is its width; without it, ``size`` and ``layers`` determine the width.
        implementation: its mixer.
        layers: its number of layers.
        sequences: its batch size.

    Raises:
        ValueError: the size has no model of this number of layers, and there is no ``model_width``.
    """
    config = Config(
        mixer="transformer" if implementation.parallel else "rt",
        layers=layers,
        width=options.model_width or _width(options.size, layers),
        batch_size=sequences,
        seq_len=options.length,
        lr=LEARNING_RATE,
    )
    return replace(config, heads=config.shape().width // options.head_width)


def _width(size: str, layers: int) -> int | None:
    """Return the width of a model of a size.

    Raises:
        ValueError: the size has no model of this number of layers.
    """
    if size == "tiny":
        return 64

    widths = OF_SIZES[size]
    if layers not in widths:
        raise ValueError(
            f"no {size} model of {layers} layers, only of {', '.join(map(str, widths))}: choose one, or give "
            "--model-width (in decoding the Transformer has twice the layers of RT)"
        )
    return widths[layers]
