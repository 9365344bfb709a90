"""The grid points of a study on the console, the cells of tables, and the names that tell studies apart."""

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from mixers import MIXERS
from runners.mad.points import chosen, estimate_of, points, shared_seeds
from runners.tables import Name
from tasks import TASKS

FEW = 4
"""Largest number of layers that are drawn as bars, and named in sentences."""
ABOVE = 4
"""Standard errors of the test split above which an accuracy is above the ceiling."""
KINDS = ("sequence", "token")
"""Accuracies of a table."""
VALIDATION = {
    "val token": "validation.token_accuracy",
    "val sequence": "validation.sequence_accuracy",
    "val loss": "validation.loss",
}
TEST = {"test token": "test.token_accuracy", "test sequence": "test.sequence_accuracy", "steps/s": "steps_per_second"}
"""Headings of a study's table, and the figures below them."""
STAR = "; *: the chosen learning rate is the largest of its grid, below the ceiling"
SETTINGS = ("width", "mlp_width", "steps", "batch_size", "evaluations", "precision")
"""Settings that a label names where the layers of a task differ in them, beside those of the optimizer and the grid."""

Row = Mapping[Hashable, Any]
"""A row of a table, by column."""


def print_study(table: pd.DataFrame, console: Console, verbose: bool) -> None:
    """Print the choice of a finished study, what it says of the grid, and accuracies beyond training.

    Args:
        table: records of one study.
        console: where to print.
        verbose: print all grid points, ceiling and chance, too; test figures and speed are in a second table.
    """
    found = points(table)
    (best,) = labelled(chosen(found)).to_dict("records")
    name, lrs = f"{best['label']} on {best['setting']}", sorted(set(table["lr"]))
    if verbose:
        console.print(best["study"], soft_wrap=True)
        console.print(*(_of_points(found, part) for part in (VALIDATION, TEST)))
        ceiling, chance = ([f"{best[limit][kind]:.3g}" for kind in KINDS] for limit in ("ceiling", "chance"))
        limits = f"ceiling {ceiling[0]} / {ceiling[1]}, chance {chance[0]} / {chance[1]}"
        console.print(f"sequence / token accuracy: {limits}; {intervals_of(found)}", soft_wrap=True)
    if not best["chosen"]:
        lower = " ".join(f"{lr / 10:g}" for lr in lrs)
        first = f"no point converged, the first run diverged at step {table['diverged_step'].min():.0f}"
        console.print(f"{name}: {first}: try --lr {lower}", soft_wrap=True)
        return

    # The choice; accuracies on other sets than that of the test.
    seeds = shared_seeds(found["seeds"][found["diverged"] == 0])
    which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    choice = f"lr {best['lr']:g}, weight decay {best['weight_decay']:g}"
    if len(found) > 1:
        choice += f", chosen by validation token accuracy of {which}" * bool(seeds)
    if (lost := int((found["diverged"] > 0).sum())) > 0:
        choice += f"; {lost} of {len(found)} points diverged"
    reached = estimate(best, "test.token_accuracy", 3) or "unknown"
    console.print(f"{name}: token accuracy {reached} at {choice}", soft_wrap=True)
    if beyond := [f"{part} {estimate(best, f'{part}.token_accuracy', 3)}" for part in beyond_training(best)]:
        console.print(f"token accuracy beyond training: {', '.join(beyond)}", soft_wrap=True)

    # What it says of the grid, and of the task.
    if best["edge"] is not None:
        further = [best["lr"] * factor for factor in ((0.2, 0.5) if best["edge"] == "smallest" else (2, 4))]
        more = " ".join(f"{lr:g}" for lr in sorted([*lrs, *further]))
        console.print(
            f"lr {best['lr']:g} is the {best['edge']} of the grid, so a better one may lie beyond it: "
            f"--lr {more} keeps what is finished and trains the new ones; places are those on the reference's rates",
            soft_wrap=True,
        )
    for kind in KINDS:
        highest = best["ceiling"][kind]
        error = math.sqrt(highest * (1 - highest) / best["task_config"]["eval_examples"])
        if best[f"test.{kind}_accuracy"] > highest + ABOVE * error + 1e-9:
            reason = "the task states it too low, or the layer sees the answers"
            console.print(f"the {kind} accuracy is above the ceiling: {reason}", soft_wrap=True)


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
        row["setting"] = setting_of(row["task"], row["difficulty"], word)

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
    return in_order(pd.DataFrame(rows))


def setting_of(task: str, difficulty: str, words: str = "") -> str:
    """Return the task, with its difficulty unless it is the baseline, and with ``words`` on its other settings."""
    named = ", ".join(filter(None, (difficulty if difficulty != "baseline" else "", words)))
    return f"{task} ({named})" if named else task


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


def estimate(row: Row, column: str, digits: int = 4) -> str:
    """Return ``mean`` or ``mean (low–high)``; an empty text without a figure.

    A star says that the chosen learning rate is the largest of its grid, below the ceiling.
    """
    text = estimate_of(row, column).text(digits)
    return text + "*" * (row["edge"] == "largest" and text != "")


def beyond_training(row: Row) -> list[str]:
    """Return the names of the extrapolation sets with figures."""
    ends = [str(column).rpartition(".") for column, value in row.items() if isinstance(value, float) and value == value]
    return [name for name, _, end in ends if end == "token_accuracy" and name not in ("validation", "test")]


def intervals_of(found: pd.DataFrame) -> str:
    """Return what the accuracies of grid points are: of one seed, or means with intervals over several."""
    counts = sorted({len(seeds) for seeds in found["seeds"][found["validation.loss"].notna()]})
    if not counts or counts[-1] == 1:
        return "one seed"
    several = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    star = STAR * bool((found["edge"] == "largest").any())
    return f"mean (95% interval) over {several} seeds{star}"


def printed_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table without lines: names on the left, which may be broken, and figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="right" if i else "left", no_wrap=i > 0)
    for name, *cells in rows:
        table.add_row(Name(name), *cells)
    return table


def _of_points(found: pd.DataFrame, columns: Mapping[str, str]) -> Table:
    """Return a table with one row per grid point."""
    rows = []
    for row in found.to_dict("records"):
        cells = [
            f"{row[name]:.3g}" if name == "steps_per_second" else estimate(row, name, 3) for name in columns.values()
        ]
        if row["diverged"]:
            cells = [f"{row['diverged']} of {len(row['seeds'])} diverged", *[""] * (len(columns) - 1)]
        point = f"{'→' if row['chosen'] else ' '} {row['lr']:g}", f"{row['weight_decay']:g}"
        rows.append([*point, *(cell.replace("nan", "") for cell in cells)])
    return printed_table(["  lr", "wd", *columns], rows)


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
