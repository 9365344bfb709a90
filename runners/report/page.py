"""The page: the data that the templates show, and the writing of the file."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from runners.drawing import DARK, Style
from runners.files import write_atomically
from runners.report.cells import METRICS, YOURS, Board, Cell, limits
from runners.report.correlation import LEAST, SIGNIFICANT
from runners.report.glance import Own, glance
from runners.report.language import (
    LOSSES,
    MEAN_RANK,
    Correlations,
    LanguageModel,
    correlations,
    scores_of,
    what_goes_with_the_loss,
    what_orders_families,
)
from runners.report.paper import Claim, Verdict
from runners.report.pictures import CIRCLES, DASHES, Picture
from runners.report.pictures.language import forest_picture, language_picture
from runners.report.ranks import Ranks, mean_ranks, rank_on_task
from runners.report.speed import Anchor, Table
from runners.tables import abbreviated
from tasks import TASKS

EDGES = {"smallest": "the smallest", "largest": "the largest"}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A board with its ranks and pictures.

    Attributes:
        board: the board.
        rows: labels of the rows that have cells, the best mean rank first, then those with the most tasks.
        untrained: labels of the other rows.
        ranks: mean ranks by metric; None if fewer than two layers have all tasks.
        counts: number of tasks on which each row is ranked.
        of_tasks: rank of each row on each task, by metric and task.
        limits: ceiling and chance of each task; None if no cell holds them.
        pictures: the pictures.
    """

    board: Board
    rows: Sequence[str]
    untrained: Sequence[str]
    ranks: Mapping[str, Ranks | None]
    counts: Mapping[str, int]
    of_tasks: Mapping[str, Mapping[str, Mapping[str, int]]]
    limits: Mapping[str, Any]
    pictures: Sequence[Picture]

    @property
    def own_counts(self) -> dict[str, int]:
        """Number of tasks on which each row of the user's own is ranked."""
        return {row: self.counts.get(row, 0) for row in self.rows if self.board.rows[row][0] == "own"}

    @property
    def own(self) -> Own:
        """The rows of the user's own, with their places."""
        cells = {place for place, cell in self.board.cells.items() if cell.is_ranked}
        tasks = {row: [task for task in TASKS if (row, task) in cells] for row in self.own_counts}
        some = [row for row, count in self.own_counts.items() if 0 < count < len(TASKS)]
        return Own(
            title=self.board.title,
            ranks=self.ranks["token"],
            counts=self.own_counts,
            of_some={row: mean_ranks(self.board, "token", tasks[row]) for row in some},
        )

    @property
    def families(self) -> list[str]:
        """Families of the rows that have cells."""
        return sorted({self.board.rows[row][1] for row in self.rows})


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """How well the scores of a board predict the losses of language models.

    Attributes:
        correlations: correlations by metric.
        in_words: which scores go with the validation loss, by metric.
        pictures: the pictures.
    """

    correlations: Mapping[str, Sequence[Correlations]]
    in_words: Mapping[str, str]
    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class Language:
    """The language models, and how well scores predict their losses.

    Attributes:
        models: the language models.
        text: what they read, in words.
        answer: result of the primary analysis in words.
        boards: exploratory predictions by name of a board.
        pictures: loss curves and gradients of the language models.
        against: loss curves and gradients of RT against the Transformer.
        runs: headings and rows of all runs of RT against the Transformer.
    """

    models: Sequence[LanguageModel]
    text: str
    answer: str
    boards: Mapping[str, Predictions]
    pictures: Sequence[Picture]
    against: Sequence[Picture]
    runs: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the page shows.

    Attributes:
        boards: boards; the page opens with the one that has most results of the user's own, or else with the first.
        language: the language models.
        claims: claims of the paper.
        anchors: our speeds and the speeds of the authors' code.
        tables: records of benchmarks.
        results: folder of the claims' records.
        command: command that makes the page.
    """

    boards: Sequence[Shown]
    language: Language
    claims: Sequence[Claim]
    anchors: Sequence[Anchor]
    tables: Sequence[Table]
    results: Path
    command: str


def predict(board: Board, models: Sequence[LanguageModel]) -> Predictions:
    """Compute what the page shows about a board's scores and the language models."""
    found = {metric: correlations(board, models, metric) for metric in METRICS}
    return Predictions(
        correlations=found,
        in_words={metric: what_goes_with_the_loss(rows) for metric, rows in found.items()},
        pictures=[
            forest_picture(found),
            *(language_picture(board, models, found, loss) for loss in ("total", "recall")),
        ],
    )


