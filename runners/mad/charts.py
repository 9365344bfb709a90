"""The charts of a comparison: dots with intervals, and curves of training; and its table as a file."""

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mixers.costs import LENGTHS
from runners.files import write_atomically
from runners.mad.points import HIGH, LOW, estimate_of
from runners.mad.tables import KINDS, STAR, beyond_training
from runners.style import PLAIN_TEXT, styles, write_chart

LONGEST_LINE = 40
"""Largest number of characters in a line of a name."""
MOST_COLUMNS = 5
"""Largest number of panels beside each other."""
TRAINED = ("family", "mixer", "width", "mlp_width", "layers", "lr", "weight_decay")
"""Columns of the table that say what was trained."""
NUMBERS = 1.04
"""Place of the numbers, to the right of all dots."""


def plot_comparison(found: pd.DataFrame, table: pd.DataFrame, file: Path) -> None:
    """Draw test accuracies by task and layer, with ceiling and chance, and curves; write the table that they are from.

    Args:
        found: one's own studies beside reference rows, from ``runners.mad.ranking.beside``.
        table: records of one's own studies.
        file: PNG file; a PDF and a CSV file are written beside it, and the curves with ``curves-`` before its name.
    """
    write_chart(draw_dots(found), file)
    if (curves := draw_curves(found[found["own"]], table)) is not None:
        write_chart(curves, file.with_name(f"curves-{file.name}"))

    # The table: of each study the test split, then the extrapolation sets, whose limits are unknown.
    lines = []
    for row in found.to_dict("records"):
        limits = {f"{name}_{kind}": row[name][kind] for name in ("ceiling", "chance") for kind in KINDS}
        for split in ("test", *beyond_training(row)):
            columns = {
                f"{kind}_accuracy{end.replace('.', '_')}": row[f"{split}.{kind}_accuracy{end}"]
                for end in ("", LOW, HIGH)
                for kind in KINDS
            }
            lines.append(
                {
                    "task": row["task"],
                    "difficulty": row["difficulty"],
                    "split": split,
                    "layer": row["label"],
                    **{name: row[name] for name in TRAINED},
                    "options": json.dumps(row["mixer_config"]),
                    **columns,
                    "seeds": len(row["seeds"]),
                    "failure": "" if row["chosen"] else "diverged",
                    **(limits if split == "test" else dict.fromkeys(limits)),
                    **{name: row[name] for name in ("steps", "preset", "parameters")},
                    **{f"state_{length}": (row["state"] or {}).get(str(length)) for length in LENGTHS},
                    f"flops_per_token_{LENGTHS[0]}": (row["flops_per_token"] or {}).get(str(LENGTHS[0])),
                }
            )
    shown = pd.DataFrame(lines)
    write_atomically(file.with_suffix(".csv"), lambda temporary: shown.to_csv(temporary, index=False))


