"""An optional short causal convolution before any layer: a layer that wraps a given layer class."""

from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from mixers.base import Layer, Shape, State
from mixers.deep import DeepLayer
from mixers.parts import ShortConvolution
from mixers.stack import StackLayer

NEWEST = "short_convolution.newest"
"""Name of the convolution's newest inputs in the state, beside the names of the wrapped layer."""


class ConvolvedLayer(Layer):
    """``z = layer(x + s conv(x))``: a given layer that also reads the newest W - 1 inputs of each channel.

    The convolution is a residual branch of its own, with s = 1/sqrt(L), before the layer and therefore before its norm
    ("Canon layers", Allen-Zhu 2025, arXiv:2512.17351, come after that norm; H3, Based and Mamba convolve inside the
    mixer). In this place the option has the same meaning for every layer, wherever the layer has norms, and kernels
    that compute a norm themselves need no change. The convolution needs no norm of its own, because the branch is
    linear and the layer's norm scales the sum. State: the state of the layer, and the newest inputs. A ``DeepLayer``,
    which contains all L layers of a model, has one convolution, before its first layer.

    ``with_short_convolution`` makes the subclasses, whose settings are those of the given layer.
    """

    layer_class: ClassVar[type[Layer]]
    size: ClassVar[int]
    """Positions W that the convolution spans."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.layer = self.layer_class(config, shape)
        self.convolution = ShortConvolution(shape.width, self.size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.layer(x_BTD + self.shape.residual_scale * self.convolution(x_BTD))

    def init_state(self, batch: int) -> State:
        return {**self.layer.init_state(batch), NEWEST: self.convolution.init_state(batch)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BD, newest_BWD = self.convolution.step(x_BD, state[NEWEST])
        of_layer = {name: y for name, y in state.items() if name != NEWEST}

        z_BD, of_layer = self.layer.step(x_BD + self.shape.residual_scale * y_BD, of_layer)
        return z_BD, {**of_layer, NEWEST: newest_BWD}

    @classmethod
    def loop_period(cls, config: Any) -> int | None:
        return cls.layer_class.loop_period(config)

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return cls.layer_class.remark(config, length)

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        return cls.layer_class.plain_config(config)


@cache
def with_short_convolution(layer_class: type[Layer], size: int) -> type[Layer]:
    """Return ``layer_class`` with a convolution over ``size`` positions before it; with 0, return the class itself.

    A stack has one before each of its layers. Each class is made once per process.
    """
    if size == 0:
        return layer_class
    name = f"{layer_class.__name__}WithShortConvolution"
    if issubclass(layer_class, StackLayer):
        kinds = {member: with_short_convolution(kind, size) for member, kind in layer_class.kinds.items()}
        return type(name, (layer_class,), {"kinds": kinds})

    members = {
        "layer_class": layer_class,
        "size": size,
        "Config": layer_class.Config,
        "family": layer_class.family,
        "paper": layer_class.paper,
    }
    # The wrapped class defines its own ``growth_period``, which stays valid, because the newest inputs do not grow.
    if "growth_period" in vars(layer_class):
        members["growth_period"] = layer_class.growth_period

    bases = (ConvolvedLayer, DeepLayer) if issubclass(layer_class, DeepLayer) else (ConvolvedLayer,)
    return type(name, bases, members)


def mixer_label(mixer: str, size: int) -> str:
    """Return the name of a layer without its settings: ``rt``, or ``rt+conv4`` with a convolution over 4 positions."""
    return f"{mixer}+conv{size}" if size else mixer
