"""Decoding with a static key-value cache, allocated once, so that a step of a language model is one CUDA graph.

The step form of the layers (``init_state``, ``step``) allocates a larger state at each position, and launches each
operation from Python. It remains the form that every layer has, and the one that this file must equal up to rounding.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.attention_layer import AttentionLayer
from mixers.base import hooked
from mixers.models import LanguageModel
from mixers.ops.decoding import cached_attention, row_products
from mixers.ops.numerics import at_least_float32, no_autocast
from mixers.ops.weights import LayerWeights
from mixers.parts import Embedding, Linear, RMSNorm
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer


def has_static_cache(model: nn.Module) -> bool:
    """Return whether ``Decoder`` takes the model: a language model of Transformer layers, or of RT layers of block 1.

    A subclass may compute something else. So may a module that the step form calls, if it was replaced or has hooks.
    Of all other modules, the step form reads only the weights, as the decoder does.
    """
    if type(model) is not LanguageModel or not all(map(_decodes_layer, model.stack)):
        return False

    called = [(model.embedding, Embedding), (model.norm, RMSNorm), (model.readout, Linear)]
    return all(_is_plain(module, kind) for module, kind in called)


def _decodes_layer(layer: nn.Module) -> bool:
    """Return whether ``LayerDecoder`` takes a layer."""
    if type(layer) is RecurrentTransformer:
        return layer.config.block == 1 and _is_plain(layer.out, Linear)
    return type(layer) is Transformer and layer.shape.mlp_width > 0 and _is_plain(layer.out, Linear)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module has exactly this class, no hooks, and no bias."""
    return type(module) is kind and not hooked(module) and getattr(module, "bias", None) is None


class LayerDecoder:
    """Decoding steps of one layer.

    Args:
        layer: A Transformer layer, or an RT layer of block 1. Its weights are read once, here.
        batch: number of sequences.
        capacity: number of positions that the cache holds.

    Attributes:
        cache_2BJD: keys and values in the dtype of the weights; what is not written yet is arbitrary.
        last_2BD: in RT, the persistent pair of the newest position before QK-norm; the next step norms it and moves it
            into the cache. The launch that computes the pair cannot norm it, because its programs compute a part each.
    """

    def __init__(self, layer: AttentionLayer, batch: int, capacity: int) -> None:
        self.weights = LayerWeights._make(None if y is None else y.detach() for y in layer.weights())
        self.slopes_H = layer.slopes_H
        self.scale = layer.shape.residual_scale

        key_DD = self.weights.wk_DD
        self.cache_2BJD = key_DD.new_empty(2, batch, capacity, len(key_DD))
        self.last_2BD: Tensor | None = None
        self.persistent_gain_D: Tensor | None = None
        if isinstance(layer, RecurrentTransformer):
            self.last_2BD = at_least_float32(key_DD.new_empty(2, batch, len(key_DD)))
            self.persistent_gain_D = self.weights.norm_D if layer.config.persistent_norm else None

    def step(self, x_BD: Tensor, position: Tensor) -> Tensor:
        """Return the outputs (B, D) at the position after ``position`` (1,) others."""
        w = self.weights

        # Attention.
        qkv_3BD = row_products(x_BD, w.wq_DD, w.wk_DD, w.wv_DD, gain_I=w.norm_D)
        kept_2BD, temporary_2BD = (qkv_3BD[1:], None) if self.last_2BD is None else (self.last_2BD, qkv_3BD[1:])
        a_BD = cached_attention(
            qkv_3BD[0],
            kept_2BD,
            temporary_2BD,
            w.q_norm_D,
            w.k_norm_D,
            self.slopes_H,
            self.cache_2BJD,
            position,
        )

        # Residual branches.
        u_BD = row_products(a_BD, w.wo_DD, residual_BO=x_BD, scale=self.scale)[0]
        hidden_BF = row_products(u_BD, w.up_FD, gain_I=w.mlp_norm_D, gelu=True)[0]
        z_BD = row_products(hidden_BF, w.down_DF, residual_BO=u_BD, scale=self.scale)[0]

        # Persistent pair.
        if self.last_2BD is not None:
            row_products(z_BD, w.wk_DD, w.wv_DD, gain_I=self.persistent_gain_D, out=self.last_2BD)
        return z_BD


class Decoder:
    """Decoding steps of a language model with a key-value cache for a fixed number of positions.

    On a GPU the first step captures a CUDA graph, which all steps replay. It refers to the weights that the model has
    here. The decoder keeps them in memory; conversions of the model do not reach it, and neither does autocast.

    Args:
        model: A model for which ``has_static_cache`` holds.
        batch: number of sequences.
        capacity: number of positions that the cache holds.

    Attributes:
        position: number of positions read (1,), on the model's device.
        logits_BV: logits of the newest step, in at least float32; each step overwrites them.

    Raises:
        ValueError: the model has other layers, or modules were replaced or have hooks.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel, batch: int, capacity: int) -> None:
        if not has_static_cache(model):
            raise ValueError("a decoder takes unchanged models of Transformer layers or of RT layers of block 1 alone")

        self.embedding_VD = model.embedding.weight.detach()
        self.norm_D = model.norm.gain.detach()
        self.readout_VD = model.readout.weight.detach()
        self.capacity = capacity
        self.layers = [LayerDecoder(cast(AttentionLayer, layer), batch, capacity) for layer in model.stack]

        device = self.embedding_VD.device
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.tokens_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.logits_BV = torch.empty(0, device=device)
        self._read = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def reset(self) -> None:
        """Forget all positions."""
        self._read = 0
        self.position.zero_()

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Read a token of each sequence; return ``logits_BV``.

        Raises:
            ValueError: the cache is full.
        """
        if self._read == self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, and all are in use")
        if self._graph is None and self.position.is_cuda:
            self._graph = self._capture()

        self.tokens_B.copy_(tokens_B)
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()
        self._read += 1
        return self.logits_BV

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all layers."""
        tensors = (y for layer in self.layers for y in (layer.cache_2BJD, layer.last_2BD))
        return sum(y.nbytes for y in tensors if y is not None)

    def compute(self) -> None:
        """Compute ``logits_BV`` after ``tokens_B``, operation by operation, and add 1 to ``position``."""
        with no_autocast(self.position.device):
            x_BD = at_least_float32(F.embedding(self.tokens_B, self.embedding_VD))
            for layer in self.layers:
                x_BD = layer.step(x_BD, self.position)
            self.logits_BV = row_products(x_BD, self.readout_VD, gain_I=self.norm_D)[0]

        self.position += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the graph of a step, after a warm-up on a side stream, which compiles the kernels."""
        with torch.cuda.device(self.position.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.compute()
            torch.cuda.current_stream().wait_stream(side)
            self.position.zero_()

            # By itself, PyTorch captures on a stream of the device on which the process captured first.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                self.compute()
        return graph
