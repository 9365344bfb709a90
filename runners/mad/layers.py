"""The layers of a command line with what they cost: the table of ``--list``, the widths of ``--match``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mixers.base import Layer, Shape
from mixers.costs import FIGURES, FOOTNOTE, HEADINGS, Costs, Figure, costs, count, match
from mixers.registry import building, find_mixer
from mixers.transformer import Transformer
from runners.cli import applicable, override


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layer as it is to be built."""

    mixer: str
    config: Any
    shape: Shape

    @property
    def layer(self) -> type[Layer]:
        return find_mixer(self.mixer)

    def costs(self) -> Costs:
        """What one layer costs.

        Raises:
            ValueError: the layer cannot be built.
        """
        with building(self.mixer):
            return costs(self.layer, self.config, self.shape)


def choose_layers(
    mixers: Sequence[str],
    values: dict[str, Any],
    shape: Shape,
    figure: Figure | None,
    say: Callable[[str], None],
    strict: bool,
) -> list[Choice]:
    """The named layers, each with what it has of the options given, and with ``figure`` as wide as meets the
    Transformer's.

    Raises:
        ValueError: there is no such Transformer, or a layer cannot meet it within 2% and ``strict`` does not let it be
            left out.
    """
    configs = {mixer: find_mixer(mixer).Config for mixer in mixers}
    own = applicable("mixer", values, configs, say)
    choices = [Choice(mixer=name, config=override(config, own[name]), shape=shape) for name, config in configs.items()]
    if figure is None:
        return choices
    known = asdict(Transformer.Config())
    reference = Transformer.Config(**{name: value for name, value in values.items() if name in known})
    try:
        target = count(figure, Transformer, reference, shape)
    except ValueError as error:
        raise ValueError(
            f"--match {figure}: no Transformer of width {shape.width} to meet: {error}; give another --width, or name "
            "transformer in --mixer to give its options"
        ) from error
    say(f"transformer: width {shape.width}, MLP {shape.mlp_width}: {target:,} {FIGURES[figure][0]}, which others meet")
    matched = []
    for choice in choices:
        try:
            matched.append(choice if choice.layer is Transformer else _matched(choice, figure, target, say))
        except ValueError as error:
            if strict:
                raise
            say(f"left out: {error}")
    return matched


def _matched(choice: Choice, figure: Figure, target: int, say: Callable[[str], None]) -> Choice:
    try:
        shape, found = match(figure, target, choice.layer, choice.config, choice.shape)
    except Exception as error:  # a user's layer may fail in any way while it is counted
        raise ValueError(f"--match {figure}: {choice.mixer}: {error}") from error
    say(
        f"{choice.mixer}: width {shape.width}, MLP {shape.mlp_width}: {found:,} {FIGURES[figure][0]}, "
        f"{found / target - 1:+.1%}"
    )
    return Choice(mixer=choice.mixer, config=choice.config, shape=shape)


Counted = dict[str, list[tuple[Choice, list[str]]]]
"""Layers by family, with the cells of their costs."""


def print_layers(choices: Sequence[Choice], console: Console) -> None:
    """One row a layer, under its family: the paper it follows, its width, what it costs.

    On a narrow console, which would break the names, the width stands below the name, and there are no lines between.
    """
    families: Counted = {}
    with console.status("counting") as status:
        for choice in choices:
            status.update(f"counting {choice.mixer}")
            families.setdefault(choice.layer.family, []).append((choice, choice.costs().cells()))
    bare = Measurement.get(console, console.options.update(max_width=1000), _table(families, wide=True, papers=False))
    console.print(_table(families, wide=bare.maximum <= console.width, papers=True))
    console.print(FOOTNOTE)


def _table(families: Counted, wide: bool, papers: bool) -> Table:
    """The layers with or without their papers; ``wide`` has a column for the width, and lines."""
    if wide:
        table = Table(show_lines=True)
        table.add_column("mixer", overflow="fold")
        table.add_column("width\n/ MLP", justify="right", no_wrap=True)
    else:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
        table.add_column("mixer\nwidth / MLP", overflow="fold")
    table.title, table.title_justify = "layers", "left"
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for family, members in families.items():
        table.add_row(Text(family, "bold"))
        for choice, cells in members:
            width = f"{choice.shape.width} / {choice.shape.mlp_width}"
            paper = (f"\n{choice.layer.paper}", "dim") if papers and choice.layer.paper else ""
            if wide:
                table.add_row(Text.assemble(choice.mixer, paper), width, *cells)
            else:
                table.add_row(Text.assemble(f"{choice.mixer}\n{width}", paper), *cells)
    return table
