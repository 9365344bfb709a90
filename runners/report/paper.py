"""The claims of the paper, and what our records show for each claim.

``data/claims.toml`` holds the claims. Its texts are Jinja templates that read records through the methods of
``Evidence``, so that the texts change with the records.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from jinja2 import Environment, StrictUndefined

from runners.files import read_json
from runners.mad.reference.overview import BLOCKS, DEPTHS, NOT_RUN, effective_depth, solves_some
from runners.mad.results.ranking import interval
from runners.mad.results.standings import Standing
from runners.report.cells import Board
from runners.report.language import LanguageModel
from runners.report.records import ABSENT, Records
from runners.report.transition import Models, Transition
from runners.tables import abbreviated
from tasks import TASKS

CLAIMS = Path(__file__).parent / "data" / "claims.toml"
EARLY = "2026-11-21-synthetic-figure"
"""Folder of the searches over the paper's grid."""
C4 = "2026-11-21-pretraining-30m/results.json"
FILES = {
    "c4": C4,
    "theory": "2026-11-21-theory/theory.json",
    "fourth": "2026-11-21-bench-fourth-round/pretraining-nvidia-h200.json",
    "training": "2026-11-22-bench-normed-rows/pretraining-nvidia-h200.json",
    "lengths": "2026-11-21-bench-pretraining-third-round/lengths-nvidia-h200.json",
}
"""Files of records, by their names in the claims."""
SYNTHETIC = (
    *("in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall", "selective-copying"),
    *("compression", "memorization", "copying"),
)
"""Tasks of the paper's synthetic figures."""
RECURRENT = ("parity", "s5-permutations")
"""Tasks whose answers need a state that is carried from token to token."""
SOLVED = 0.99
"""Share of the ceiling from which a task counts as solved."""
NOT_TRAINED = "not trained"
Verdict = Literal["agrees", "partly", "differs", "not shown"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the paper, and our results.

    Attributes:
        where: table, figure, theorem or section of the paper.
        claim: statement of the paper.
        verdict: whether our records agree.
        why: our results in words, or why there are none.
        table: headings and rows; empty for a claim without figures.
        command: command that makes our results.
        takes: how long the command takes.
        records: files of our results, below the folder of results.
    """

    where: str
    claim: str
    verdict: Verdict
    why: str
    table: Sequence[Sequence[str]]
    command: str
    takes: str
    records: Sequence[str]


class Evidence:
    """The functions with which the templates of the claims read results.

    Args:
        board: the board of the published protocol.
        records: published records.
        models: language models of RT and the Transformer that are not stale.
        small: small language models of all layers.
    """

    def __init__(self, board: Board, records: Records, models: Models, small: Sequence[LanguageModel]) -> None:
        self.board, self.records, self.transition, self.small = board, records, Transition(models), small

    def names(self) -> dict[str, Any]:
        """Return the functions and records of the templates by name."""
        methods = (
            *("acc", "both", "early", "order", "ahead", "synthetic", "recurrence", "depth", "worth"),
            *("blocks", "seconds", "parameters", "small_models"),
        )
        return {
            **{name: getattr(self, name) for name in methods},
            **FILES,
            "r": self.records,
            "transition": self.transition,
            "took": self.took,
            "mib": lambda size: ABSENT if size is None else f"{size / 2**20:.0f}",
            "tasks": list(TASKS),
            "synthetic_tasks": SYNTHETIC,
            "depths": list(DEPTHS),
            "decode_length": 512,
        }

    def standing(self, row: str, task: str) -> Standing | None:
        """Return a cell's figures; None if it is not trained."""
        cell = self.board.cells.get((row, task))
        return None if cell is None else cell.standing

    def acc(self, row: str, task: str, metric: str) -> str:
        """Return an accuracy with its interval."""
        standing = self.standing(row, task)
        if standing is None:
            return NOT_TRAINED
        estimate = standing.accuracy(metric)
        return standing.failure if estimate is None else estimate.text()

    def both(self, row: str, task: str) -> str:
        """Return both accuracies of a cell."""
        if self.standing(row, task) is None:
            return NOT_TRAINED
        return f"{self.acc(row, task, 'sequence')}; {self.acc(row, task, 'token')}"

    def early(self, mixer: str, task: str, metric: str) -> str:
        """Return an accuracy of the searches over the paper's grid."""
        found = self._early(mixer, task, metric)
        return NOT_TRAINED if found is None else f"{found['mean']:.4f} ± {found['half_width'] or 0:.4f}"

    def _early(self, mixer: str, task: str, metric: str) -> Mapping[str, float] | None:
        record = read_json(self.records.folder / EARLY / f"{mixer}-{task}.json")
        return record and record["points"][record["chosen"]]["estimates"][f"test_{metric}_accuracy"]

    def _interval(self, mixer: str, task: str, metric: str) -> tuple[float, float] | None:
        """Return the interval of a layer's accuracy over the wide grid, or over the paper's grid if that is missing."""
        if (standing := self.standing(mixer, task)) is not None:
            estimate = standing.accuracy(metric)
            if estimate is None:
                return interval(standing)
            return estimate.mean - (estimate.half_width or 0), estimate.mean + (estimate.half_width or 0)
        found = self._early(mixer, task, metric)
        if found is None:
            return None
        return found["mean"] - found["half_width"], found["mean"] + found["half_width"]

    def order(self, task: str, metric: str) -> str:
        """Return which layer is ahead, unless the intervals overlap."""
        rt, transformer = (self._interval(mixer, task, metric) for mixer in ("rt", "transformer"))
        if rt is None or transformer is None:
            return NOT_TRAINED
        if rt[0] > transformer[1]:
            return "RT ahead"
        return "Transformer ahead" if transformer[0] > rt[1] else "within the intervals"

    def ahead(self, task: str, metric: str) -> Verdict:
        """Return whether RT is ahead of the Transformer on a task."""
        order = self.order(task, metric)
        return "not shown" if order == NOT_TRAINED else "agrees" if order == "RT ahead" else "differs"

    def synthetic(self, metric: str, neither: str | None = None) -> Verdict:
        """Return whether RT is ahead on all synthetic tasks except ``neither``, on which no layer should be ahead."""
        orders = {task: self.order(task, metric) for task in SYNTHETIC}
        held = [order == ("RT ahead" if task != neither else "within the intervals") for task, order in orders.items()]
        if all(held):
            return "agrees"
        if all(order == NOT_TRAINED for order in orders.values()):
            return "not shown"
        return "partly" if any(held) else "differs"

    def recurrence(self) -> Verdict:
        """Return whether RT is ahead on the tasks that need a recurrence from token to token: on all, or on some."""
        verdicts = {self.ahead(task, "sequence") for task in RECURRENT}
        return "partly" if "agrees" in verdicts and len(verdicts) > 1 else self.ahead(RECURRENT[0], "sequence")

    def worth(self, task: str) -> str:
        """Return how many Transformer layers one RT layer is worth on a task."""
        depth = effective_depth({place: cell.standing for place, cell in self.board.cells.items()}, task)
        return NOT_TRAINED if depth == NOT_RUN else depth

    def depth(self) -> Verdict:
        """Return whether RT has the higher token accuracy on the tasks that one Transformer layer does not solve.

        Tasks of which neither answers a sequence do not count.
        """
        pairs = {task: (self.standing("rt", task), self.standing("transformer", task)) for task in TASKS}
        open_tasks = [
            task
            for task, (rt, other) in pairs.items()
            if rt is not None and other is not None and interval(other)[1] < SOLVED * other.ceiling.token
            if solves_some(rt) or solves_some(other)
        ]
        ahead = [self.order(task, "token") == "RT ahead" for task in open_tasks]
        if not ahead:
            return "not shown"
        return "agrees" if all(ahead) else "partly" if any(ahead) else "differs"

    def blocks(self) -> Verdict:
        """Return whether accuracies of longer blocks exist; the paper does not say whether they should be lower."""
        rows = [row for length, row in BLOCKS.items() if length > 1]
        return "partly" if any(self.standing(row, task) for row in rows for task in TASKS) else "not shown"

    def seconds(self, rows: Sequence[str], tasks: Sequence[str]) -> str:
        """Return how long the training of some cells took; cells that are not trained are counted."""
        found = [self.board.cells[row, task] for row in rows for task in tasks if (row, task) in self.board.cells]
        if not found:
            return "not known: none of its cells is trained"
        total = sum(cell.content.seconds for cell in found)
        time = f"{total / 60:.0f} minutes" if total > 120 else f"{total:.0f} seconds"
        missing = len(rows) * len(tasks) - len(found)
        devices = sorted({cell.content.device for cell in found})
        rest = f", {missing} cells not trained" if missing else ""
        return f"{time} of training on one {' or '.join(devices)} for {len(found)} cells{rest}"

    def parameters(self, row: str) -> str:
        """Return the number of parameters of a layer."""
        found = (cell for (name, _), cell in self.board.cells.items() if name == row)
        cell = next(found, None)
        return NOT_TRAINED if cell is None else abbreviated(cell.standing.costs.parameters)

    def small_models(self) -> str:
        """Return the losses of RT and the Transformer as small language models; nothing before both are finished."""
        losses = {model.layer: model.loss("total") for model in self.small if model.counts and model.lr is not None}
        if not losses.keys() >= {"rt", "transformer"}:
            return ""
        return (
            f"As small language models, trained for longer ({self.small[0].setting}), RT has {losses['rt']:.3f} and "
            f"the Transformer {losses['transformer']:.3f} nats per token. "
        )

    def took(self, file: str) -> str:
        """Return how long a benchmark took."""
        content = dict(self.records.benchmarks()).get(file)
        if content is None:
            return ABSENT
        return f"{content['elapsed_seconds'] / 60:.0f} minutes on one {content['device']}"


def read_claims(board: Board, records: Records, models: Models, small: Sequence[LanguageModel]) -> list[Claim]:
    """Return the claims with our results.

    Args:
        board: the board of the published protocol.
        records: published records.
        models: language models of RT and the Transformer that are not stale.
        small: small language models of all layers.

    Raises:
        ValueError: the verdict of a claim is not one of ``Verdict``.
    """
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    names = Evidence(board, records, models, small).names()
    render = partial(_render, environment, names)
    return [_claim(found, render) for found in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]]


def _render(environment: Environment, names: Mapping[str, Any], text: str) -> str:
    return environment.from_string(text).render(names)


def _claim(found: Mapping[str, Any], render: partial[str]) -> Claim:
    verdict = render(found["verdict"])
    if verdict not in get_args(Verdict):
        raise ValueError(
            f"{CLAIMS.name}: {found['where']}: verdict {verdict!r} is none of {', '.join(get_args(Verdict))}"
        )
    lines = [line for line in render(found.get("table", "")).splitlines() if line.strip()]
    return Claim(
        where=found["where"],
        claim=found["claim"],
        verdict=cast(Verdict, verdict),
        why=render(found["why"]),
        table=[[cell.strip() for cell in line.split("|")] for line in lines],
        command=render(found["command"]),
        takes=render(found["takes"]),
        records=found.get("records", []),
    )
