"""Tables of studies on the console, and the names that tell studies apart."""

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixers import MIXERS
from runners.mad.points import HALF, chosen, points
from runners.tables import COSTS, FOOTNOTE, Name, cost_cells, fits
from tasks import TASKS

FEW = 4
"""Largest number of layers that are not grouped by family."""
NEAR = 0.9
"""Share of the best point's token accuracy from which a point counts as near the best."""
ABOVE = 4
"""Standard errors of the test split above which an accuracy is above the ceiling."""
KINDS = ("sequence", "token")
"""Accuracies of a table."""
VALIDATION = {
    "val seq": "validation.sequence_accuracy",
    "val token": "validation.token_accuracy",
    "val loss": "validation.loss",
}
TEST = {"test seq": "test.sequence_accuracy", "test token": "test.token_accuracy", "steps/s": "steps_per_second"}
"""Headings of a study's table, and the figures below them."""
SETTINGS = ("width", "mlp_width", "steps", "batch_size", "evaluations", "precision")
"""Settings that a label names where the layers of a task differ in them, beside those of the optimizer and the grid."""

Row = Mapping[Hashable, Any]
"""A row of a table, by column."""
Line = tuple[str | Text, list[str]]
"""Label and cells of a printed row; the label of a task is a Text."""


def print_study(table: pd.DataFrame, console: Console) -> None:
    """Print the grid points of a study, which of them is chosen, ceiling and chance.

    Args:
        table: records of one study.
        console: where to print. On a narrow one, test figures and speed are in a second table.
    """
    found = points(table)
    (best,) = chosen(found).to_dict("records")
    console.print(best["study"], style="table.title", soft_wrap=True)  # a table would break it at its own width
    whole = _of_points(found, VALIDATION | TEST)
    parts = [whole] if fits(whole, console) else [_of_points(found, VALIDATION), _of_points(found, TEST)]
    console.print(*parts)
    print_notes(found, console)

    # The choice, and what it says of the grid.
    lrs = sorted(set(table["lr"]))
    if not best["chosen"]:
        lower = " ".join(f"{lr / 10:g}" for lr in lrs)
        first = f"every point diverged, the first run at step {table['diverged_step'].min():.0f}"
        console.print(f"{first}: try --lr {lower}", soft_wrap=True)
        return
    console.print(f"chosen on validation: lr {best['lr']:g}, weight decay {best['weight_decay']:g}")
    if best["edge"] is not None:
        beyond = [best["lr"] * factor for factor in ((0.2, 0.5) if best["edge"] == "smallest" else (2, 5))]
        more = " ".join(f"{lr:g}" for lr in sorted([*lrs, *beyond]))
        console.print(
            f"lr {best['lr']:g} is the {best['edge']} of the grid, so a better one may lie beyond it: "
            f"--lr {more} trains the new ones alone",
            soft_wrap=True,
        )
    reached = found["validation.token_accuracy"]
    if len(found) >= FEW and reached.max() > best["chance"]["token"]:
        near = (reached >= NEAR * reached.max()).mean()
        console.print(f"{near:.0%} of the grid points reach {NEAR} of the best validation token accuracy")

    # What the layer reaches, and what can be reached.
    for name in beyond_training(best):
        both = " / ".join(estimate(best, f"{name}.{kind}_accuracy") for kind in KINDS)
        console.print(f"sequence / token accuracy on {name!r}: {both}")
    ceiling, chance = best["ceiling"], best["chance"]
    console.print(
        f"sequence / token accuracy: ceiling {ceiling['sequence']:.4f} / {ceiling['token']:.4f}, "
        f"chance {chance['sequence']:.2g} / {chance['token']:.4f}"
    )
    for kind in KINDS:
        error = math.sqrt(ceiling[kind] * (1 - ceiling[kind]) / best["task_config"]["eval_examples"])
        if best[f"test.{kind}_accuracy"] > ceiling[kind] + ABOVE * error + 1e-9:
            reason = "the task states it too low, or the layer sees the answers"
            console.print(f"the {kind} accuracy is above the ceiling: {reason}", soft_wrap=True)


