"""What the benchmark ``pretraining`` can measure: its options, implementations, cells and targets."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.bench.models import LEARNING_RATE, PlainTransformer
from runners.bench.timing import Implementation
from runners.bench.turns import LEAST_REPEATS, check_names, parse_options
from runners.c4.config import HEAD_WIDTH, Config

Phase = Literal["forward", "forward+backward", "training", "decode"]
Part = Literal["layers", "training", "decode"]
PHASES: tuple[Phase, ...] = ("forward", "forward+backward", "training", "decode")
MLP_FACTOR = 4
VOCABULARY = 32_100
"""Tokens of T5's vocabulary, the paper's."""

LAYERS = {
    "rt-tiled-graph": Implementation(
        label="RT tiled, graph", layer=RecurrentTransformer, method="tiled", graph=True, form="single"
    ),
    "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled", form="single"),
    "rt-wavefront-graph": Implementation(
        label="RT wavefront, graph", layer=RecurrentTransformer, method="wavefront", graph=True, form="single"
    ),
    "rt-wavefront": Implementation(label="RT wavefront", layer=RecurrentTransformer, method="wavefront", form="single"),
    "transformer-compiled": Implementation(label="Transformer, compiled", layer=PlainTransformer, form="compiled"),
    "transformer": Implementation(label="Transformer", layer=Transformer, form="single"),
}
DECODERS = {
    "rt-step-graph": Implementation(label="RT, graph", layer=RecurrentTransformer, graph=True, form="step"),
    "rt-step": Implementation(label="RT", layer=RecurrentTransformer, form="step"),
    "transformer-step-graph": Implementation(label="Transformer, graph", layer=Transformer, graph=True, form="step"),
    "transformer-step": Implementation(label="Transformer", layer=Transformer, form="step"),
}


WAYS = "ways to compute a layer; training takes those that run as graphs on a GPU, and the Transformer."


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time layers at the width of language models, whole training steps, and decoding.

    Attributes:
        parts: layers; training steps of whole models; decode, a token by the step form of whole models.
        widths: model widths D; the first is that of all but the comparison of widths.
        batches: sequences of a forward pass; forward+backward takes the smallest and --batch-size.
        lengths: sequence lengths N, with the smallest of the batches, and with --batch-size up to --most-tokens.
        batch_size: sequences at every width, and of a training step.
        length: sequence length of widths, batches and training; context of decoding.
        most_tokens: tokens of the largest batch in the comparison of lengths.
        layers: layers of the 300M models; the Transformer that is decoded has twice as many.
        stack: layers that are timed on top of each other, beside single ones.
        model_width: width of the models, in place of the paper's.
        head_width: head dim.
        vocabulary: tokens of the models' vocabulary.
        decode_batches: sequences decoded together.
        repeats: repeats of each figure, at least 5.
        limit: seconds; what takes longer in one eager pass, for each of its layers, is skipped.
        budget: seconds after which only what takes less than a second altogether is still timed.
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
    "cuda": Options(
        implementations=tuple(LAYERS),
        widths=(1024, 1408, 2048),
        batches=(32, 128, 512, 2048),
        lengths=(128, 256, 512, 1024, 2048, 4096),
        batch_size=512,
        length=512,
        most_tokens=2**19,
        layers=(12, 6),
        decode_batches=(1, 64),
    ),
    "cpu": Options(
        implementations=("rt-tiled", "transformer"),
        widths=(64,),
        batches=(2,),
        lengths=(16, 32, 64),
        batch_size=4,
        length=16,
        most_tokens=128,
        layers=(2,),
        stack=2,
        model_width=64,
        vocabulary=256,
        decode_batches=(1, 2),
        budget=60.0,
    ),
}
"""Defaults by type of device."""


class Target(NamedTuple):
    """A figure of a cell as ``pretraining_report`` derives it, and the least or largest value it should have."""

    figure: str
    bound: float
    at_least: bool = False


LAYER_TARGETS_MS = {
    ("forward", 1024, 32): 9.0,
    ("forward", 1024, 512): 27.0,
    ("forward+backward", 1024, 512): 60.0,
    ("forward+backward", 1408, 512): 105.0,
    ("forward+backward", 2048, 512): 200.0,
}
"""Milliseconds of a layer at N 512 by phase, width and batch. These and the following: ours on one H200."""
STACK_TARGETS_MS = {("forward", 1024, 32): 4.0, ("forward", 1024, 512): 18.0}
"""Milliseconds a layer of a stack of twelve."""
TRAINING_TARGETS = {12: 160e3, 6: 170e3}
"""Tokens a second of the 300M models by layers."""
MODEL_TARGETS = (
    Target("of_transformer", 0.7, at_least=True),
    Target("setup_seconds", 30.0),
    Target("peak_gib", 139.0),
)
RECOMPUTED_TARGETS = {12: Target("peak_gib", 48.0)}
"""Memory of the 300M models by layers where activations are computed again."""
QUADRATIC_TARGET = Target("quadratic_share", 1.3)
QUADRATIC_UP_TO = 2048
OURS = "rt-wavefront-graph"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure to measure.

    Attributes:
        micro_batch_size: sequences of one forward pass in training; unless given, all.
        recompute: whether training computes activations again in the backward pass.
    """

    phase: Phase
    width: int
    layers: int = 1
    batch_size: int
    length: int
    implementation: str
    micro_batch_size: int | None = None
    recompute: bool = False

    @property
    def group(self) -> Hashable:
        """What its implementations, timed in turns, have in common; no two models in training fit a GPU."""
        if self.phase == "training":
            return self
        if self.phase == "decode":
            return self.phase, self.batch_size, self.length
        return self.phase, self.batch_size, self.length, self.width, self.layers


