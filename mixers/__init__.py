"""The registry of layers."""

from mixers.attention import Transformer
from mixers.base import Layer
from mixers.linear_attention import LinearAttention
from mixers.rt.layer import RecurrentTransformer

MIXERS: dict[str, type[Layer]] = {
    "transformer": Transformer,
    "rt": RecurrentTransformer,
    "linear-attention": LinearAttention,
}
