"""The width at which a layer costs as much as another: ``--match``."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from mixers.base import Layer, Shape
from mixers.costs import LENGTHS, build_frozen, count_parameters, count_state, flops_at_first
from mixers.options import option_of

Figure = Literal["params", "state", "flops"]
TOLERANCE = 0.02
WIDEST = 8
"""Widths beyond this multiple of the given width are not tried."""
MLP_CHANGE = 0.25
"""Share by which an MLP becomes wider or narrower where no width meets the target."""

FIGURES: dict[Figure, tuple[str, Callable[[Layer], int]]] = {
    "params": ("parameters", count_parameters),
    "state": (f"state floats at N = {LENGTHS[0]}", lambda layer: count_state(layer, LENGTHS[:1])[LENGTHS[0]]),
    "flops": (f"FLOPs at N = {LENGTHS[0]}", flops_at_first),
}
"""Figures by which layers can be matched: name in messages, and the function that counts it."""


def count(figure: Figure, layer_class: type[Layer], config: Any, shape: Shape) -> int:
    """Return one figure of a layer, or of a whole stack.

    Raises:
        ValueError: the layer cannot be built.
    """
    return FIGURES[figure][1](build_frozen(layer_class, config, shape))


def match(figure: Figure, target: int, layer_class: type[Layer], config: Any, shape: Shape) -> tuple[Shape, int]:
    """Return the shape at which a layer's figure is nearest to ``target``, and its figure.

    Widths are multiples of the number of heads, if the layer has heads, and also of 8 if such a width meets the target.
    The ratio of MLP width to model width is kept, unless no width meets the target: then the MLP of the nearest one
    becomes up to a quarter wider or narrower.

    Raises:
        ValueError: the layer cannot be built, or fails at a width while it is counted, or no width within ``WIDEST``
            meets the target to 2%, nor does such an MLP of the nearest one. The message then names that width, its
            difference from the target, and options that may come nearer.
    """

    def scaled(width: int) -> Shape:
        hidden = round(width * shape.mlp_width / shape.width)
        return replace(shape, width=width, mlp_width=max(min(1, shape.mlp_width), hidden))

    @cache
    def builds(width: int) -> bool:
        try:
            build_frozen(layer_class, config, scaled(width))
        except (ValueError, TypeError, RuntimeError):
            return False
        return True

    @cache
    def figure_at(width: int) -> int:
        try:
            return count(figure, layer_class, config, scaled(width)) if builds(width) else 0
        except Exception as error:  # a user's layer may raise anything while it is counted
            raise ValueError(f"at width {width}: {error}") from error

    def distance(width: int) -> float:
        return abs(figure_at(width) / target - 1)

    heads = max(1, math.lcm(*(number for name, number in vars(config).items() if option_of(name) == "heads")))
    widest = WIDEST * shape.width
    candidates: list[int] = []
    for unit in dict.fromkeys((math.lcm(8, heads), heads)):
        # A layer may refuse some multiples, so the unit is doubled until two neighbours can be built.
        while unit <= widest and not all(builds(unit * (shape.width // unit + more)) for more in (1, 2)):
            unit *= 2
        candidates += filter(builds, _around(target, range(unit, widest + 1, unit), shape.width, figure_at))
        if candidates and distance(best := min(candidates, key=distance)) <= TOLERANCE:
            return scaled(best), figure_at(best)

    # No width meets the target.
    label = f"no width up to {widest} meets the Transformer's {target:,} {FIGURES[figure][0]} within {TOLERANCE:.0%}"
    if not candidates:
        build_frozen(layer_class, config, shape)
        raise ValueError(f"{label}: no multiple of {heads} can be built")
    best = min(candidates, key=distance)

    # Figures grow about evenly with the MLP's width, or do not depend on it.
    near, most = scaled(best), int(MLP_CHANGE * scaled(best).mlp_width)
    with suppress(ValueError, TypeError, RuntimeError):  # a layer may refuse some widths
        by_most = count(figure, layer_class, config, replace(near, mlp_width=near.mlp_width + most)) - figure_at(best)
        change = round((target - figure_at(best)) / by_most * most) if by_most else 0
        other = replace(near, mlp_width=near.mlp_width + min(max(change, -most), most))
        met = count(figure, layer_class, config, other)
        if abs(met / target - 1) <= TOLERANCE:
            return other, met

    nearest = f"the nearest, {best}, has {figure_at(best):,} ({figure_at(best) / target - 1:+.1%})"
    finer = max(map(figure_at, candidates)) > target  # else even the widest has too little
    others = ["fewer heads"] * (heads > 1) + ["a larger width" if finer else "another figure"]
    raise ValueError(f"{label}: {nearest}; try {' or '.join(others)}")


def _around(target: int, widths: Sequence[int], start: int, figure_at: Callable[[int], int]) -> Sequence[int]:
    """Return the widths just below and above the target by bisection; the figure grows with the width.

    The search starts near ``start``, so that figures of few large widths are counted.
    """
    low, high = 0, sum(width <= start for width in widths)
    while high < len(widths) and (high == 0 or figure_at(widths[high - 1]) < target):
        low, high = high, min(max(1, 2 * high), len(widths))
    if not widths or figure_at(widths[high - 1]) < target:
        return widths[-1:]

    above = bisect_left(widths, target, low, high, key=figure_at)
    return widths[max(0, above - 1) : above + 1]
