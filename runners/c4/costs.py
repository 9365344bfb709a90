"""Cost of training a language model: parameters and operations, counted without the model, and time."""

import gc
import logging
import re
import time
from functools import partial
from itertools import groupby
from typing import Any

import torch
from rich.table import Table

from mixers.base import Layer
from mixers.costs import count_model, from_short, operations
from mixers.registry import variant_label
from runners.c4.config import TOKENIZER, Config
from runners.c4.data.tokenizer import load_tokenizer, vocab_size
from runners.c4.distributed import World
from runners.c4.model import LOGITS, build, layer_of, padded_vocab
from runners.c4.step import ModelStepper
from runners.progress import spell
from runners.tables import abbreviated

VOCABULARY = 32_100
"""Tokens of the paper's tokenizer, so that a dry run of its models needs no network."""
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 operations per second, by words in the GPU's name (vendor's data sheets); the first match counts."""
STEPS = 3
"""Steps that are timed, after a first one that may compile."""
LARGEST = 1e12
"""Operations of a step above which a CPU is not timed, because a step takes minutes."""

log = logging.getLogger(__name__)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of bfloat16 products in operations per second; None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def vocabulary(config: Config) -> int:
    """Return the largest token id of a run's tokenizer plus one.

    Raises:
        ValueError: there is no such tokenizer.
    """
    if config.tokenizer in (None, TOKENIZER):
        return VOCABULARY
    return vocab_size(load_tokenizer(str(config.tokenizer)))


def known_figures(config: Config, options: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the figures of a model that are known before its training.

    The paper's sizes are ``parameters_without_embeddings`` ("300m non-embedding parameter transformer", appendix "C4
    pretraining experiments"). The paper's models of width 2048 and 1024 are within 1% of their names; the models of
    width 1408 are 4.8% below, and counting embedding or readout does not bring them nearer.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        vocab_size: tokens of the tokenizer.

    Raises:
        ValueError: the layer cannot be built.
    """
    parameters, tables = model_parameters(config, options, vocab_size)
    flops = flops_per_token(config, options, vocab_size)
    return {"parameters": parameters, "parameters_without_embeddings": parameters - tables, "flops_per_token": flops}


def model_parameters(config: Config, options: dict[str, Any], vocab_size: int) -> tuple[int, int]:
    """Count all parameters, and those of the embedding and readout matrices; arguments as ``known_figures``."""
    layer, layer_config = layer_of(config, options)
    rows = padded_vocab(vocab_size)
    return count_model(layer, layer_config, config.shape(), rows, config.mixer), 2 * rows * config.shape().width


def flops_per_token(config: Config, options: dict[str, Any], vocab_size: int) -> int:
    """Count the operations of training per target token: three times the operations of the forward pass with readout.

    ``mixers.costs`` counts the operations of the layers; masked attention counts as a full square. A layer that cannot
    be traced is assumed to take two operations per parameter. Recomputed operations do not count. Arguments and errors
    are those of ``known_figures``.
    """
    layer, layer_config = layer_of(config, options)
    tables = 2 * padded_vocab(vocab_size) * config.shape().width

    def of_module(kind: type[Layer], own: Any, length: int) -> int:
        with torch.device("meta"):
            module = kind(kind.plain_config(own), config.shape()).requires_grad_(False)
            x_BTD = torch.zeros(1, length, module.shape.width)
        return operations(module, x_BTD)

    try:
        found = 0
        for (kind, own), equal in groupby(layer.members(layer_config, config.layers)):
            of_one = from_short(kind, own, config.seq_len, partial(of_module, kind, own))
            found += len([*equal]) * of_one
        layers = round(found / config.seq_len)
    except Exception as error:  # a user's layer may fail in any way, and can still be trained
        layers = 2 * (model_parameters(config, options, vocab_size)[0] - tables)
        said = f"{type(error).__name__}: {error}"
        log.warning("operations of %s not counted, two per parameter are assumed: %s", config.mixer, said)

    return 3 * (layers + tables)  # the readout has two for each weight of one of the two tables


def cost_table(config: Config, options: dict[str, Any]) -> Table:
    """Return the table of costs that ``--dry-run`` prints; arguments and errors are those of ``known_figures``."""
    found = known_figures(config, options, vocab_size := vocabulary(config))
    shape, paper = config.shape(), int(config.size.removesuffix("m")) * 1_000_000
    share = found["parameters_without_embeddings"] / paper - 1
    against = "" if config.width else f" ({share:+.1%} against the paper's {config.size.upper()})"
    of_model, logits = 16 * found["parameters"] / 2**30, 4 * min(LOGITS, config.tokens * vocab_size) / 2**30
    rows = {
        "width / MLP": f"{shape.width:,} / {shape.mlp_width:,}",
        "parameters": abbreviated(found["parameters"]),
        "without embeddings": f"{abbreviated(found['parameters_without_embeddings'])}{against}",
        "FLOPs per token, training": abbreviated(found["flops_per_token"]),
        "memory: parameters, gradients, AdamW moments": f"{of_model:.3g} GiB",
        "memory: logits of a chunk": f"{logits:.3g} GiB",
        "sequences at once": f"{config.sequences_at_once()} × {config.seq_len}",
        "steps": f"{config.steps:,}",
        "tokens per step": abbreviated(config.tokens // config.steps),
        "tokens": abbreviated(config.tokens),
        "FLOPs": f"{config.tokens * found['flops_per_token']:.3g}",
    }
    title = f"{variant_label(config.mixer, options, 1)}, {shape.layers} layers"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def time_of_run(config: Config, options: dict[str, Any], device: torch.device) -> str:
    """Return in words how long training takes in one process here: the time of ``STEPS`` steps, multiplied.

    The parameters are new and the tokens random. Evaluations and the preparation of the data are not counted.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        device: where to train.

    Raises:
        Exception: the layer's own error, or too little memory.
    """
    vocab_size = vocabulary(config)
    step = config.batch_size * config.seq_len * flops_per_token(config, options, vocab_size)
    if device.type == "cpu" and step > LARGEST:
        return "minutes for each step on this CPU"

    gc.collect()  # the CUDA graphs of a model before hold their memory in cycles of references
    torch.manual_seed(config.seed)
    stepper = ModelStepper(build(config, options, vocab_size).to(device), config, World(rank=0, size=1, device=device))
    stepper.keep_gradients()
    tokens_BT = torch.randint(vocab_size, (config.batch_size, config.seq_len + 1), device=device)
    for done in range(1 + STEPS):
        if done == 1:
            began = time.monotonic()
        stepper.step(tokens_BT)[0].item()  # waits for the GPU
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    held = f", with {peak:.1f} GiB of the GPU" if peak else ""
    return f"about {spell((time.monotonic() - began) / STEPS * config.steps)} here{held}"
