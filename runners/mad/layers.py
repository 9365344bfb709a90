"""The layers of a command line and their costs: the table of ``--list``, the widths of ``--match``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mixers.base import Layer, Shape
from mixers.matching import FIGURES, Figure, count, match
from mixers.options import override
from mixers.registry import find_mixer
from mixers.short_convolution import with_short_convolution
from mixers.transformer import Transformer
from runners.cli import applicable, as_fields, defaults_of
from runners.cost_cells import FOOTNOTE, HEADINGS, cells_of
from runners.mad.layer_choice import LayerChoice
from runners.tables import Name


def choose_layers(
    mixers: Sequence[str],
    values: dict[str, Any],
    shape: Shape,
    short_convolution: int,
    figure: Figure | None,
    say: Callable[[str], None],
    strict: bool,
) -> list[LayerChoice]:
    """Configure the named layers.

    With a ``figure``, choose for every layer the width that brings its cost within 2% of the Transformer's.

    Args:
        mixers: names of layers.
        values: options of layers; each layer takes the options that it has.
        shape: widths and number of layers; with a ``figure``, those of the Transformer.
        short_convolution: positions that a convolution before each layer spans, the Transformer included; 0 for none.
        figure: cost to match, or None.
        say: prints a line.
        strict: whether a layer that cannot match is an error instead of being left out.

    Raises:
        ValueError: the Transformer cannot be built, or a layer cannot match it and ``strict`` is set.
    """
    configs = {mixer: find_mixer(mixer).Config for mixer in mixers}
    own = applicable("mixer", values, configs, say)
    choices = [
        LayerChoice(mixer=name, config=override(config, own[name]), shape=shape, short_convolution=short_convolution)
        for name, config in configs.items()
    ]
    if figure is None:
        return choices

    transformer = with_short_convolution(Transformer, short_convolution)
    target = _transformer_cost(transformer, figure, values, shape, say)
    matched = []
    for choice in choices:
        try:
            matched.append(choice if choice.layer is transformer else _matched(choice, figure, target, say))
        except ValueError as error:
            if strict:
                raise
            say(f"left out: {error}")
    return matched


def _transformer_cost(
    transformer: type[Layer], figure: Figure, values: dict[str, Any], shape: Shape, say: Callable[[str], None]
) -> int:
    """Count and print the Transformer's cost, which the other layers match.

    Raises:
        ValueError: it cannot be built.
    """
    known = defaults_of(Transformer.Config)
    own = {name: value for name, value in as_fields(values).items() if name in known}
    reference = override(Transformer.Config, own)

    try:
        target = count(figure, transformer, reference, shape)
    except ValueError as error:
        raise ValueError(
            f"--match {figure}: no Transformer of width {shape.width} to meet: {error}; give another --width, or name "
            "transformer in --mixer to give its options"
        ) from error

    say(f"transformer: width {shape.width}, MLP {shape.mlp_width}: {target:,} {FIGURES[figure][0]}, which others meet")
    return target


def _matched(choice: LayerChoice, figure: Figure, target: int, say: Callable[[str], None]) -> LayerChoice:
    """Return the layer with the width that matches ``target``.

    Raises:
        ValueError: no width matches within 2%, or the layer fails while it is counted.
    """
    try:
        shape, found = match(figure, target, choice.layer, choice.config, choice.shape)
    except Exception as error:  # a user's layer may raise anything while it is counted
        raise ValueError(f"--match {figure}: {choice.mixer}: {error}") from error

    say(
        f"{choice.mixer}: width {shape.width}, MLP {shape.mlp_width}: {found:,} {FIGURES[figure][0]}, "
        f"{found / target - 1:+.1%}"
    )
    return replace(choice, shape=shape)


Counted = dict[str, list[tuple[LayerChoice, list[str]]]]
"""Layers by family, each with the table cells of its costs."""


def print_layers(choices: Sequence[LayerChoice], console: Console) -> None:
    """Print one row per layer, grouped by family: its paper, width and costs.

    On a console too narrow for complete names, the width is printed below the name, and the table has no lines.
    """
    families: Counted = {}
    with console.status("counting") as status:
        for choice in choices:
            status.update(f"counting {choice.label}")
            families.setdefault(choice.layer.family, []).append((choice, cells_of(choice.costs())))

    # The table is wide if it fits without the papers, whose names may be wrapped.
    bare = Measurement.get(console, console.options.update(max_width=1000), _table(families, wide=True, papers=False))
    console.print(_table(families, wide=bare.maximum <= console.width, papers=True))
    console.print(FOOTNOTE)


def _table(families: Counted, wide: bool, papers: bool) -> Table:
    """Return the table of layers; if ``wide``, it has a column for the width, and lines."""
    # Columns.
    if wide:
        table = Table(show_lines=True)
        table.add_column("mixer", overflow="fold")
        table.add_column("width\n/ MLP", justify="right", no_wrap=True)
    else:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
        table.add_column("mixer\nwidth / MLP", overflow="fold")
    table.title = "layers"
    table.title_justify = "left"
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)

    # Rows.
    for family, members in families.items():
        table.add_row(Text(family, "bold"))
        for choice, cells in members:
            width = f"{choice.shape.width} / {choice.shape.mlp_width}"
            paper = [Text(choice.layer.paper, "dim")] if papers and choice.layer.paper else []
            if wide:
                table.add_row(Group(Name(choice.label), *paper), width, *cells)
            else:
                table.add_row(Group(Name(f"{choice.label}\n{width}"), *paper), *cells)
    return table