def print_comparison(found: pd.DataFrame, console: Console) -> None:
    """Print under each task one row per layer: test accuracies of the chosen point, and costs; then the task's limits.

    More than ``FEW`` layers are grouped by family. No more than ``FEW`` have a table of their accuracies on
    extrapolation sets, too.

    Args:
        found: chosen points of studies.
        console: where to print. On a narrow one, the costs are in a separate table.
    """
    found = labelled(found)
    labels = [*found["label"].unique()]
    is_grouped = len(labels) > FEW
    indent = "    " if is_grouped else "  "

    lines: list[tuple[str | Text, list[str], list[str]]] = []
    beyond: list[Line] = []
    for setting, of_setting in groupby(found.to_dict("records"), itemgetter("setting")):
        rows = {row["label"]: row for row in of_setting}
        limits = next(iter(rows.values()))
        lines.append((Text(setting, "bold"), [], []))
        for family, of_family in groupby(rows.values(), itemgetter("family")):
            lines += [(f"  {family}", [], [])] * is_grouped
            for row in of_family:
                remark = f"\n{indent}  {row['remark']}" if isinstance(row["remark"], str) else ""
                lines.append((f"{indent}{row['label']}{remark}", accuracies(row), costs_of(row)))
        for name, digits in (("ceiling", 4), ("chance", 2)):
            lines.append((f"  {name}", [f"{limits[name][kind]:.{digits}g}" for kind in KINDS], []))

        # Accuracies on extrapolation sets, with a column for each layer.
        sets = dict.fromkeys(name for row in rows.values() for name in beyond_training(row))
        beyond += [(Text(setting, "bold"), [])] * bool(sets)
        for name in sets:
            columns = [f"{name}.{kind}_accuracy" for kind in KINDS]
            pairs = [[rows[label][column] for column in columns] if label in rows else [] for label in labels]
            beyond.append((f"  {name}", [" / ".join(f"{y:.4f}" for y in pair if not math.isnan(y)) for pair in pairs]))

    title = "test accuracy of the points chosen on validation"
    tree = "task\n" + "  family\n" * is_grouped + f"{indent}layer"
    table = printed_table(title, (tree, *KINDS, *COSTS), [(label, figures + costs) for label, figures, costs in lines])
    if fits(table, console):
        console.print(table)
    else:
        each = found.drop_duplicates("label").to_dict("records")
        console.print(printed_table(title, (tree, *KINDS), [(label, figures) for label, figures, _ in lines]))
        console.print(printed_table("costs", ("layer", *COSTS), [(row["label"], costs_of(row)) for row in each]))
    table = printed_table("beyond training: sequence / token accuracy", ("task\n  set", *labels), beyond)
    if beyond and 1 < len(labels) <= FEW and fits(table, console):
        console.print(table)
    print_notes(found, console)
    console.print(FOOTNOTE)


def labelled(found: pd.DataFrame) -> pd.DataFrame:
    """Return studies in the order of the registries, with the columns ``label`` and ``setting``.

    The label is the layer, with the settings in which studies on a task differ. The setting is the task, with its
    difficulty unless it is the baseline, and with the task's settings in which studies of that name differ.

    Args:
        found: chosen points of studies.
    """
    rows = found.to_dict("records")
    names = [(row["task"], row["difficulty"]) for row in rows]
    words = _distinguishing(names, names, [row["task_config"] for row in rows])
    for row, word in zip(rows, words, strict=True):
        named = ", ".join(filter(None, (row["difficulty"] if row["difficulty"] != "baseline" else "", word)))
        row["setting"] = f"{row['task']} ({named})" if named else row["task"]

    # Widths, training and grids, in which all layers of a task may differ; options, in which those of a name may.
    places = [row["setting"] for row in rows]
    trained = []
    for row in rows:
        lrs, decays = (sorted(set(rates)) for rates in zip(*row["grid"], strict=True))
        grid = {"lr": " ".join(map(str, lrs)), "weight_decay": " ".join(map(str, decays))}
        trained.append({name: row[name] for name in SETTINGS} | row["optimizer"] | grid)
    everywhere = _distinguishing([""] * len(rows), places, trained)
    layers = [row["layer"] for row in rows]
    for row, *found_words in zip(
        rows, _distinguishing(layers, places, [row["mixer_config"] for row in rows]), everywhere, strict=True
    ):
        word = ", ".join(filter(None, found_words))
        row["label"] = f"{row['layer']} ({word})" if word else row["layer"]

    # Studies with equal settings differ in the user's code; fingerprints tell them apart.
    names = [(row["label"], row["setting"]) for row in rows]
    codes = [{"code": row["fingerprint"][:8]} for row in rows]
    for row, word in zip(rows, _distinguishing(names, names, codes), strict=True):
        row["label"] += word and f" ({word})"
    columns = [*found, *(name for name in ("label", "setting") if name not in found)]
    return in_order(pd.DataFrame(rows, columns=columns))


