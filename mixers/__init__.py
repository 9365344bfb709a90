"""The registry of layers."""

from mixers.attention import Transformer
from mixers.base import Layer
from mixers.rt.layer import RecurrentTransformer

MIXERS: dict[str, type[Layer]] = {
    "transformer": Transformer,
    "rt": RecurrentTransformer,
}
