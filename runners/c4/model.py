"""The language model of a pretraining run: building it, its cross-entropy in parts, and what training it costs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from mixers.accounting import count_flops, countable, from_short
from mixers.backbone import LanguageModel
from mixers.base import Layer, Shape, product_dtype
from mixers.deep import DeepLayer
from runners.c4.config import Config
from runners.c4.data import load_tokenizer, vocab_size
from runners.environment import find_devices
from runners.experiment import building, find_mixer
from runners.options import override

LOGITS = 2**28
"""Logits in memory at a time: half a GiB in bfloat16, and a GiB of float32 log-probabilities."""
VOCAB_UNIT = 128
KNOWN_VOCABULARIES = {"google-t5/t5-base": 32_100}
"""So that a dry run of the paper's models needs no network."""
ACTIVATIONS = "activations kept by plain PyTorch"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What training a model costs.

    The paper's sizes are ``non_embedding`` parameters ("300m non-embedding parameter transformer", appendix "C4
    pretraining experiments"): its models of width 2048 and 1024 are within 1% of their names, those of width 1408 are
    4.8% below, and no count of embedding or readout brings these nearer.

    Attributes:
        parameters: all parameters, with the padded vocabulary.
        non_embedding: parameters without the embedding and readout matrices.
        flops_per_token: see the function of that name.
        memory: bytes by part in one process that holds the whole model and trains ``micro_batch_size`` sequences at a
            time. Temporary tensors inside a layer and its backward pass come on top. Activations are missing where the
            layer cannot be traced. What is counted are the forms in plain PyTorch: fused kernels, of layers and of the
            readout, keep less (RT 300M, 12 layers, 512 sequences: 115 GiB in all on an H200, where this says 160).
    """

    parameters: int
    non_embedding: int
    flops_per_token: int
    memory: dict[str, int]


def layer_of(config: Config, options: dict[str, Any]) -> tuple[type[Layer], Any]:
    """Class of the layer and its settings: heads from the paper's table if it has any, ``options`` on top.

    Raises:
        ValueError: no such layer, no such model in the table, or an option is not a finite number.
    """
    layer = find_mixer(config.mixer)
    has_heads = "heads" in {field.name for field in fields(layer.Config)}
    heads = {"heads": config.head_count()} if has_heads and "heads" not in options else {}
    return layer, override(layer.Config, heads | options)


def padded_vocab(size: int) -> int:
    """Rows of embedding and readout for ``size`` tokens: a multiple of 128, which matrix products on a GPU want."""
    return -(-size // VOCAB_UNIT) * VOCAB_UNIT


def vocabulary(tokenizer: str) -> int:
    """One more than the largest token id of a tokenizer.

    Raises:
        ValueError: there is no such tokenizer.
    """
    if tokenizer in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[tokenizer]
    return vocab_size(load_tokenizer(tokenizer))


def build(config: Config, options: dict[str, Any], vocab_size: int) -> LanguageModel:
    """The untrained model of ``config.seed`` for a tokenizer of ``vocab_size`` tokens.

    Raises:
        ValueError: the layer cannot be built in this shape.
    """
    layer, layer_config = layer_of(config, options)
    with torch.random.fork_rng(devices=[]), building(config.mixer):
        torch.default_generator.manual_seed(config.seed)
        model = LanguageModel(layer, layer_config, config.shape(), padded_vocab(vocab_size))
    model.layers.recompute = config.recompute
    return model


def token_losses(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Cross-entropy (B, T) in nats of ``tokens_BT[:, 1:]`` given the tokens before, for windows (B, T + 1).

    float32, or float64 for a model in float64. No more than ``LOGITS`` logits exist at a time, forward and backward;
    their products run in the dtype of autocast where it is on.
    """
    inputs = _readout(model, tokens_BT)
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.view_as(tokens_BT[:, 1:])