@PLAIN_TEXT
def draw_dots(found: pd.DataFrame) -> Figure:
    """Draw one panel per setting, with one row per layer, the best on top: accuracy by tokens, and hollow by sequences.

    Lines are 95% intervals. Names of one's own layers are bold, with an arrow, if there are others.

    Args:
        found: chosen points with ``label`` and ``setting``, and ``own`` where there are reference rows.
    """
    marks = found["own"] if "own" in found and not found["own"].all() else pd.Series(False, found.index)
    own, settings = {*found["label"][marks]}, [*found["setting"].unique()]
    reached = found.groupby("label")["test.token_accuracy"].agg(["count", "mean"])
    labels = [*reached.sort_values(["count", "mean"], na_position="first", kind="stable").index]
    look = styles(labels)
    names = [_broken(f"→ {label}" if label in own else label) for label in labels]

    # Panels beside each other, with space for names of several lines.
    columns = min(len(settings), MOST_COLUMNS)
    lines, height = -(-len(settings) // columns), 0.17 * sum(name.count("\n") + 1.2 for name in names) + 0.7
    figure = Figure(figsize=(3.2 + max(2.3 * columns, 4.2), lines * height + 0.9), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(settings) :]:
        axes.set_axis_off()
    for axes, setting in zip(panels, settings, strict=False):
        rows = found[found["setting"] == setting].to_dict("records")
        for row in rows:
            y, style = labels.index(row["label"]), look[row["label"]]
            token = estimate_of(row, "test.token_accuracy")
            for kind, size in zip(KINDS, (4, 6), strict=True):
                of = estimate_of(row, f"test.{kind}_accuracy")
                face = style.color if kind == "token" else "white"
                axes.plot(of.mean, y, style.marker, color=style.color, markerfacecolor=face, markersize=size)
                axes.hlines(y, of.low, of.high, color=style.color, linewidth=1.4 if kind == "token" else 0.7)
            text = f"{token.mean:.2f}" if not math.isnan(token.mean) else "" if row["chosen"] else "diverged"
            place = {"va": "center", "fontsize": 7, "color": style.color}
            text += "*" * (row["edge"] == "largest")
            axes.text(NUMBERS, y, text, fontweight="bold" if row["label"] in own else "normal", **place)
        for name, line in (("ceiling", "solid"), ("chance", "dotted")):
            axes.axvline(rows[0][name]["token"], color="black", linewidth=0.8, linestyle=line, zorder=0)
        axes.set_title(_broken(setting), fontsize=9)
        axes.grid(axis="y", alpha=0.25)

    panels[0].set(xlim=(-0.03, 1.22), ylim=(-0.7, len(labels) - 0.3), xticks=(0, 0.5, 1))
    panels[0].set_yticks(range(len(labels)), names)
    for axes in panels[::columns]:
        axes.tick_params(axis="y", labelsize=8)
        for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
            tick.set_fontweight("bold" if label in own else "normal")
    meaning = "\nlarge: tokens, hollow: sequences; lines: 95% intervals; dotted: chance by tokens, solid: ceiling"
    star = "\n" + STAR.removeprefix("; ") if (found["edge"] == "largest").any() else ""
    steps, seeds = sorted({*found["steps"]}), sorted({*found["seeds"].map(len)})
    length, count = (" to ".join(f"{n:,}" for n in dict.fromkeys((of[0], of[-1]))) for of in (steps, seeds))
    title = f"test accuracy after {length} steps, {count} seed{'s' * (seeds[-1] > 1)}"
    figure.suptitle(title + meaning + star, fontsize=9)
    return figure


@PLAIN_TEXT
def draw_curves(found: pd.DataFrame, table: pd.DataFrame) -> Figure | None:
    """Draw loss and token accuracy on validation over training, a line for each seed; None without curves.

    Args:
        found: chosen points of one's own studies, with ``label`` and ``setting``.
        table: the records of their runs.
    """
    runs = found[["study", "lr", "weight_decay", "label", "setting"]].merge(table, on=["study", "lr", "weight_decay"])
    runs = runs[[len(curve.get("loss", ())) > 0 for curve in runs["curve"]]]
    if runs.empty:
        return None
    settings, look = [*runs["setting"].unique()], styles([*found["label"].unique()])
    figure = Figure(figsize=(9, 2.6 * len(settings) + 0.8), layout="constrained")
    panels = figure.subplots(len(settings), 2, sharex="row", squeeze=False)
    for (losses, accuracies), setting in zip(panels, settings, strict=True):
        for run in runs[runs["setting"] == setting].to_dict("records"):
            curve, style = run["curve"], look[run["label"]]
            looks = {"color": style.color, "linestyle": style.line}
            figures = {name: np.array(curve[name], float) for name in ("step", "loss", "train_loss", "token_accuracy")}
            losses.plot(figures["step"], figures["train_loss"], **looks, linewidth=0.5, alpha=0.5)
            losses.plot(figures["step"], figures["loss"], **looks, linewidth=1.2)
            accuracies.plot(figures["step"], figures["token_accuracy"], **looks, linewidth=1.2)
        losses.set_title(f"{_broken(setting)}: loss; thin: in training", fontsize=9)
        accuracies.set_title("token accuracy on validation", fontsize=9)
        accuracies.set_ylim(-0.02, 1.02)
        losses.set_ylim(bottom=0)
        for axes in (losses, accuracies):
            axes.grid(alpha=0.25)
            axes.set_xlabel("steps", fontsize=8)
    drawn: dict[str, Any] = {_broken(label): {"color": of.color, "linestyle": of.line} for label, of in look.items()}
    handles = [Line2D([], [], label=label, **looks) for label, looks in drawn.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3), fontsize=8)
    return figure


def _broken(name: str) -> str:
    """Break a long name into lines."""
    lines = [name] if len(name) <= LONGEST_LINE else name.replace(":", ":\n").splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, LONGEST_LINE, break_on_hyphens=False))
