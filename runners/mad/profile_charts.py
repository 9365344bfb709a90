"""The pictures of profiles: scores of all layers, their ladders, and scores against what they cost.

A layer has the colour and the mark of ``runners.style`` in all of them.
"""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from runners.style import FAMILIES, OWN, PLAIN_TEXT, RT, label_ends, style_of, styles
from runners.task_names import ABILITIES, find_task

WIDTH = 14.0
"""Width of a figure in inches: 1,400 pixels at 100 dots an inch."""
COLUMN = 0.86
"""Share of a column that a score of 1 fills."""
PROFILE = "profile score"


@PLAIN_TEXT
def draw_profiles(found: pd.DataFrame, standing: pd.DataFrame, own: Collection[str] = ()) -> Figure:
    """Draw a row for each layer, tier by tier: its profile score and the score of each ability, with intervals.

    Args:
        found: abilities of the layers, from ``runners.mad.profile.abilities``.
        standing: the layers in their order, from ``runners.mad.profile.standings``.
        own: layers whose names have an arrow.
    """
    tasks, names = [*found["task"].unique()], [*standing.index]
    headings = [PROFILE, *tasks] if len(tasks) > 1 else tasks
    whole = standing.reset_index().rename(columns={"mean": "score", "low": "score.low", "high": "score.high"})
    cells = pd.concat([whole.assign(task=PROFILE), found]).set_index(["layer", "task"]).sort_index()
    figure = Figure(figsize=(min(WIDTH, 4 + 0.6 * len(headings)), 2.4 + 0.21 * len(names)), layout="constrained")
    axes, x = figure.subplots(), np.arange(len(headings))

    # Tiers as bands, and columns between lines.
    top = -0.5
    for n, (tier, members) in enumerate(standing.groupby("tier", sort=False, dropna=False)):
        axes.axhspan(top, top + len(members), color="black", alpha=0.07 * (n % 2 == 0), linewidth=0)
        text = f"tier {tier:g}".replace("tier nan", "not ranked") if len(names) > 1 else ""
        axes.text(len(headings) + 0.05, top + len(members) / 2, text, va="center", fontsize=8)
        top += len(members)
    axes.vlines([*x, *(x + COLUMN)], -0.5, top, colors="grey", linewidth=0.5)

    for y, name in enumerate(names):
        style, row = style_of(name), cells.loc[name].reindex(headings)
        score, low, high = (COLUMN * row["score" + end].to_numpy(float) for end in ("", ".low", ".high"))
        axes.barh([y] * len(x), score, 0.72, left=x, color=style.color, alpha=0.35)
        error = [score - low, high - score]
        axes.errorbar(x + score, [y] * len(x), xerr=error, fmt=style.marker, color=style.color, markersize=3.5)
        for column in np.flatnonzero(row["edge"].eq(True)):
            beside = high[column] + 0.04 if high[column] < 0.8 * COLUMN else max(0.01, low[column] - 0.1)
            axes.text(column + beside, y, "*", va="center", fontsize=8)

    texts = (f"{'→ ' * (name in own)}{name}  {mean:.2f}" for name, mean in standing["mean"].items())
    axes.set_yticks(range(len(names)), [text.replace("  nan", "") for text in texts], fontsize=8)
    shown = [ABILITIES.get(heading, heading) for heading in headings]
    axes.set_xticks(x + COLUMN / 2, shown, rotation=30, ha="left", rotation_mode="anchor", fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set(xlim=(-0.1, len(headings)), ylim=(top, -0.5))
    axes.spines[:].set_visible(False)
    title = "scores from chance (left) to the ceiling (right); marks: means over rungs; lines: 95% intervals over seeds"
    return _finished(figure, names, f"{title}; *: chosen rate is the grid's largest")


@PLAIN_TEXT
def draw_ladders(found: pd.DataFrame, front: Sequence[str]) -> Figure:
    """Draw a panel for each ability: the score of each rung, a thin line for each layer.

    Args:
        found: abilities of the layers, from ``runners.mad.profile.abilities``.
        front: layers that are drawn in front, with their names. So is the best other layer of each ability.
    """
    panels, look = found.groupby("task", sort=False), styles([*found["layer"].unique()])
    columns, rows = min(4, panels.ngroups), math.ceil(panels.ngroups / 4)
    figure = Figure(figsize=(1 + (WIDTH - 1) / 4 * columns, 0.8 + 2.6 * rows), layout="constrained")
    for n, (task, of_task) in enumerate(panels, 1):
        axes, ladder, ends = figure.add_subplot(rows, columns, n), find_task(str(task)).ladder, []
        shown = {*front, *of_task[~of_task["layer"].isin(front)].nlargest(1, "score")["layer"]}
        for row in of_task.to_dict("records"):
            style, named, at = look[row["layer"]], row["layer"] in shown, range(len(row["rungs"]))
            axes.plot(
                *(at, row["rungs"]),
                color=style.color,
                linestyle=style.line,
                marker=style.marker if named else "",
                markersize=4.5,
                linewidth=1.8 if named else 0.7,
                alpha=1 if named else 0.5,
                zorder=2 + named + (row["layer"] in front),
            )
            if named and not math.isnan(row["score"]):
                ends.append((row["layer"].rpartition(":")[2], at[-1], row["rungs"][-1], style.color))
        axes.set_xticks(range(len(ladder.rungs)), [f"{value:g}" for value in ladder.rungs], fontsize=7)
        axes.set(ylim=(-0.04, 1.04), xlabel=ladder.axis, title=ABILITIES.get(task, task))
        axes.grid(alpha=0.3)
        label_ends(axes, ends, size=7)
    return _finished(figure, look, "score of each rung from chance (0) to the ceiling (1), means over seeds")


def draw_against(found: pd.DataFrame, label: str, ladders: Mapping[str, Sequence[float]]) -> Figure:
    """Draw scores or capacities with their intervals against a cost on a logarithmic axis, with the layers' names.

    Args:
        found: marks with the columns ``panel``, ``layer``, ``x``, ``y``, ``low`` and ``high``. A line joins the marks
            of a layer in a panel.
        label: name of the cost.
        ladders: rungs of the panels of capacities, whose vertical axis is logarithmic. A mark is hollow at the last
            rung, and below the first.
    """
    panels, names = found.groupby("panel", sort=False), [*found["layer"].unique()]
    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    for n, (panel, of_panel) in enumerate(panels, 1):
        axes, ends, rungs = figure.add_subplot(1, panels.ngroups, n), [], ladders.get(str(panel), [])
        axes.set(xscale="log", xlabel=label, ylabel=panel)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if found["x"].max() > 10 * found["x"].min() else (1, 2, 3)))
        axes.xaxis.set_major_formatter("{x:,g}")
        first, last = (rungs[0] / 1.3, rungs[-1]) if rungs else (-math.inf, math.inf)
        if rungs:
            axes.set(yscale="log", ylim=(first / 1.15, 1.1 * last), yticks=rungs, yticklabels=rungs)
        axes.minorticks_off()
        for name, line in of_panel.groupby("layer", sort=False):
            style, x = style_of(str(name)), line["x"].to_numpy()
            y, low, high = (line[column].clip(lower=first).to_numpy() for column in ("y", "low", "high"))
            mark: dict[str, Any] = {
                "color": style.color,
                "marker": style.marker,
                "linestyle": style.line,
                "linewidth": 1.2,
            }
            axes.errorbar(x, y, [y - low, high - y], elinewidth=0.8, **mark)
            hollow = (y <= first) | (y >= 0.999 * last)
            axes.plot(x[hollow], y[hollow], **mark | {"linestyle": ""}, markerfacecolor="white", zorder=4)
            ends.append((str(name), x[-1], y[-1], style.color))
        axes.grid(alpha=0.3)
        label_ends(axes, ends)
    return _finished(
        figure, names, "means and 95% intervals over seeds" + "; hollow: beyond the ladder" * bool(ladders)
    )


def _finished(figure: Figure, names: Iterable[str], title: str) -> Figure:
    """Add the title, and name the colours below the panels."""
    used, colors = {style_of(name).color for name in names}, {"RT": RT, **FAMILIES, "other layers": OWN}
    handles = [Patch(color=color, label=family) for family, color in colors.items() if color in used]
    width = figure.get_figwidth()
    figure.legend(handles=handles, loc="outside lower center", ncols=int(width / 1.4), fontsize=8, frameon=False)
    figure.suptitle(textwrap.fill(title, int(13 * width)), fontsize=9)
    return figure
