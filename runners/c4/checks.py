"""Checks of a pretraining run before anything is trained: its options, its layer, and the memory that it needs."""

from collections.abc import Collection
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from mixers.base import Layer
from mixers.contract import check_foreign, warn_unused
from mixers.options import converted
from mixers.registry import building, find_mixer
from runners.c4.config import Config
from runners.c4.cost import model_parameters
from runners.c4.distributed import World
from runners.c4.evaluation.downstream import read_items
from runners.c4.model import build, layer_of
from runners.memory import require_memory
from runners.provenance import keep_sources


def check(config: Config, options: dict[str, Any], given: Collection[str]) -> None:
    """Check everything that can be checked before a file is written.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        given: names of the options that the caller set.

    Raises:
        ValueError: an option is invalid; the message says what to do.
    """
    config.check()
    if config.search and {"lr", "beta2"}.intersection(given):
        raise ValueError("--search tries its own learning rates and beta2: leave --lr and --beta2 out")
    if "size" in given and config.width is not None:
        raise ValueError(f"--size has no effect on a model of width {config.width}: leave it, --width or --preset out")

    # The number of heads is an option of the run, for layers that have heads.
    if "heads" in options:
        raise ValueError("the number of heads is an option of the run, not of the layer: give --heads alone")
    if "heads" in given and "heads" not in {field.name for field in fields(find_mixer(config.mixer).Config)}:
        raise ValueError(f"--heads does not apply to mixer {config.mixer}: leave it out")

    # Build the model on the meta device, without memory, to find out whether it can be built.
    try:
        with torch.device("meta"):
            build(config, options, 1)
    except ValueError:  # a user's layer may read values while it is built, which meta tensors do not have
        build_layer(config, options)

    if config.downstream is not None:
        read_items(config.downstream)


def deciding(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the layer that differ from its defaults, with plain values.

    Raises:
        ValueError: a value is of another type than its option.
    """
    layer, defaults = layer_of(config, {})
    return {name: value for name, value in converted(layer.Config, options).items() if value != getattr(defaults, name)}


def check_memory(config: Config, options: dict[str, Any], world: World) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Raises:
        ValueError: the tokens of a step, the model or the activations take more memory than the device has.
    """
    # Tokens of a step are numbers of 8 bytes.
    shape, share = config.shape(), config.batch_size // world.size
    tokens = 8 * share * config.seq_len
    require_memory(tokens, torch.device("cpu"), "the tokens of a step", "lower --batch-size or --seq-len")

    # Each parameter takes four floats: itself, its gradient, and two moments.
    model = 16 * model_parameters(config, options, 1)[0]
    parts = world.size if config.parallel == "fsdp" else 1
    advice = "lower --width, --mlp-width or --layers"
    require_memory(model // parts, world.device, "the model with AdamW's moments", advice)

    # Each layer keeps at least its inputs for the backward pass, in 16 bits or more.
    layers = 1 if config.recompute else shape.layers
    kept = 2 * config.sequences_at_once(world.size) * config.seq_len * shape.width * layers
    advice = "lower --batch-size or --seq-len, or give --micro-batch-size"
    require_memory(kept, world.device, "a forward pass", advice)


def build_layer(config: Config, options: dict[str, Any]) -> Layer:
    """Build one layer of the model; the global random state is restored.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.

    Raises:
        ValueError: the layer cannot be built in this shape.
    """
    layer, layer_config = layer_of(config, options)
    with torch.random.fork_rng(devices=[]), building(config.mixer):
        return layer(layer_config, config.shape())


def check_users_layer(config: Config, options: dict[str, Any], device: torch.device) -> None:
    """Check a layer from outside, and warn of parameters that no gradient reaches; keep its code as it was imported.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        device: where the layer is called.

    Raises:
        ContractError: the layer's outputs or steps are wrong.
        Exception: the layer's own error.
    """
    keep_sources(find_mixer(config.mixer))
    build = partial(build_layer, config, options)
    unused = check_foreign(config.mixer, build, device, lambda: config.seq_len, several=False)
    warn_unused(config.mixer, unused)