def mean_loss(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Mean of ``token_losses``, a scalar in their dtype: what training minimises.

    For bfloat16 products on a GPU, Liger-Kernel computes it where it is installed, in less time and memory. Its
    gradients of logits are divided by the number of tokens before they are rounded; float16 would lose them.
    """
    inputs = hidden_ND, weight_VD, targets_N, dtype = _readout(model, tokens_BT)
    if hidden_ND.is_cuda and dtype == torch.bfloat16 and (fused := _liger()) is not None:
        return fused(weight_VD.to(dtype), hidden_ND.to(dtype), targets_N)
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.mean()


def _readout(model: LanguageModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Hidden vectors (N, D), the readout's weights (V, D), targets (N,), and the dtype of the products of the two."""
    hidden_BTD = model.encode(tokens_BT[:, :-1])
    return hidden_BTD.flatten(0, 1), model.readout.weight, tokens_BT[:, 1:].flatten(), product_dtype(hidden_BTD)


@cache
def _liger() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Liger-Kernel's mean cross-entropy of weights (V, D), hidden vectors (N, D) and targets (N,), if it is installed.

    The weights' gradient is added up in float32: in bfloat16, a sum over 64 chunks of tokens has three times the error.
    """
    if find_spec("liger_kernel") is None:
        return None
    return import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)


class _ReadoutLosses(torch.autograd.Function):
    """Cross-entropies (N,) of the readout of hidden vectors, a chunk of tokens at a time.

    The backward computes the logits of a chunk again. Gradients found in the forward pass, as in Liger-Kernel's fused
    linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989), would save that product, but need every token's weight in
    the loss beforehand. Against ``torch.utils.checkpoint`` around each chunk, the backward goes over the logits
    twice, in their own dtype, not six times in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
        rows, wide = max(1, LOGITS // len(weight_VD)), torch.promote_types(dtype, torch.float32)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            low_ND, low_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
            losses_N = torch.empty(len(low_ND), dtype=wide, device=low_ND.device)
            for loss, x, target in zip(*(y.split(rows) for y in (losses_N, low_ND, targets_N)), strict=True):
                log_p = torch.log_softmax(x @ low_VD.mT, dim=1, dtype=wide)
                loss.copy_(-log_p.gather(1, target[:, None])[:, 0])
        ctx.save_for_backward(low_ND, weight_VD, targets_N, losses_N)
        ctx.rows, ctx.hidden_dtype = rows, hidden_ND.dtype
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        low_ND, weight_VD, targets_N, losses_N = ctx.saved_tensors
        with torch.autocast(low_ND.device.type, enabled=False):
            low_VD = weight_VD.to(low_ND)
            dhidden_ND, dweight_VD = torch.empty_like(low_ND, dtype=ctx.hidden_dtype), torch.zeros_like(weight_VD)
            parts = (dhidden_ND, low_ND, targets_N, losses_N, gradient_N[:, None])
            for dx, x, target, loss, gradient in zip(*(y.split(ctx.rows) for y in parts), strict=True):
                dlogits = torch.softmax(x @ low_VD.mT, dim=1)
                # p - 1 of the target: a difference of rounded numbers would lose it where p is close to 1
                dlogits.scatter_(1, target[:, None], torch.expm1(-loss)[:, None].to(dlogits))
                dx.copy_((dlogits @ low_VD) * gradient)
                dweight_VD += dlogits.mT @ (x * gradient).to(x)
        return dhidden_ND, dweight_VD, None, None


def cost(config: Config, options: dict[str, Any], vocab_size: int) -> Cost:
    """Parameters, operations and memory of training; nothing of the model's size is allocated.

    Raises:
        ValueError: the layer cannot be built.
    """
    parameters, tables = _count_parameters(config, options, vocab_size)
    rows, width, low = padded_vocab(vocab_size), config.shape().width, _low_bytes(config)
    at_once = min(max(1, LOGITS // rows), _sequences(config) * config.seq_len)
    memory = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "AdamW moments": 8 * parameters,
        "logits of a chunk": at_once * rows * (low + 4),
        "readout's gradient": rows * width * (low + 4),
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
    """Operations of a training step for each target token: three times those of the forward pass, readout included.

    Those of the layers are as ``mixers.accounting`` counts them (the Transformer's masked attention as a whole square);
    two a parameter are assumed for a layer that cannot be traced. Recomputed ones do not count.

    Raises:
        ValueError: the layer cannot be built.
    """
    parameters, tables = _count_parameters(config, options, vocab_size)
    layer, layer_config = layer_of(config, options)
    try:
        first, further = _first_and_further(config, layer, layer_config, partial(_flops, layer, layer_config))
        layers = round((first + (config.layers - 1) * further) / config.seq_len)
    except Exception as error:  # a user's layer may fail in any way, and can still be trained
        layers = 2 * (parameters - tables)
        log.warning("operations of %s not counted: %s: %s", config.mixer, type(error).__name__, error)
    readout = tables  # two for each weight of one of the two tables
    return 3 * (layers + readout)


def describe(cost: Cost, config: Config) -> Table:
    """What ``--dry-run`` prints."""
    shape, tokens = config.shape(), config.batch_size * config.seq_len
    table = Table("", "", title=f"{config.mixer}, {shape.layers} layers", title_justify="left", show_header=False)
    paper = int(config.size.removesuffix("m")) * 1_000_000
    against = (
        "" if config.width else f" ({cost.non_embedding / paper - 1:+.1%} against the paper's {config.size.upper()})"
    )
    table.add_row("width / MLP", f"{shape.width:,} / {shape.mlp_width:,}")
    table.add_row("parameters", f"{cost.parameters:,}")
    table.add_row("without embeddings", f"{cost.non_embedding:,}{against}")
    table.add_row("FLOPs a token, training", f"{cost.flops_per_token:,}", end_section=True)
    for part, size in cost.memory.items():
        table.add_row(f"memory: {part}", _memory(size))
    unknown = "" if ACTIVATIONS in cost.memory else " and activations, which are not known"
    fused = ", less with fused kernels" if ACTIVATIONS in cost.memory else ""
    numbers = f"{_sequences(config)} × {config.seq_len}, {'float32' if _low_bytes(config) == 4 else 'bfloat16'}{fused}"
    table.add_row(f"memory in all ({numbers})", _memory(sum(cost.memory.values())) + unknown, end_section=True)
    table.add_row("steps", f"{config.steps:,}")
    table.add_row("tokens a step", f"{tokens:,}")
    table.add_row("tokens", f"{config.steps * tokens:,}")
    table.add_row("FLOPs", f"{config.steps * tokens * cost.flops_per_token:.3g}")
    return table


def _memory(size: int) -> str:
    """Bytes in GiB, or in MiB where they are less than one."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _sequences(config: Config) -> int:
    """Sequences of a forward pass."""
    return config.micro_batch_size or config.batch_size


def _low_bytes(config: Config) -> int:
    """Bytes of a number in matrix products; those of ``cuda`` are known without a GPU."""
    return 2 if config.device == "cuda" or find_devices(config.device)[0].type == "cuda" else 4


def _count_parameters(config: Config, options: dict[str, Any], vocab_size: int) -> tuple[int, int]:
    """Parameters in all, and of the embedding and readout matrices."""
    with torch.device("meta"):
        model = build(config, options, vocab_size)
    tables = model.embedding.weight.numel() + model.readout.weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()), tables


def _activations(config: Config, options: dict[str, Any]) -> int:
    """Bytes that the forward pass keeps for the backward, from the tokens to the normalised outputs."""
    layer, layer_config = layer_of(config, options)
    measure = partial(_kept, layer, layer_config, _sequences(config), _low_bytes(config) == 2)
    first, further = _first_and_further(config, layer, layer_config, measure)
    if config.recompute and not issubclass(layer, DeepLayer):
        # of a layer's activations only its input stays, but for the one layer whose backward pass runs
        further = 4 * _sequences(config) * config.seq_len * config.shape().width
    return first + (config.layers - 1) * further


def _first_and_further(
    config: Config, layer: type[Layer], layer_config: Any, measure: Callable[[Shape, int], int]
) -> tuple[int, int]:
    """``measure(shape, length)`` of a model of one layer, and what each further layer adds."""
    one, two = (
        from_short(layer, layer_config, config.seq_len, partial(measure, replace(config.shape(), layers=count)))
        for count in (1, 2)
    )
    return one, two - one


def _flops(layer: type[Layer], layer_config: Any, shape: Shape, length: int) -> int:
    """Operations of a forward pass of all layers over one sequence."""
    with FakeTensorMode():
        model = LanguageModel(layer, countable(layer_config), shape, 1).requires_grad_(False)
        return sum(count_flops(module, length) for module in model.stack)


def _kept(layer: type[Layer], layer_config: Any, batch: int, autocast: bool, shape: Shape, length: int) -> int:
    """Bytes that a forward pass of embedding, layers and norm keeps for the backward, and its output."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = LanguageModel(layer, layer_config, shape, 1)
        own = {id(y): y for y in (parameter.untyped_storage() for parameter in model.parameters())}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            keep(model.encode(torch.zeros(batch, length, dtype=torch.long)))
        return sum(storage.nbytes() for name, storage in kept.items() if name not in own)
