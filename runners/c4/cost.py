"""Cost of training a language model: parameters, operations and memory, computed without allocating the model."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from mixers.base import Layer, Shape
from mixers.costs import count_flops, count_parameters, from_short, parameters_of_one_and_two
from mixers.deep import DeepLayer
from mixers.models import LanguageModel
from mixers.ops.numerics import product_precision
from runners.c4.config import Config
from runners.c4.data.tokenizer import load_tokenizer, vocab_size
from runners.c4.model import LOGITS, layer_of, padded_vocab

KNOWN_VOCABULARIES = {"google-t5/t5-base": 32_100}
"""Vocabulary sizes of known tokenizers, so that a dry run of the paper's models needs no network."""
ACTIVATIONS = "activations kept by plain PyTorch"
"""Key of the activations in ``Cost.memory``."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of training a model.

    The paper's sizes are ``non_embedding`` parameters ("300m non-embedding parameter transformer", appendix "C4
    pretraining experiments"). The paper's models of width 2048 and 1024 are within 1% of their names; the models of
    width 1408 are 4.8% below, and counting embedding or readout does not bring them nearer.

    Attributes:
        parameters: all parameters, with the padded vocabulary.
        non_embedding: parameters without the embedding and readout matrices.
        flops_per_token: result of the function of that name.
        memory: bytes by part, in one process that holds the whole model and trains ``micro_batch_size`` sequences at a
            time. Temporary tensors inside a layer and its backward pass are not counted. Activations are missing if
            the layer cannot be traced. The count is for layers and readout in plain PyTorch; fused kernels keep less
            (RT 300M, 12 layers, 512 sequences: 115 GiB measured in all on an H200, counted as 160).
    """

    parameters: int
    non_embedding: int
    flops_per_token: int
    memory: dict[str, int]


def vocabulary(tokenizer: str) -> int:
    """Return the largest token id of a tokenizer plus one.

    Raises:
        ValueError: there is no such tokenizer.
    """
    if tokenizer in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[tokenizer]
    return vocab_size(load_tokenizer(tokenizer))


