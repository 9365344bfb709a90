"""The chart of a comparison: bars for a few layers, a heat map for many; and its table as a file."""

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mixers.costs import LENGTHS
from runners.files import write_atomically
from runners.mad.points import HIGH, LOW, estimate_of
from runners.mad.tables import FEW, KINDS, STAR, Row, beyond_training
from runners.style import PLAIN_TEXT, styles, write_chart

COLORS = colormaps["viridis"].with_extremes(bad="lightgrey")
LONGEST_LINE = 40
"""Largest number of characters in a line of a name."""
LONGEST_TICK = 20
"""Largest number of characters in a line of a setting below its bars."""
TRAINED = ("family", "mixer", "width", "mlp_width", "layers", "lr", "weight_decay")
"""Columns of the table that say what was trained."""
LIGHT, DARK = "#ffffff", "#111111"
"""Colours of the text on cells of a heat map."""
TOP, NUMBERS = 1.13, 1.035
"""Upper end of a panel of bars, and the height of the numbers: above all bars, whiskers and lines."""


def plot_comparison(found: pd.DataFrame, file: Path) -> None:
    """Draw test accuracies by task and layer, with ceiling and chance, and write the table that they are from.

    Args:
        found: one's own studies beside reference rows, from ``runners.mad.ranking.beside``.
        file: PNG file; a PDF and a CSV file are written beside it.
    """
    write_chart(draw_heat_map(found) if found["label"].nunique() > FEW else draw_bars(found), file)

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
            line = {
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
            lines.append(line)
    table = pd.DataFrame(lines)
    write_atomically(file.with_suffix(".csv"), lambda temporary: table.to_csv(temporary, index=False))


@PLAIN_TEXT
def draw_bars(found: pd.DataFrame) -> Figure:
    """Draw one panel per accuracy, with one group of bars per setting and the numbers in a row above the bars.

    Whiskers are 95% intervals.

    Args:
        found: chosen points with ``label`` and ``setting``.
    """
    settings, labels = [*found["setting"].unique()], [*found["label"].unique()]
    look, width = styles(labels), 0.8 / len(labels)
    figure = Figure(figsize=(max(6.0, 1.6 * len(settings) + 2), 7), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        for row in found.to_dict("records"):
            slot = labels.index(row["label"]) - (len(labels) - 1) / 2
            x = settings.index(row["setting"]) + slot * width
            of = estimate_of(row, f"test.{kind}_accuracy")
            if not math.isnan(of.mean):
                axes.bar(x, of.mean, 0.94 * width, color=look[row["label"]].color)
                axes.text(x, NUMBERS, f"{of.mean:.2f}{_star(row)}", ha="center", va="bottom", fontsize=8)
            if not math.isnan(of.low):
                axes.errorbar(x, of.mean, [[of.mean - of.low], [of.high - of.mean]], color="black", capsize=3)
            for name, line in (("ceiling", "solid"), ("chance", "dotted")):
                axes.hlines(row[name][kind], x - width / 2, x + width / 2, colors="black", linestyles=line)
        axes.set_ylim(0, TOP)
        axes.set_yticks(np.linspace(0, 1, 6))
        axes.set_ylabel(f"{kind} accuracy")

    ticks = [textwrap.fill(setting, LONGEST_TICK, break_on_hyphens=False) for setting in settings]
    panels[-1].set_xticks(range(len(settings)), ticks, fontsize=8)
    meaning = "\nbars and numbers: means; whiskers: 95% intervals" * _has_intervals(found)
    figure.suptitle(title(found) + meaning + _meaning_of_star(found), fontsize=10)

    # The legend below the panels, in as many columns as fit; its width is known only when it is part of the figure.
    handles: list[Any] = [Patch(color=look[label].color, label=_broken(label)) for label in labels]
    handles.append(Line2D([], [], color="black", label="ceiling"))
    handles.append(Line2D([], [], color="black", linestyle="dotted", label="chance"))
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        if legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return figure


@PLAIN_TEXT
def draw_heat_map(found: pd.DataFrame) -> Figure:
    """Draw one panel per accuracy, with one row per layer, grouped by family, and one column per setting.

    Names of one's own layers are bold, with an arrow, if there are others.

    Args:
        found: chosen points with ``label`` and ``setting``, and ``own`` where there are reference rows.
    """
    marks = found["own"] if "own" in found and not found["own"].all() else pd.Series(False, found.index)
    own = {*found["label"][marks]}

    # Rows of each block: ceiling, families, chance.
    families = {family: [*members["label"].unique()] for family, members in found.groupby("family", sort=False)}
    labels = ["ceiling", *dict.fromkeys(label for members in families.values() for label in members), "chance"]
    settings = [*found["setting"].unique()]
    sizes = np.array([1, *map(len, families.values()), 1])
    ends = sizes.cumsum() - 0.5

    # A figure with space for labels and for cells of several lines.
    names = [_broken(f"→ {label}" if label in own else label) for label in labels]
    several = _has_intervals(found)
    lines = max(name.count("\n") for name in names) + 1
    height = 2.8 + max(0.36 if several else 0.28, 0.16 * lines) * len(labels)
    figure = Figure(figsize=(4 + max(4, len(settings)), height), layout="constrained")
    figure.suptitle(title(found) + "\nmeans and 95% intervals" * several + _meaning_of_star(found), fontsize=11)

    panels = figure.subplots(1, 2, sharey=True)
    rows = {(row["label"], row["setting"]): row for row in found.to_dict("records")}
    for axes, kind in zip(panels, KINDS, strict=True):
        means = np.full((len(labels), len(settings)), np.nan)
        texts = np.full(means.shape, "–", dtype=object)
        for (label, setting), row in rows.items():
            column = settings.index(setting)
            means[[0, -1], column] = row["ceiling"][kind], row["chance"][kind]
            of = estimate_of(row, f"test.{kind}_accuracy")
            at = labels.index(label), column
            means[at] = of.mean
            if not row["chosen"]:
                texts[at] = "div."
            elif not math.isnan(of.mean):
                interval = "–".join(f"{end:.2f}".removeprefix("0") for end in (of.low, of.high))
                texts[at] = f"{of.mean:.2f}{_star(row)}" + f"\n{interval}" * (not math.isnan(of.low))
        texts[[0, -1]] = [[f"{limit:.2f}" for limit in limits] for limits in means[[0, -1]]]

        # Dark texts on light cells, and light ones on dark cells.
        image = axes.imshow(means, cmap=COLORS, vmin=0, vmax=1, aspect="auto")
        for at, mean in np.ndenumerate(means):
            red, green, blue, _ = COLORS(round(mean, 2)) if not math.isnan(mean) else (1, 1, 1, 1)
            ink = DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else LIGHT
            size = 7 if "\n" in texts[at] else 8
            axes.text(at[1], at[0], texts[at], ha="center", va="center", color=ink, fontsize=size)
        axes.hlines(ends[:-1], -0.5, len(settings) - 0.5, colors="white", linewidth=2)
        axes.set_title(f"{kind} accuracy", fontsize=10)
        ticks = [_broken(setting) for setting in settings]
        axes.set_xticks(range(len(ticks)), ticks, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
        axes.tick_params(length=0)

    # Layers on the left, families on the right.
    panels[0].set_yticks(range(len(labels)), names, fontsize=8)
    for tick, label in zip(panels[0].get_yticklabels(), labels, strict=True):
        tick.set_fontweight("bold" if label in own else "normal")
    side = panels[1].secondary_yaxis("right")
    side.set_yticks((ends - sizes / 2)[1:-1], [*families], fontsize=8)
    side.tick_params(length=0)

    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.35, aspect=45, pad=0.02)
    bar.set_label("accuracy", fontsize=9)
    bar.outline.set_visible(False)
    if len(rows) < (len(labels) - 2) * len(settings) or found["test.token_accuracy"].isna().any():
        figure.supxlabel("grey: div.: every grid point diverged; –: no test accuracy yet", fontsize=8)
    return figure


def title(found: pd.DataFrame) -> str:
    """Return the first line of a chart's title: figure, number of steps, and number of seeds."""
    steps, seeds = sorted({*found["steps"]}), sorted({*found["seeds"].map(len)})
    length, count = (" to ".join(f"{n:,}" for n in dict.fromkeys((of[0], of[-1]))) for of in (steps, seeds))
    return f"test accuracy after {length} steps, {count} seed{'s' * (seeds[-1] > 1)}"


def _has_intervals(found: pd.DataFrame) -> bool:
    return bool(found[f"test.token_accuracy{LOW}"].notna().any())


def _star(row: Row) -> str:
    return "*" * (row["edge"] == "largest")


def _meaning_of_star(found: pd.DataFrame) -> str:
    return "\n" + STAR.removeprefix("; ") if (found["edge"] == "largest").any() else ""


def _broken(name: str) -> str:
    """Break a long name into lines."""
    lines = [name] if len(name) <= LONGEST_LINE else name.replace(":", ":\n").splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, LONGEST_LINE, break_on_hyphens=False))
