"""RT against the Transformer as language models of 30M parameters: the paper's claims, ours, and whether they agree.

The models are those of the experiments ``transition`` and ``variants`` of ``runners.c4.reference``. A model has a lower
loss than another one if each of its seeds has. Models that are not finished count as not trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from runners.c4.reference.cells import cell_file, chosen_rate, next_place, read_cell
from runners.progress import spell

NOT_TRAINED = "not trained"
YES, NO, EVEN = "yes", "no", "within the seeds"
ENDINGS = {"paper's": "", "authors'": "-authors"}
"""What the names of models end with, by parametrisation."""
HEADINGS = ("claim", "paper", "ours", "ours, authors' parametrisation", "agrees")

Models = Mapping[str, Mapping[str, Any]]
"""Contents of the files of finished models, by name."""
Answer = tuple[str, str]
"""What our models show, in words, and whether that is what the paper says."""
Check = Callable[[Models, str], Answer]
"""Answer of models whose names have an ending; a KeyError says that one of them is not trained."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        claim: what is compared.
        paper: the paper's figures.
        check: what finds ours.
        claimed: whether the paper says which way it goes.
    """

    claim: str
    paper: str
    check: Check
    claimed: bool = True


def lower(first: str, second: str) -> Check:
    """Return the check that one model has a lower loss than another."""

    def check(models: Models, ending: str) -> Answer:
        pair = models[first + ending], models[second + ending]
        a, b = map(_losses, pair)
        answer = YES if max(a) < min(b) else NO if min(a) > max(b) else EVEN
        return " against ".join(map(_in_words, pair)), answer

    return check


def best_rate(name: str, paper: float) -> Check:
    """Return the check that the best learning rate of a model is the paper's."""

    def check(models: Models, ending: str) -> Answer:
        rate = chosen_rate(models[name + ending]["runs"])
        return f"{rate:g}", YES if rate == paper else NO

    return check


def smaller_cache(first: str, second: str) -> Check:
    """Return the check that one model keeps fewer floats of each token than another: keys and values of all layers."""

    def check(models: Models, ending: str) -> Answer:
        settings = [models[name + ending]["config"] for name in (first, second)]
        a, b = (2 * of_model["layers"] * of_model["width"] for of_model in settings)
        return f"{a:,} against {b:,} floats a token", YES if a < b else NO

    return check


ROWS = (
    Row(
        claim="6 RT layers have a lower loss than 6 Transformer layers",
        paper="2.860 against 2.917 (300M)",
        check=lower("rt-6", "transformer-6"),
    ),
    Row(
        claim="6 RT layers have a lower loss than 12 Transformer layers of as many parameters",
        paper="2.860 against 2.896 (300M)",
        check=lower("rt-6", "transformer-12"),
    ),
    Row(claim="the best learning rate of RT", paper="0.003", check=best_rate("rt-6", 3e-3)),
    Row(
        claim="RT has a lower loss at half the batch, too",
        paper="3.037 against 3.091 (150M)",
        check=lower("rt-6-batch-32", "transformer-6-batch-32"),
    ),
    Row(
        claim="RT has a lower loss with β2 = 0.99, too",
        paper="takes the better of 0.95 and 0.99",
        check=lower("rt-6-beta2-0.99", "transformer-6-beta2-0.99"),
        claimed=False,
    ),
    Row(
        claim="RT has a lower loss than RT without the persistent norm",
        paper="Figure 7: significantly",
        check=lower("rt-6", "rt-6-no-persistent-norm"),
    ),
    Row(
        claim="the best learning rate without the persistent norm",
        paper="0.001",
        check=best_rate("rt-6-no-persistent-norm", 1e-3),
    ),
    Row(
        claim="3 RT layers have a lower loss than 6 Transformer layers of as many parameters",
        paper="2.860 with 6 against 2.896 with 12 (300M)",
        check=lower("rt-3", "transformer-6"),
    ),
    Row(
        claim="and keep less of each token while decoding",
        paper="less by the root of the ratio of depths",
        check=smaller_cache("rt-3", "transformer-6"),
    ),
    Row(
        claim="RT has a lower loss than RT in blocks of 4 positions",
        paper="future work",
        check=lower("rt-6", "rt-6-block-4"),
        claimed=False,
    ),
    Row(
        claim="RT has a lower loss than RT in blocks of 16 positions",
        paper="future work",
        check=lower("rt-6", "rt-6-block-16"),
        claimed=False,
    ),
)


class Transition:
    """The table of models.

    Args:
        models: finished models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def table(self) -> list[str]:
        """Return heading and rows, cells divided by bars."""
        return [" | ".join(cells) for cells in (HEADINGS, *map(self._cells, ROWS))]

    def verdict(self) -> str:
        """Return the verdict on all claims whose models are trained, in either parametrisation."""
        answers = [answer for row in ROWS if row.claimed for _, answer in self._answers(row).values()]
        if not answers:
            return "not shown"
        if all(answer == YES for answer in answers):
            return "agrees"
        return "partly" if YES in answers else "differs"

    def took(self) -> str:
        """Return how long the training of the models took."""
        runs = [run for cell in self._models.values() for run in cell["runs"] if run["validation_loss"] is not None]
        if not runs:
            return "not known: no model is trained"
        devices = " or ".join(sorted({run["device"] for run in runs}))
        return f"{spell(sum(run['seconds'] for run in runs))} of training on one {devices} for {len(runs)} runs"

    def _cells(self, row: Row) -> list[str]:
        answers = self._answers(row)
        ours = [answers[name][0] if name in answers else NOT_TRAINED for name in ENDINGS]
        return [row.claim, row.paper, *ours, _agrees(row, {name: answer for name, (_, answer) in answers.items()})]

    def _answers(self, row: Row) -> dict[str, Answer]:
        """Return the answers by parametrisation, as far as the models are trained."""
        found = {}
        for name, ending in ENDINGS.items():
            try:
                found[name] = row.check(self._models, ending)
            except KeyError:
                continue
        return found


def _agrees(row: Row, answers: Mapping[str, str]) -> str:
    """Return the last cell of a row."""
    if not answers:
        return NOT_TRAINED
    if not row.claimed:
        return "no claim"
    if len(answers) == len(ENDINGS) and len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{name}: {answer}" for name, answer in answers.items())


def finished_models(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the contents of the files of finished models by name, without those whose every run diverged."""
    cells = {file.stem: read_cell(cell_file(folder, file.stem)) for file in sorted(folder.glob("*.json"))}
    return {
        name: cell
        for name, cell in cells.items()
        if cell is not None and next_place(cell["runs"]) is None and chosen_rate(cell["runs"]) is not None
    }


def _losses(cell: Mapping[str, Any]) -> Sequence[float]:
    """Return the validation loss of each seed at the best learning rate."""
    rate = chosen_rate(cell["runs"])
    return [run["validation_loss"] for run in cell["runs"] if run["lr"] == rate and run["validation_loss"] is not None]


def _in_words(cell: Mapping[str, Any]) -> str:
    """Return the mean loss, half the difference between the seeds, and the learning rate."""
    losses = _losses(cell)
    return f"{fmean(losses):.3f} ± {(max(losses) - min(losses)) / 2:.3f} (lr {chosen_rate(cell['runs']):g})"
