"""A layer with the settings to build it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mixers.base import Layer, Shape
from mixers.costs import Costs, costs
from mixers.registry import building, changed, find_mixer, variant_label
from mixers.short_convolution import with_short_convolution


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """A layer with the settings to build it.

    Attributes:
        mixer: registered name, or ``package.module:Class``.
        config: the layer's ``Config``.
        shape: widths and number of layers.
        short_convolution: positions that the convolution before the layer spans; 0 is none.
    """

    mixer: str
    config: Any
    shape: Shape
    short_convolution: int

    @cached_property
    def layer(self) -> type[Layer]:
        """The layer's class."""
        return with_short_convolution(find_mixer(self.mixer), self.short_convolution)

    @property
    def label(self) -> str:
        """Name of the layer in tables, with its settings that differ from the defaults."""
        settings = changed(vars(self.config), type(self.config))
        return variant_label(self.mixer, settings, self.shape.layers, self.short_convolution)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells one choice from another, for use as a key: a configuration may hold lists."""
        return self.mixer, repr(self.config), self.short_convolution, self.shape

    def costs(self) -> Costs:
        """Count the costs of one layer.

        Raises:
            ValueError: the layer cannot be built.
        """
        with building(self.mixer):
            return costs(self.layer, self.config, self.shape)
