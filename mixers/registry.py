"""Find and build layers by name: registered layers, layers of any other module, and stacks of both."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from mixers.adapt import adapt
from mixers.base import Layer, Shape, settled
from mixers.deltanet import DeltaNet, GatedDeltaNet
from mixers.deltaproduct import DeltaProduct
from mixers.feedback_transformer import FeedbackTransformer
from mixers.fox import ForgettingTransformer
from mixers.gdn2 import GatedDeltaNet2
from mixers.gla import GatedLinearAttention
from mixers.hyena import Hyena
from mixers.kda import KimiDeltaAttention
from mixers.linear_attention import LinearAttention
from mixers.lru import LRU
from mixers.lstm import LSTM
from mixers.m2rnn import M2RNN
from mixers.mamba import Mamba
from mixers.mamba2 import Mamba2
from mixers.mamba3 import Mamba3
from mixers.mlstm import MLSTM
from mixers.named import Kind, find_class, members_of, name_of
from mixers.options import BETWEEN, override
from mixers.origin import advice_on_gpus, where
from mixers.path import PaTH
from mixers.retnet import RetNet
from mixers.rmt import RecurrentMemoryTransformer
from mixers.rt.layer import RecurrentTransformer
from mixers.rwkv import RWKV6, RWKV7
from mixers.s5 import S5
from mixers.short_convolution import mixer_label
from mixers.sliding_attention import SlidingAttention
from mixers.slstm import SLSTM
from mixers.stack import stack_of
from mixers.staircase import Staircase
from mixers.transformer import Transformer
from mixers.transformer_fam import TransformerFAM
from mixers.transformer_xl import TransformerXL

MIXERS: dict[str, type[Layer]] = {
    "transformer": Transformer,
    "sliding-attention": SlidingAttention,
    "transformer-xl": TransformerXL,
    "fox": ForgettingTransformer,
    "path": PaTH,
    "rt": RecurrentTransformer,
    "feedback-transformer": FeedbackTransformer,
    "staircase": Staircase,
    "transformer-fam": TransformerFAM,
    "rmt": RecurrentMemoryTransformer,
    "linear-attention": LinearAttention,
    "retnet": RetNet,
    "gla": GatedLinearAttention,
    "rwkv6": RWKV6,
    "mlstm": MLSTM,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "rwkv7": RWKV7,
    "kda": KimiDeltaAttention,
    "gdn2": GatedDeltaNet2,
    "deltaproduct": DeltaProduct,
    "s5": S5,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "lstm": LSTM,
    "slstm": SLSTM,
    "m2rnn": M2RNN,
    "lru": LRU,
    "hyena": Hyena,
}
"""Layers by name, grouped by family."""


LAYER = Kind("mixer", "layer", nn.Module, "torch.nn.Module")
"""What ``find_mixer`` finds."""


def find_mixer(name: str) -> type[Layer]:
    """Return the layer class of a registered name, of an import path ``package.module:Class``, or of a stack of both.

    A class that is an ``nn.Module`` but not a ``Layer`` is wrapped by ``mixers.adapt``. A stack is written as
    ``3*gated-deltanet+transformer`` (``mixers.stack``).

    Raises:
        ValueError: there is no such layer, or it cannot be used. The message lists the choices, or says why.
    """
    if not isinstance(name, str):
        kind = name if inspect.isclass(name) else type(name)
        example = f"{kind.__module__}:{kind.__qualname__}" if issubclass(kind, nn.Module) else "rt"
        found = "class" if inspect.isclass(name) else type(name).__name__
        raise ValueError(f'a layer is given by name: write "{example}" in place of the {found}')
    if name in MIXERS:
        return MIXERS[name]
    if (members := members_of(name)) != [name]:
        classes = tuple(map(find_mixer, members))
        try:
            return stack_of(name, classes, restored)
        except ValueError as error:
            raise ValueError(f"mixer {name!r}: {error}") from error

    found = find_class(name, LAYER, MIXERS)
    if not issubclass(found, Layer):
        try:
            return adapt(found)
        except ValueError as error:
            raise ValueError(f"mixer {name!r}: {error}") from error
    if bare := [
        c for c in found.Config.__mro__ if inspect.get_annotations(c) and not vars(c).get("__dataclass_params__")
    ]:
        raise ValueError(
            f"mixer {name!r}: its {bare[0].__qualname__} is no dataclass: put @dataclass(frozen=True, kw_only=True) "
            "before it"
        )
    if not _has_defaults(found.Config):
        raise ValueError(f"mixer {name!r}: its Config must be a dataclass whose fields all have defaults")
    return found


def restored(name: str, values: Mapping[str, Any]) -> Any:
    """Return settings of a stack."""
    return find_mixer(name).Config(**values)


def build(
    name: str | type[nn.Module],
    width: int = 128,
    *,
    mlp_width: int | None = None,
    layers: int | None = None,
    **options: Any,
) -> Layer:
    """Build one layer as a module, or a whole stack of layers, for use in a model of your own.

        layer = build("rt", width=256, heads=8)
        z_BTD = layer(x_BTD)
        state = layer.init_state(batch)
        z_BD, state = layer.step(x_BD, state)

    Args:
        name: registered name, ``package.module:Class``, a class, or a stack such as ``3*gated-deltanet+transformer``.
        width: model width D.
        mlp_width: hidden width of the MLP; 4 D if None, 0 for a layer without MLP.
        layers: number L of layers in the model; residual branches are scaled by 1/sqrt(L). A
            ``mixers.deep.DeepLayer`` and a stack hold all L layers themselves. Unless given, 1, or those of the stack.
        **options: fields of the layer's ``Config`` that differ from their defaults; of a stack, ``transformer__heads``.

    Raises:
        ValueError: there is no such layer or option, an option is of another type or no finite number, or the layer
            cannot be built with these options.
    """
    name = name_of(name, MIXERS)
    layer_class = find_mixer(name)
    known = [field.name for field in fields(layer_class.Config)]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"mixer {name!r} has no option {unknown[0]!r}: choose from {', '.join(known) or 'none'}")

    layers = len(members_of(name)) if layers is None else layers
    shape = Shape(width=width, mlp_width=4 * width if mlp_width is None else mlp_width, layers=layers)
    with building(name):
        return settled(layer_class(override(layer_class.Config, options), shape))


@contextmanager
def building(mixer: str) -> Iterator[None]:
    """Name the mixer in errors that are raised while its layer is built.

    Raises:
        ValueError: the layer cannot be built; one line. Errors of other kinds are faults of its code and are raised
            again with a note.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"cannot build mixer {mixer!r}: {where(error)}{error}{advice_on_gpus(error)}") from error
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was built")
        raise