def cost(config: Config, options: dict[str, Any], vocab_size: int) -> Cost:
    """Count parameters, operations and memory of training; this allocates at most two layers.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        vocab_size: tokens of the tokenizer.

    Raises:
        ValueError: the layer cannot be built.
    """
    parameters, tables = model_parameters(config, options, vocab_size)
    rows = padded_vocab(vocab_size)
    low = _low_bytes(config)

    # The logits of a chunk of tokens are in memory in low precision and in float32.
    at_once = min(max(1, LOGITS // rows), config.sequences_at_once() * config.seq_len)
    memory = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "AdamW moments": 8 * parameters,
        "logits of a chunk": at_once * rows * (low + 4),
        "readout's gradient": rows * config.shape().width * (low + 4),
    }

    try:
        memory[ACTIVATIONS] = _activations(config, options)
    except Exception as error:  # a user's layer may fail in any way, and can still be trained
        log.warning("activations of %s not counted: %s: %s", config.mixer, type(error).__name__, error)

    return Cost(
        parameters=parameters,
        non_embedding=parameters - tables,
        flops_per_token=flops_per_token(config, options, vocab_size),
        memory=memory,
    )


def flops_per_token(config: Config, options: dict[str, Any], vocab_size: int) -> int:
    """Count the operations of training per target token: three times the operations of the forward pass with readout.

    ``mixers.costs`` counts the operations of the layers; masked attention counts as a full square. A layer that cannot
    be traced is assumed to take two operations per parameter. Recomputed operations do not count.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        vocab_size: tokens of the tokenizer.

    Raises:
        ValueError: the layer cannot be built.
    """
    parameters, tables = model_parameters(config, options, vocab_size)
    layer, layer_config = layer_of(config, options)

    try:
        layers = _flops_of_layers(layer, layer_config, config.shape(), config.seq_len)
    except Exception as error:  # a user's layer may fail in any way, and can still be trained
        layers = 2 * (parameters - tables)
        said = f"{type(error).__name__}: {error}"
        log.warning("operations of %s not counted, two per parameter are assumed: %s", config.mixer, said)

    readout = tables  # two for each weight of one of the two tables
    return 3 * (layers + readout)


def describe(cost: Cost, config: Config) -> Table:
    """Return the table of costs that ``--dry-run`` prints."""
    shape = config.shape()
    tokens = config.batch_size * config.seq_len
    table = Table("", "", title=f"{config.mixer}, {shape.layers} layers", title_justify="left", show_header=False)

    # Parameters and operations.
    paper = int(config.size.removesuffix("m")) * 1_000_000
    against = (
        "" if config.width else f" ({cost.non_embedding / paper - 1:+.1%} against the paper's {config.size.upper()})"
    )
    table.add_row("width / MLP", f"{shape.width:,} / {shape.mlp_width:,}")
    table.add_row("parameters", f"{cost.parameters:,}")
    table.add_row("without embeddings", f"{cost.non_embedding:,}{against}")
    table.add_row("FLOPs per token, training", f"{cost.flops_per_token:,}", end_section=True)

    # Memory.
    for part, size in cost.memory.items():
        table.add_row(f"memory: {part}", _memory(size))
    unknown = "" if ACTIVATIONS in cost.memory else " and activations, which are not known"
    savers = "fused kernels" if config.recompute else "fused kernels or --recompute"
    fused = f", less with {savers}" if ACTIVATIONS in cost.memory else ""
    where = "CPU" if config.device == "cpu" else "GPU"
    numbers = f"{where}, {config.sequences_at_once()} × {config.seq_len}, {_precision(config)}{fused}"
    table.add_row(f"memory in all ({numbers})", _memory(sum(cost.memory.values())) + unknown, end_section=True)

    # The whole run.
    table.add_row("steps", f"{config.steps:,}")
    table.add_row("tokens per step", f"{tokens:,}")
    table.add_row("tokens", f"{config.steps * tokens:,}")
    table.add_row("FLOPs", f"{config.steps * tokens * cost.flops_per_token:.3g}")
    return table


def _memory(size: int) -> str:
    """Format bytes in GiB, or in MiB if they are less than a GiB."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _precision(config: Config) -> str:
    """Return the precision of matrix products: that of a GPU, even if none is present, unless ``device`` is ``cpu``."""
    return product_precision(torch.device("cpu" if config.device == "cpu" else "cuda"))


def _low_bytes(config: Config) -> int:
    """Return the bytes per number in matrix products."""
    return 2 if _precision(config) == "bfloat16" else 4


def model_parameters(config: Config, options: dict[str, Any], vocab_size: int) -> tuple[int, int]:
    """Count all parameters, and those of the embedding and readout matrices."""
    layer, layer_config = layer_of(config, options)
    tables = 2 * padded_vocab(vocab_size) * config.shape().width

    def of_layers(count: int) -> int:
        model = LanguageModel(layer, layer_config, replace(config.shape(), layers=count), 1)
        return count_parameters(model) - 2 * config.shape().width

    one, two = parameters_of_one_and_two(of_layers, config.mixer)
    return one + (config.layers - 1) * (two - one) + tables, tables


def _activations(config: Config, options: dict[str, Any]) -> int:
    """Count the bytes that the forward pass keeps for the backward pass, from the tokens to the normalised outputs."""
    layer, layer_config = layer_of(config, options)
    measure = partial(_kept, layer, layer_config, config.sequences_at_once(), _low_bytes(config) == 2)
    first, further = _first_and_further(layer, layer_config, config.shape(), config.seq_len, measure)

    # With recomputation a layer keeps only its input, except the one layer whose backward pass runs.
    if config.recompute and not issubclass(layer, DeepLayer):
        further = 4 * config.sequences_at_once() * config.seq_len * config.shape().width
    return first + (config.layers - 1) * further


def _flops_of_layers(layer: type[Layer], layer_config: Any, shape: Shape, length: int) -> int:
    """Return the operations per token of a forward pass of all layers; a process counts them once."""
    key = layer, repr(layer_config), shape, length
    if key not in _counted:
        _counted[key] = _count_flops(layer, layer_config, shape, length)
    return _counted[key]


_counted: dict[tuple[type[Layer], str, Shape, int], int] = {}


def _count_flops(layer: type[Layer], layer_config: Any, shape: Shape, length: int) -> int:
    """Count the operations per token of a forward pass of all layers."""
    measure = partial(_flops_of_module, layer, layer_config)
    if issubclass(layer, DeepLayer):
        first, further = _first_and_further(layer, layer_config, shape, length, measure)
        whole = first + (shape.layers - 1) * further
    else:
        whole = shape.layers * from_short(layer, layer_config, length, partial(measure, shape))  # equal layers
    return round(whole / length)


def _first_and_further(
    layer: type[Layer], layer_config: Any, shape: Shape, length: int, measure: Callable[[Shape, int], int]
) -> tuple[int, int]:
    """Return ``measure(shape, length)`` of a model of one layer, and its increase per further layer.

    A ``DeepLayer`` may compute a single layer in a special way; the first figure then describes the usual way.
    """
    least = 2 if issubclass(layer, DeepLayer) and shape.layers > 1 else 1
    fewer, more = (
        from_short(layer, layer_config, length, partial(measure, replace(shape, layers=count)))
        for count in (least, least + 1)
    )
    further = more - fewer
    return fewer - (least - 1) * further, further


@contextmanager
def _without_values() -> Iterator[None]:
    """Compute shapes alone. PyTorch would log a traceback of an operation that fails; the caller says it in a line."""
    torch_log = logging.getLogger(FakeTensorMode.__module__)
    before, torch_log.disabled = torch_log.disabled, True
    try:
        with FakeTensorMode():
            yield
    finally:
        torch_log.disabled = before


def _flops_of_module(layer: type[Layer], layer_config: Any, shape: Shape, length: int) -> int:
    """Count the operations of one module over one sequence: a layer, or all layers of a ``DeepLayer``."""
    with _without_values():
        module = layer(layer.plain_config(layer_config), shape).requires_grad_(False)
        return count_flops(module, length)


def _kept(layer: type[Layer], layer_config: Any, batch: int, autocast: bool, shape: Shape, length: int) -> int:
    """Count the bytes of the output of embedding, layers and norm, and of all that they keep for the backward pass."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with _without_values(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = LanguageModel(layer, layer_config, shape, 1)
        own = {id(y): y for y in (parameter.untyped_storage() for parameter in model.parameters())}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            keep(model.encode(torch.zeros(batch, length, dtype=torch.long)))

        return sum(storage.nbytes() for name, storage in kept.items() if name not in own)
