"""Sequence layers: the registry, one file per layer, and the operations that layers share in ``mixers.ops``.

layer = build("rt", width=256, heads=8)
z_BTD = layer(x_BTD)
"""

from mixers.base import ContractError, Layer, Shape, State
from mixers.costs import costs
from mixers.registry import MIXERS, build, find_mixer

__all__ = ["MIXERS", "ContractError", "Layer", "Shape", "State", "build", "costs", "find_mixer"]
