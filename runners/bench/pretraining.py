"""Time layers and models at the width of language models: layers, training steps, and decoding.

    python -m runners.bench pretraining
    python -m runners.bench pretraining --parts layers --implementations rt-wavefront-graph gla --lengths 512 2048
    python -m runners.bench pretraining --parts training --models 12 1408 --recompute
    python -m runners.bench pretraining --parts decode --models 6 640 12 448 --vocabulary 8000

Implementations of a layer take turns, and so do those of decoding. A model in training is timed alone: a GPU has no
memory for two. If it lacks memory, its batch is halved until it fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from mixers.base import Shape
from mixers.decoding import Decoder
from mixers.registry import find_mixer
from runners.bench.measure import (
    CHECK_BATCH,
    FLOAT32_BOUND,
    OUT_OF_MEMORY,
    Case,
    Common,
    Implementation,
    Outcome,
    Pass,
    Record,
    check,
    options_and_device,
    random_pass,
    relative_error,
)
from runners.c4.config import HEAD_WIDTH, Config
from runners.c4.distributed import World
from runners.c4.model import build as build_model
from runners.c4.step import ModelStepper
from runners.device import captured
from runners.ending import user_errors

LEARNING_RATE = 1e-6
"""Small, so that training steps on random tokens stay finite."""
IMPLEMENTATIONS = {
    "rt-tiled-graph": Implementation(mixer="rt", method="tiled", graph=True),
    "rt-tiled": Implementation(mixer="rt", method="tiled"),
    "rt-wavefront-graph": Implementation(mixer="rt", method="wavefront", graph=True),
    "rt-wavefront": Implementation(mixer="rt", method="wavefront"),
    "transformer": Implementation(mixer="transformer"),
}
"""Ways to compute a layer; a name of a layer stands for its usual one."""


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Time layers at the width of language models, whole training steps, and decoding.

    Attributes:
        parts: layers, forward and forward+backward; training, steps of models; decode, one token of models.
        widths: model widths D of layers.
        depths: layers on top of each other.
        batches: sequences that layers read.
        lengths: sequence lengths N of layers.
        models: layers and width of each model that is trained or decodes; those of the paper unless given.
        batch_size: sequences of a training step.
        seq_len: length of a training step's sequences, and context of decoding.
        decode_batches: sequences decoded together.
        head_width: width of a head.
        vocabulary: tokens of the models' vocabulary; unless given, those of T5's, as in the paper.
        recompute: compute activations again in the backward pass of training.
    """

    parts: tuple[Literal["layers", "training", "decode"], ...] = ("layers", "training", "decode")
    implementations: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help=f"ways to compute a layer, of {', '.join(IMPLEMENTATIONS)}, and any layer by name."),
    ] = tuple(IMPLEMENTATIONS)
    widths: tuple[int, ...] = (1024,)
    depths: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (32, 512)
    lengths: tuple[int, ...] = (512,)
    models: tuple[tuple[int, int], ...] = ((12, 1408), (6, 2048))
    batch_size: int = 512
    seq_len: int = 512
    decode_batches: tuple[int, ...] = (1, 64)
    head_width: int = HEAD_WIDTH
    vocabulary: int = 32_100
    recompute: bool = False
    limit: float = 20.0


