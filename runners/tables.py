"""Names, numbers and costs in the cells of tables, and tables that may be too wide for a console."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mixers.costs import LENGTHS

COSTS = ("parameters", *(f"state\n{length}" for length in LENGTHS), "FLOPs\n/ token")
"""Headings of ``cost_cells``."""
FOOTNOTE = (
    f"costs of all layers, one sequence; state: floats up to {LENGTHS[0]} and {LENGTHS[1]} "
    f"positions; FLOPs: forward pass over {LENGTHS[0]} positions, matrix products and convolutions only, "
    "masked ones too"
)
UNLIMITED = 1000
"""Width of a console on which every table fits."""
BREAKS = re.compile(r"(?<=[.:-])(?=[^\W\d])|(?<=\s)(?=\S)")
"""Where a name may be broken: before words, not before digits, which may belong to a number."""


@dataclass(frozen=True)
class Name:
    """A name in a table; a column that is too narrow breaks it before words, and indents what follows.

    Attributes:
        text: the name, with what stands before it, or several lines of text.
    """

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines for the width of the column."""
        width = options.max_width
        for line in self.text.splitlines():
            lead = line[: len(line) - len(line.lstrip(" →"))]
            part, indent, parts = lead, len(lead) + 2, []
            for word in BREAKS.split(line[len(lead) :]):  # a word that does not fit stands alone
                if part != lead and len((part + word).rstrip()) > width:
                    parts.append(part.rstrip())
                    part = lead = " " * max(0, min(indent, width - len(word)))
                part += word
            yield Text("\n".join([*parts, part]))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the width that the name needs, as text does."""
        return Measurement.get(console, options, Text(self.text))


def fits(table: Table, console: Console) -> bool:
    """Return whether a console is wide enough for a table."""
    return Measurement.get(console, console.options.update(max_width=UNLIMITED), table).maximum <= console.width


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, …, ``11th``, …, ``21st``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 11 <= number % 100 <= 13 else ending}"


def abbreviated(number: int) -> str:
    """Return a number with three digits and a unit: 197k, 1.05M."""
    rounded = float(f"{number:.3g}")
    power = max(0, math.floor(math.log10(rounded)) // 3) if rounded else 0
    return f"{rounded / 1000**power:#.3g}".rstrip(".") + "kMGTP"[power - 1] if power else str(number)


def cost_cells(parameters: int, state: Mapping[Any, int] | None, flops: Mapping[Any, int] | None) -> list[str]:
    """Return parameters, state at each of ``LENGTHS`` and FLOPs as cells; ? marks an unknown figure.

    Args:
        parameters: parameters of one layer.
        state: floats of its state by the number of positions, an integer or its text; None if unknown.
        flops: FLOPs per token, likewise.
    """
    floats, operations = ({str(length): n for length, n in (of or {}).items()} for of in (state, flops))
    figures = (parameters, *(floats.get(str(length)) for length in LENGTHS), operations.get(str(LENGTHS[0])))
    return ["?" if figure is None else abbreviated(figure) for figure in figures]