def parse(arguments: Sequence[str]) -> Options:
    """Options of the command line, with the defaults of the device.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    several = ("parts", "implementations", "widths", "batches", "lengths", "layers", "decode_batches")
    counts = (*several[2:], "stack", "batch_size", "length", "most_tokens", "model_width", "head_width", "vocabulary")
    options: Options
    options, device = parse_options(Options, PRESETS, arguments, several, counts)
    check_names(options.implementations, [name for name, i in LAYERS.items() if device.type == "cuda" or not i.graph])
    decoded = [2 * count for count in options.layers if "decode" in options.parts]
    models = {*options.layers, *decoded} if {"training", "decode"} & set(options.parts) else set()
    widths = (model_of(options, DECODERS["rt-step"], count, 1).shape().width for count in sorted(models))
    if bad := [width for width in (*options.widths, *widths) if width % options.head_width]:
        raise ValueError(f"width {bad[0]} is no multiple of --head-width {options.head_width}")
    return options


def layer_cells(options: Options, names: Sequence[str]) -> Iterator[Cell]:
    """Figures of one layer, the most wanted first: the comparison of widths, that of lengths, that of batches.

    Without its graph a recurrent layer that also runs in one takes long, and is timed at the first width and
    ``options.length`` alone.
    """
    width, small, usual = options.widths[0], min(options.batches), options.batch_size
    both = PHASES[:2]
    places = [(phase, width, batch, options.length) for batch in (usual, small) for phase in both]
    places += [(phase, other, usual, options.length) for other in options.widths[1:] for phase in both]
    for batch in (small, usual):
        lengths = [n for n in sorted(options.lengths) if batch == small or batch * n <= options.most_tokens]
        places += [(phase, width, batch, n) for n in lengths for phase in both]
    places += [(PHASES[0], width, batch, options.length) for batch in sorted(options.batches)]
    for phase, at, batch, length in dict.fromkeys(places):
        for name in names:
            if f"{name}-graph" not in names or (at, length) == (width, options.length):
                yield Cell(phase=phase, width=at, batch_size=batch, length=length, implementation=name)


def stack_cells(options: Options, names: Sequence[str]) -> Iterator[Cell]:
    """Figures of layers on top of each other, which may work at the same time."""
    for batch in dict.fromkeys((options.batch_size, min(options.batches))):
        for phase in PHASES[:2]:
            for name in names:
                yield Cell(
                    phase=phase,
                    width=options.widths[0],
                    layers=options.stack,
                    batch_size=batch,
                    length=options.length,
                    implementation=name,
                )


def model_of(options: Options, implementation: Implementation, layers: int, sequences: int) -> Config:
    """The pretraining run of a model; without a width, of the paper's 300M model with so many layers."""
    config = Config(
        mixer="transformer" if implementation.parallel else "rt",
        layers=layers,
        width=options.model_width,
        batch_size=sequences,
        seq_len=options.length,
        lr=LEARNING_RATE,
    )
    return replace(config, heads=config.shape().width // options.head_width)