PRESETS = {
    "cuda": Options(),
    "cpu": Options(
        implementations=("rt-tiled", "transformer"),
        widths=(64,),
        batches=(2,),
        lengths=(16, 32, 64),
        models=((2, 64),),
        batch_size=4,
        seq_len=16,
        decode_batches=(1, 2),
        vocabulary=256,
    ),
}
"""Defaults by type of device."""


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    with user_errors(ValueError):
        options, device = options_and_device(Options, PRESETS, arguments)
        chosen = {name: IMPLEMENTATIONS.get(name, Implementation(mixer=name)) for name in options.implementations}
        for name, implementation in chosen.items():
            find_mixer(implementation.mixer)
            if implementation.graph and device.type != "cuda":
                raise ValueError(f"{name} needs a GPU: choose others")
        for width in (*options.widths, *(width for _, width in options.models)):
            if width % options.head_width:
                raise ValueError(f"width {width} is no multiple of --head-width {options.head_width}")
    record = Record("pretraining", options, device, arguments)

    # Layers, and stacks of layers. A check takes two layers at most.
    grid = product(options.widths, options.depths, options.batches, options.lengths, ("forward", "forward+backward"))
    for width, depth, batch, length, phase in grid if "layers" in options.parts else ():
        shape, heads = Shape(width=width, mlp_width=4 * width, layers=depth), width // options.head_width
        checked = replace(shape, layers=min(depth, 2))
        place = {"phase": phase, "width": width, "layers": depth, "batch_size": batch, "length": length}
        size: Any = {"batch": batch, "length": length, "backward": phase == "forward+backward"}
        record.measure([
            Case(
                place={**place, "implementation": name},
                build=partial(random_pass, implementation, shape, heads, None, device, **size),
                check=partial(check, implementation, checked, heads, None, device),
            )
            for name, implementation in chosen.items()
        ])  # fmt: skip

    # Training. What is timed with and without a graph is one model: on a GPU the trainer captures its layers itself.
    trained = [name for name in chosen if f"{name}-graph" not in chosen] if "training" in options.parts else []
    for (layers, width), name in product(options.models, trained):
        model, implementation = model_config(options, layers, width, chosen[name].mixer), chosen[name]
        settings = {} if implementation.method is None else {"implementation": implementation.method}
        checked = replace(model.shape(), layers=min(layers, 2))
        for micro in (None, *(options.batch_size // parts for parts in (2, 4) if options.batch_size % parts == 0)):
            config = replace(model, micro_batch_size=micro)
            place = {
                "phase": "training",
                "width": width,
                "layers": layers,
                "batch_size": options.batch_size,
                "length": options.seq_len,
                "micro_batch_size": micro,
                "recompute": options.recompute,
            }
            case = Case(
                place={**place, "implementation": name},
                build=partial(training_step, config, settings, options.vocabulary, device),
                check=partial(check, implementation, checked, config.heads, None, device),
            )
            if record.measure([case])[0]["status"] != OUT_OF_MEMORY:
                break

    # Decoding with a static cache, in float32, as in ``generate``.
    for (layers, width), batch in product(options.models, options.decode_batches if "decode" in options.parts else ()):
        place = {"phase": "decode", "width": width, "layers": layers, "batch_size": batch, "length": options.seq_len}
        cases = []
        for mixer in ("rt", "transformer"):
            name = f"{mixer}-static-cache{'-graph' * (device.type == 'cuda')}"
            config = replace(model_config(options, layers, width, mixer), batch_size=batch)
            given: Any = (config, options.vocabulary, device)
            work, compared = partial(decoding_step, *given), partial(check_decoding, *given)
            cases.append(Case({**place, "implementation": name}, work, compared))
        record.measure(cases)
    record.finish()


def model_config(options: Options, layers: int, width: int, mixer: str) -> Config:
    """Return the pretraining run of a model."""
    return Config(
        mixer=mixer,
        layers=layers,
        width=width,
        heads=width // options.head_width,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        recompute=options.recompute,
        lr=LEARNING_RATE,
    )


def training_step(config: Config, settings: dict[str, Any], vocabulary: int, device: torch.device) -> Pass:
    """Return the optimizer step of ``runners.c4`` in one process, on random tokens."""
    model = build_model(config, settings, vocabulary).to(device)
    stepper = ModelStepper(model, config, World(rank=0, size=1, device=device))
    stepper.keep_gradients()

    draws = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocabulary, (config.batch_size, config.seq_len + 1), generator=draws).to(device)
    losses: list[Tensor] = []

    def run() -> None:
        losses[:] = stepper.step(tokens_BT)[:1]

    facts = {"parameters": sum(p.numel() for p in model.parameters())}
    return Pass(run, lambda: bool(losses[0].isfinite()), config.batch_size * config.seq_len, facts)


def decoding_step(config: Config, vocabulary: int, device: torch.device) -> Pass:
    """Return the step of a model at the last position of the context, after random keys and values.

    All passes compute the same position. In RT, the pair of the position before is then that of the last pass.
    """
    model = build_model(config, {}, vocabulary).to(device)
    decoder = Decoder(model, config.batch_size, config.seq_len)
    for layer in decoder.layers:
        layer.cache_2BJD.normal_()
        if layer.last_2BD is not None:
            layer.last_2BD.normal_()

    @torch.no_grad()
    def run() -> None:
        decoder.position.fill_(config.seq_len - 1)
        decoder.compute()

    facts = {"parameters": sum(p.numel() for p in model.parameters()), "cache_bytes": decoder.nbytes}
    replay = captured(run) if device.type == "cuda" else run
    return Pass(replay, lambda: bool(decoder.logits_BV.isfinite().all()), config.batch_size, facts)


@cache
@torch.no_grad()
def check_decoding(config: Config, vocabulary: int, device: torch.device) -> Outcome:
    """Compare the logits of a model after a few tokens with those of its plain form in float64."""
    tokens_BT = torch.randint(vocabulary, (CHECK_BATCH, 16), generator=torch.Generator().manual_seed(0))
    plain = build_model(config, {"implementation": "naive"} if config.mixer == "rt" else {}, vocabulary)
    decoder = Decoder(build_model(config, {}, vocabulary).to(device), *tokens_BT.shape)
    *_, logits_BV = (decoder.step(tokens_B) for tokens_B in tokens_BT.to(device).unbind(1))

    error = relative_error(logits_BV.cpu(), plain.double()(tokens_BT)[:, -1])
    problem = None if error <= FLOAT32_BOUND else f"error {error:.1e} > {FLOAT32_BOUND:.1e} in the logits"
    return error if math.isfinite(error) else None, problem