def show(board: Board, pictures: Sequence[Picture]) -> Shown:
    """Compute what the page shows about a board."""
    ranks = {metric: mean_ranks(board, metric) for metric in METRICS}
    known = [row for row in board.rows if any(row == other for other, _ in board.cells)]
    means = ranks["token"].means if ranks["token"] else {}
    count = Counter(row for row, _ in board.cells)
    order = sorted(known, key=lambda row: (means.get(row, float("inf")), -count[row]))

    ranked = [cell for cell in board.cells.values() if cell.is_ranked]
    of_tasks = {
        metric: {task: rank_on_task([cell for cell in ranked if cell.task == task], metric) for task in TASKS}
        for metric in METRICS
    }
    return Shown(
        board=board,
        rows=order,
        untrained=[row for row in board.rows if row not in known],
        ranks=ranks,
        counts=Counter(cell.row for cell in ranked),
        of_tasks=of_tasks,
        limits={task: limits(board, task) for task in TASKS},
        pictures=pictures,
    )


def write_page(page: Page, path: Path) -> None:
    """Write the page to a file."""
    environment = Environment(
        loader=PackageLoader("runners.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": abbreviated, "digits": digits, "share": share, "plain": plain}
    environment.globals |= {"link": lambda target: _link(Path(target), path), "circle": circle, "costs_of": costs_of}

    first, language = page.boards[0], page.language
    verdicts = Counter(claim.verdict for claim in page.claims)
    predictions = language.boards.get(first.board.name)
    within = what_orders_families(predictions.correlations["token"]) if predictions else ""
    text = environment.get_template("index.html").render(
        boards=page.boards,
        answers=glance(
            [shown.own for shown in page.boards],
            first.ranks["token"],
            language.models,
            f"{language.answer} {within}".strip(),
            page.anchors,
        ),
        start=max(page.boards, key=lambda shown: (sum(shown.own_counts.values()), len(shown.own_counts))).board.name,
        tasks=list(TASKS),
        metrics=METRICS,
        language=language,
        mean_ranks={layer: -score for layer, score in scores_of(first.board, MEAN_RANK, "token").items()},
        losses={name: title for name, (_, title) in LOSSES.items()},
        least=LEAST,
        significant=SIGNIFICANT,
        claims=page.claims,
        verdicts={verdict: verdicts[verdict] for verdict in get_args(Verdict)},
        anchors=page.anchors,
        tables=page.tables,
        results=page.results,
        command=page.command,
        colors=DARK,
        edges=EDGES,
        dashes=DASHES,
    )
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def digits(value: float) -> str:
    """Return an accuracy with three digits, or with four if three would round it up to 1."""
    text = f"{value:.3f}"
    return text if text != "1.000" or value == 1 else f"{math.floor(value * 1e4) / 1e4:.4f}"


def plain(row: str) -> str:
    """Return the label of a row without the words that a badge beside it repeats."""
    return row.removesuffix(YOURS)


def share(cell: Cell, metric: str) -> float | None:
    """Return an accuracy rescaled so that chance is 0 and the ceiling is 1; None if there is no accuracy."""
    estimate = cell.standing.accuracy(metric)
    if estimate is None:
        return None
    low, high = (getattr(limit, metric) for limit in (cell.standing.chance, cell.standing.ceiling))
    return round(min(1.0, max(0.0, (estimate.mean - low) / (high - low))), 3)


def costs_of(shown: Shown, row: str) -> dict[str, Any]:
    """Return the costs of a row for the table: parameters, states, and whether the state grows."""
    costs = next(cell.standing.costs for (name, _), cell in shown.board.cells.items() if name == row)
    states = list((costs.state_floats or {}).values())
    return {
        "parameters": costs.parameters,
        "states": states,
        "grows": len(set(states)) > 1,
        "flops": next(iter((costs.flops_per_token or {}).values()), None),
    }


def circle(style: Style) -> str:
    """Return the character of a style's mark."""
    return CIRCLES[style.marker]


def _link(target: Path, page: Path) -> str:
    """Return a link from the page to a file or folder."""
    return Path(os.path.relpath(target, page.parent)).as_posix()
