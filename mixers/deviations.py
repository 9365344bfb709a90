"""The table of differences between the layers and their references, made from the layers' docstrings.

    python -m mixers.deviations

The docstring of every registered layer ends with a section that names the reference, then lists one point per
difference, which begins with its topic. ``main`` writes the table of all points to ``mixers/README.md``.
"""

import re
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from mixers.base import Layer
from mixers.registry import MIXERS

HEADING = "Differs from the reference:"
TOPICS = ("block", "sizes", "positions", "computation", "initialisation", "training", "left out", "added")
PAGE = Path(__file__).with_name("README.md")
FRAME = """\
# Where the layers differ from their references

Layers are compared here, not the blocks around them. So every layer has the same block: RMS norms with a gain (ε 1e-6)
before the mixer and before the MLP, residual branches times 1/√L (L layers), an MLP D → 4D → D with exact GELU and
without biases, no dropout. Where a reference has another block, the row *block* says which. Linear maps start normal
with standard deviation 1/√inputs and have no bias unless the layer's file says so. All parameters have one learning
rate, and weight decay applies to those of more than one axis.

"Theirs" is the reference. Differences that change nothing but rounding or the order of channels are not listed.

This page is made of the layers' docstrings: `python -m mixers.deviations` writes it.
"""


class Deviations(NamedTuple):
    """The section of a layer's docstring about its reference.

    Attributes:
        reference: paper and code with which the layer is compared.
        points: topic and text of each difference.
    """

    reference: str
    points: list[tuple[str, str]]


def deviations(layer: type[Layer]) -> Deviations:
    """Return the section of a layer's docstring about its reference.

    Raises:
        ValueError: there is no such section, or it has another form.
    """
    _, heading, section = cleandoc(layer.__doc__ or "").partition(f"\n{HEADING}\n")
    if not heading:
        raise ValueError(f"the docstring of {layer.__name__} has no section {HEADING!r}")

    # Paragraphs and points begin at the start of a line, and may span several lines.
    reference, *points = (" ".join(part.split()) for part in re.split(r"^- ", dedent(section), flags=re.MULTILINE))
    if not reference:
        raise ValueError(f"{layer.__name__}: {HEADING!r} must begin with the reference")

    pairs = [tuple(point.partition(": ")[::2]) for point in points]
    if unknown := [topic for topic, _ in pairs if topic not in TOPICS]:
        raise ValueError(f"{layer.__name__}: no topic {unknown[0]!r}: choose from {', '.join(TOPICS)}")
    return Deviations(reference, [(topic, text) for topic, text in pairs])


def page() -> str:
    """Return the text of ``mixers/README.md``."""
    sections = {name: deviations(layer) for name, layer in MIXERS.items()}

    lines = [FRAME, "| layer | paper | compared with |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {MIXERS[name].paper} | {section.reference} |" for name, section in sections.items()]

    lines += ["", "| layer | topic | difference |", "| --- | --- | --- |"]
    for name, section in sections.items():
        lines += [f"| `{name}` | {topic} | {text} |" for topic, text in section.points]
    return "\n".join(lines).replace("``", "`") + "\n"


def main() -> None:
    """Write the table to ``mixers/README.md``."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