def in_order(found: pd.DataFrame) -> pd.DataFrame:
    """Return studies with ``label`` and ``setting`` in the order of the registries of tasks and layers.

    Layers of a family stand together, and families in the order of their first layer.
    """
    rows = found.to_dict("records")
    mixers = [_place(row["mixer"], MIXERS) for row in rows]
    family = {row["family"]: place for place, row in sorted(zip(mixers, rows, strict=True), key=itemgetter(0))[::-1]}
    keys = [
        (*_place(row["task"], TASKS), row["setting"] != row["task"], row["setting"], family[row["family"]], place)
        for row, place in zip(rows, mixers, strict=True)
    ]

    def by_number(label: str) -> list[tuple[float, str]]:
        parts = re.split(r"(\d+(?:\.\d+)?)", label)
        return [(float(part), "") if i % 2 else (math.inf, part) for i, part in enumerate(parts)]

    order = sorted(range(len(rows)), key=lambda i: (*keys[i], by_number(rows[i]["label"])))
    return found.iloc[order].reset_index(drop=True)


def accuracies(row: Row) -> list[str]:
    """Return the cells of both accuracies on the test split."""
    return [estimate(row, f"test.{kind}_accuracy") for kind in KINDS] if row["chosen"] else ["diverged", ""]


def costs_of(row: Row) -> list[str]:
    """Return the cells of a layer's costs."""
    return cost_cells(row["parameters"], *(row[name] or None for name in ("state", "flops_per_token")))


def estimate(row: Row, column: str, digits: int = 4) -> str:
    """Return ``mean`` or ``mean ± half width``; an empty text without a figure."""
    mean, half = row[column], row[column + HALF]
    return "" if math.isnan(mean) else f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def beyond_training(row: Row) -> list[str]:
    """Return the names of the extrapolation sets with figures."""
    ends = [str(column).rpartition(".") for column, value in row.items() if isinstance(value, float) and value == value]
    return [name for name, _, end in ends if end == "token_accuracy" and name not in ("validation", "test")]


def print_notes(found: pd.DataFrame, console: Console) -> None:
    """Print what ± means, if there are means over several seeds, and that the preset ``quick`` is small."""
    seeds = found["seeds"].map(len)
    if several := sorted(set(seeds[(seeds > 1) & found["validation.loss"].notna()])):
        counts = " to ".join(map(str, dict.fromkeys((several[0], several[-1]))))
        console.print(f"±: half the 95% t-interval of the mean over {counts} seeds, not clipped to [0, 1]")
    if (found["preset"] == "quick").any():
        console.print("quick: small settings, not the published protocol")


def printed_table(title: str | None, headings: Sequence[str], lines: Sequence[Line]) -> Table:
    """Make a table of labels and cells, with a line above each task."""
    table = Table(title=title, title_justify="left")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, cells in lines:
        if isinstance(label, Text):
            table.add_section()
        table.add_row(label if isinstance(label, Text) else Name(label), *cells)
    return table


def _of_points(found: pd.DataFrame, columns: Mapping[str, str]) -> Table:
    """Return a table with one row per grid point."""
    table = Table()
    for heading in ("", "lr", "wd", *columns):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.to_dict("records"):
        cells = [f"{row[name]:.1f}" if name == "steps_per_second" else estimate(row, name) for name in columns.values()]
        if row["diverged"]:
            cells = [f"{row['diverged']} of {len(row['seeds'])} diverged"]
        mark = "→" if row["chosen"] else ""
        table.add_row(mark, f"{row['lr']:g}", f"{row['weight_decay']:g}", *(cell.replace("nan", "") for cell in cells))
    return table


def _distinguishing(
    names: Sequence[Hashable], places: Sequence[Hashable], settings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return for each entry, as text, its settings in which entries of its name differ that share a place."""
    texts: dict[tuple[Hashable, Hashable], list[dict[str, str]]] = {}
    for name, place, setting in zip(names, places, settings, strict=True):
        texts.setdefault((name, place), []).append({key: json.dumps(value) for key, value in setting.items()})

    varying: dict[Hashable, dict[str, None]] = {name: {} for name in names}
    for (name, _), alike in texts.items():
        keys = dict.fromkeys(key for text in alike for key in text)
        varying[name] |= {key: None for key in keys if len({text.get(key) for text in alike}) > 1}
    return [
        ", ".join(f"{key.replace('_', '-')} {setting[key]}" for key in varying[name] if key in setting)
        for name, setting in zip(names, settings, strict=True)
    ]


def _place(name: str, registry: Mapping[str, Any]) -> tuple[int, str]:
    """Return the sort key of a name: its place in the registry; other names follow in alphabetical order."""
    return ([*registry].index(name) if name in registry else len(registry)), name
