"""Layers with a row in the reference results: every registered layer, and variants that answer a question."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mixers import MIXERS


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the reference results.

    Attributes:
        name: name of the row and of its folder.
        mixer: registered name of the layer.
        options: settings of the layer that differ from its defaults.
        layers: stacked layers.
    """

    name: str
    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1


FIRST = (
    *("rt", "transformer", "deltanet", "gated-deltanet", "rwkv7", "mamba2", "mamba", "gla", "hyena", "lstm"),
    *("staircase", "sliding-attention"),
)
"""Layers that are trained first, in this order; the others follow."""

VARIANTS = (
    # The paper's trade of depth for speed (conclusion, "blocking").
    Entry(name="rt-block-4", mixer="rt", options={"block": 4}),
    Entry(name="rt-block-16", mixer="rt", options={"block": 16}),
    # The paper's ablation of the norm on persistent pairs.
    Entry(name="rt-no-persistent-norm", mixer="rt", options={"persistent_norm": False}),
    # Effective depth: how many Transformer layers one RT layer is worth.
    Entry(name="transformer-2-layers", mixer="transformer", layers=2),
    Entry(name="transformer-3-layers", mixer="transformer", layers=3),
    Entry(name="transformer-4-layers", mixer="transformer", layers=4),
)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        *(Entry(name=name, mixer=name) for name in FIRST[:2]),
        *VARIANTS,
        *(Entry(name=name, mixer=name) for name in (*FIRST[2:], *(name for name in MIXERS if name not in FIRST))),
    )
}
"""All rows by name, in the order in which they are trained."""
LAYERS = tuple(entry for entry in ENTRIES.values() if entry.name == entry.mixer)
"""The rows of the registered layers with their defaults, among which a layer is ranked."""