def variant_label(mixer: str, settings: Mapping[str, Any], layers: int, short_convolution: int = 0) -> str:
    """Return the name of a layer in tables and charts, which includes all settings that differ from the defaults.

    ``rt``, ``rt-block-4``, ``rt-no-persistent-norm``, ``transformer-2-layers``, ``rt-block-4+conv4``.

    Args:
        mixer: registered name, ``package.module:Class``, or a stack.
        settings: fields of its ``Config`` that differ from their defaults.
        layers: number of stacked layers; it is named if it is not that of the mixer's name.
        short_convolution: number of positions that the convolution before the layer spans; 0 for none.
    """
    words = [mixer]
    for name, value in settings.items():
        word = name.replace(BETWEEN, ".").replace("_", "-")
        # An entry with a dash is quoted, or it would look like two.
        quoted = (
            (repr(y) if "-" in str(y) else str(y) for y in value) if isinstance(value, tuple | list) else [str(value)]
        )
        is_short = isinstance(value, float) and float(f"{value:g}") == value
        number = f"{value:g}" if is_short else "-".join(quoted)
        words.append((word if value else f"no-{word}") if isinstance(value, bool) else f"{word}-{number}")
    if layers > len(members_of(mixer)):
        words.append(f"{layers}-layers")
    return mixer_label("-".join(words), short_convolution)


def changed(settings: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the settings that differ from the defaults of a ``Config`` class."""
    defaults = vars(config_class())
    return {name: value for name, value in settings.items() if name not in defaults or value != defaults[name]}


def _has_defaults(config_class: type) -> bool:
    try:
        return is_dataclass(config_class())
    except TypeError:
        return False
