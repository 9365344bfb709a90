"""Costs of a layer as cells of a table, and in words."""

from collections.abc import Callable

from mixers.costs import LENGTHS, Costs

HEADINGS = ("parameters", *(f"state\n{length}" for length in LENGTHS), "FLOPs\n/ token")
"""Headings of ``cells_of``."""
FOOTNOTE = (
    f"one layer, one sequence; largest state in floats up to {LENGTHS[0]} and {LENGTHS[1]} positions; FLOPs of a "
    f"forward pass over {LENGTHS[0]} positions, matrix products and convolutions only, masked ones too: elementwise "
    "recurrences count nothing"
)


def cells_of(costs: Costs, number: Callable[[int], str] = "{:,}".format) -> list[str]:
    """Return parameters, state at each of ``LENGTHS``, and operations as cells; ? marks an unknown figure."""
    state, flops = costs.state_floats or {}, costs.flops_per_token or {}
    figures = (costs.parameters, *map(state.get, LENGTHS), flops.get(LENGTHS[0]))
    return ["?" if figure is None else number(figure) for figure in figures]


def sentence_of(costs: Costs) -> str:
    """Return the figures in words."""
    parameters, *state, flops = cells_of(costs)
    floats = ", ".join(f"{n} floats after {length} positions" for n, length in zip(state, LENGTHS, strict=True))
    return f"{parameters} parameters; state {floats}; {flops} FLOPs per token at N = {LENGTHS[0]}"
