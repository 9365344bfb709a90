"""The tables of differences between layers, tasks and their references, made from docstrings.

    python -m runners.deviations     # writes mixers/README.md and tasks/README.md

The docstring of every registered layer, and of every task that is taken from elsewhere, ends with a section that names
the reference, then lists one point per difference, which begins with its topic.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any

from mixers import MIXERS
from tasks import TASKS

HEADING = "Differs from the reference:"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of differences.

    Attributes:
        file: the file.
        kind: what is compared, in one word.
        registry: classes by name, with their sections.
        topics: topics of points, in their order.
        frame: text above the tables.
    """

    file: Path
    kind: str
    registry: Mapping[str, type[Any]]
    topics: tuple[str, ...]
    frame: str


LAYERS = Page(
    file=ROOT / "mixers" / "README.md",
    kind="layer",
    registry=MIXERS,
    topics=("block", "sizes", "positions", "computation", "initialisation", "training", "left out", "added"),
    frame="""\
# Where the layers differ from their references

Layers are compared here, not the blocks around them. So every layer has the same block: RMS norms with a gain (ε 1e-6)
before the mixer and before the MLP, residual branches times 1/√L (L layers), an MLP D → 4D → D with exact GELU and
without biases, no dropout. Where a reference has another block, the row *block* says which. Linear maps start normal
with standard deviation 1/√inputs and have no bias unless the layer's file says so. All parameters have one learning
rate, and weight decay applies to those of more than one axis.

"Theirs" is the reference. Differences that change nothing but rounding or the order of channels are not listed.

This page is made of the layers' docstrings: `python -m runners.deviations` writes it.
""",
)
DATA = Page(
    file=ROOT / "tasks" / "README.md",
    kind="task",
    registry={name: task for name, task in TASKS.items() if HEADING in (task.__doc__ or "")},
    topics=("tokens", "sequences", "targets", "scoring", "training", "evaluation", "left out", "added"),
    frame="""\
# Where the tasks differ from their sources

Every task here has a training, a validation and a test split, which have random streams of their own and share no
sequence; hyperparameters are chosen on validation. MAD has no validation split and chooses on the test split. Token
accuracy is the share of scored positions; MAD's accuracy is an average over classes. All tasks train on 12,800
sequences (memorization: 256) for 200 epochs at one length (modular arithmetic: at several). In profiles they train on
102,400 sequences, each seen once, and the last six tasks of the list are in profiles alone.

"Theirs" is the source. A task that is not listed is not compared yet.

This page is made of the tasks' docstrings: `python -m runners.deviations` writes it.
""",
)


def deviations(compared: type[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Return the reference that the docstring of a class names, and topic and text of each difference."""
    section = cleandoc(compared.__doc__ or "").partition(f"\n{HEADING}\n")[2]

    # Paragraphs and points begin at the start of a line, and may span several lines.
    reference, *points = (" ".join(part.split()) for part in re.split(r"^- ", dedent(section), flags=re.MULTILINE))
    return reference, [(topic, text) for topic, _, text in (point.partition(": ") for point in points)]


def text_of(page: Page) -> str:
    """Return the text of a page."""
    sections = {name: deviations(compared) for name, compared in page.registry.items()}
    papers = {name: getattr(compared, "paper", "") for name, compared in page.registry.items()}
    with_paper = any(papers.values())

    headings = [page.kind, *["paper"] * with_paper, "compared with"]
    lines = [page.frame, f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    for name, (reference, _) in sections.items():
        lines.append(f"| `{name}` | {f'{papers[name]} | ' * with_paper}{reference} |")

    lines += ["", f"| {page.kind} | topic | difference |", "| --- | --- | --- |"]
    for name, (_, points) in sections.items():
        lines += [f"| `{name}` | {topic} | {text} |" for topic, text in points]
    return "\n".join(lines).replace("``", "`") + "\n"


def main() -> None:
    """Write both pages."""
    for page in (LAYERS, DATA):
        page.file.write_text(text_of(page), encoding="utf-8")


if __name__ == "__main__":
    main()
