"""RT and the Transformer as language models of 30M parameters: the paper's claims, our results, and whether they agree.

The models are those of the experiments ``transition`` and ``variants`` of ``runners.c4.reference``. One model has a
lower loss than another if the loss of each of its seeds is lower than the loss of each seed of the other. Stale models
count as not trained. Models that are not finished decide nothing but stability; a table shows all their runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from runners.c4.reference.cells import Cell
from runners.c4.reference.order import SEEDS, Place, losses_by_rate
from runners.progress import spell
from runners.report.trained import is_stale_model, read_models
from runners.tables import abbreviated

NOT_TRAINED, NOT_FINISHED, DIVERGED = "not trained", "not finished", "diverged"
YES, NO, EVEN = "yes", "no", "within the seeds"
ENDINGS = {"paper's": "", "authors'": "-authors"}
"""Endings of the models' names, by parametrisation."""
HEADINGS = ("claim", "paper", "ours", "ours, authors' parametrisation", "agrees")

Models = Mapping[str, Cell]
"""Models by name."""
Answer = tuple[str, str]
"""Our figures in words, and whether they agree with the claim."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        claim: the statement that is tested.
        paper: the paper's figures.
        models: names of the models that it compares, without the endings of parametrisations.
        check: returns the answer of these models.
        claimed: whether the paper makes the statement; False for a comparison that is only ours.
        measured: whether training decides it; False for arithmetic, which is no evidence.
    """

    claim: str
    paper: str
    models: tuple[str, ...]
    check: Callable[..., Answer]
    claimed: bool = True
    measured: bool = True


def lower_loss(first: Cell, second: Cell) -> Answer:
    """Return whether the first model has the lower loss."""
    a, b = _losses(first), _losses(second)
    answer = YES if max(a) < min(b) else NO if min(a) > max(b) else EVEN
    return f"{_in_words(first)} against {_in_words(second)}", answer


def best_rate(paper: float) -> Callable[[Cell], Answer]:
    """Return the check that the best learning rate of a model equals the paper's."""

    def check(model: Cell) -> Answer:
        return f"{model.chosen:g}", YES if model.chosen == paper else NO

    return check


def smaller_cache(first: Cell, second: Cell) -> Answer:
    """Return whether the first model keeps fewer floats per token: keys and values of all layers."""
    a, b = (2 * model.config["layers"] * model.config["width"] for model in (first, second))
    return f"{a:,} against {b:,} floats per token", YES if a < b else NO


ABLATION = (
    Row(
        claim="RT has a lower loss than RT without the persistent norm",
        paper="Figure 7: significantly",
        models=("rt-6", "rt-6-no-persistent-norm"),
        check=lower_loss,
    ),
    Row(
        claim="the best learning rate without the persistent norm",
        paper="0.001",
        models=("rt-6-no-persistent-norm",),
        check=best_rate(1e-3),
    ),
)
ROWS = (
    Row(
        claim="6 RT layers have a lower loss than 6 Transformer layers",
        paper="2.860 against 2.917 (300M)",
        models=("rt-6", "transformer-6"),
        check=lower_loss,
    ),
    Row(
        claim="6 RT layers have a lower loss than 12 Transformer layers of as many parameters",
        paper="2.860 against 2.896 (300M)",
        models=("rt-6", "transformer-12"),
        check=lower_loss,
    ),
    Row(claim="the best learning rate of RT", paper="0.003", models=("rt-6",), check=best_rate(3e-3)),
    Row(
        claim="RT has a lower loss at half the batch, too",
        paper="3.037 against 3.091 (150M)",
        models=("rt-6-batch-32", "transformer-6-batch-32"),
        check=lower_loss,
    ),
    Row(
        claim="RT has a lower loss with β2 = 0.99, too",
        paper="takes the better of 0.95 and 0.99",
        models=("rt-6-beta2-0.99", "transformer-6-beta2-0.99"),
        check=lower_loss,
        claimed=False,
    ),
    *ABLATION,
    Row(
        claim="3 RT layers have a lower loss than 6 Transformer layers of as many parameters",
        paper="2.860 with 6 against 2.896 with 12 (300M)",
        models=("rt-3", "transformer-6"),
        check=lower_loss,
    ),
    Row(
        claim="and keep less of each token while decoding",
        paper="less by the root of the ratio of depths",
        models=("rt-3", "transformer-6"),
        check=smaller_cache,
        measured=False,
    ),
    Row(
        claim="RT has a lower loss than RT in blocks of 4 positions",
        paper="future work",
        models=("rt-6", "rt-6-block-4"),
        check=lower_loss,
        claimed=False,
    ),
    Row(
        claim="RT has a lower loss than RT in blocks of 16 positions",
        paper="future work",
        models=("rt-6", "rt-6-block-16"),
        check=lower_loss,
        claimed=False,
    ),
)


class Transition:
    """The table of claims.

    Args:
        models: models that are not stale, finished or not.
    """

    def __init__(self, models: Models) -> None:
        self._begun, self._models = models, finished(models)

    def table(self) -> list[str]:
        """Return the heading and the rows as lines, with cells separated by bars."""
        return [" | ".join(cells) for cells in (HEADINGS, *map(self._cells, ROWS))]

    def verdict(self) -> str:
        """Return the verdict on the claims of the paper, over the parametrisations in which models are trained.

        While models are missing, it is ``partly`` at best.
        """
        return self._verdict([row for row in ROWS if row.claimed and row.measured])

    def _verdict(self, rows: Sequence[Row]) -> str:
        found = [self._answers(row) for row in rows]
        answers = [answer for of_row in found for _, answer in of_row.values()]
        if all(found) and all(answer == YES for answer in answers):
            return "agrees"
        if YES in answers:
            return "partly"
        return "differs" if NO in answers or all(found) else "not shown"

    def missing(self) -> str:
        """Return a sentence that says so if no model is trained or finished; else nothing."""
        if self._models:
            return ""
        return "Not finished yet. " if self._begun else "Not trained yet. "

    def at_equal_rates(self) -> str:
        """Return RT's loss minus that of the Transformers, with the first seed, at each learning rate that both have.

        Rates at which a seed of either diverged are left out.
        """
        found = []
        for layers in (6, 12):
            both = [self._begun.get(name) for name in ("rt-6", f"transformer-{layers}")]
            of_rt, of_other = (losses_by_rate(model.runs) if model else {} for model in both)
            rates = [rate for rate in sorted(of_rt) if math.isfinite(of_rt[rate] - of_other.get(rate, math.inf))]
            if rates:
                differences = ", ".join(f"{of_rt[rate] - of_other[rate]:+.3f} (lr {rate:g})" for rate in rates)
                found.append(f"with {layers} layers {differences}")
        if not found:
            return ""

        tokens = abbreviated(self._begun["rt-6"].tokens)
        state = "" if {"rt-6", "transformer-6", "transformer-12"} <= self._models.keys() else " Not finished."
        return (
            f"At 30M parameters on another text, after {tokens} tokens and with seed 0, RT's loss minus that of the "
            f"Transformer is: {'; '.join(found)}. Below zero, RT is ahead.{state} "
        )

    def stability(self) -> str:
        """Return the verdict on the claim that RT is stable at high learning rates only with the persistent norm.

        Rates count at which both models have runs, finished or not. It is ``differs`` if at one of them RT diverged
        with the norm and converged without it; else ``agrees`` if at one it is the other way round; else ``not shown``.
        """
        with_norm, without = self._converged("rt-6"), self._converged("rt-6-no-persistent-norm")
        pairs = {(with_norm[rate], without[rate]) for rate in with_norm.keys() & without.keys()}
        return "differs" if (False, True) in pairs else "agrees" if (True, False) in pairs else "not shown"

    def of_norm(self) -> str:
        """Return at which learning rates RT converged and diverged, with the persistent norm and without it."""
        found = []
        for name, title in (("rt-6", "with the norm"), ("rt-6-no-persistent-norm", "without it")):
            converged = self._converged(name)
            words = [
                f"{word} at {', '.join(f'{rate:g}' for rate in sorted(converged) if converged[rate] is does)}"
                for does, word in ((True, "converged"), (False, "diverged"))
                if does in converged.values()
            ]
            found += [f"RT {title} {' and '.join(words)}"] if words else []
        return f"{'; '.join(found)} (paper's parametrisation)." if found else "Not trained yet."

    def ablation(self) -> str:
        """Return the verdict on the paper's ablation of the persistent norm."""
        return self._verdict(ABLATION)

    def of_ablation(self) -> str:
        """Return the losses and best rates of RT with the persistent norm and without it."""
        found = [f"{words} ({name} parametrisation)" for name, (words, _) in self._answers(ABLATION[0]).items()]
        return f"{'; '.join(found)}." if found else "not finished yet."

    def _converged(self, name: str) -> dict[float, bool]:
        """Return whether every run of a model converged, by learning rate; nothing if the model is not trained."""
        runs = self._begun[name].runs if name in self._begun else []
        return {rate: math.isfinite(loss) for rate, loss in losses_by_rate(runs).items()}

    def took(self) -> str:
        """Return how long the training of the models took, also of those that are not finished."""
        runs = [run for cell in self._begun.values() for run in cell.converged]
        if not runs:
            return "not known: no model is trained"
        devices = " or ".join(sorted({run.device for run in runs}))
        return f"{spell(sum(run.seconds for run in runs))} of training on one {devices} for {len(runs)} runs"

    def _cells(self, row: Row) -> list[str]:
        answers = self._answers(row)
        ours = [answers[name][0] if name in answers else self._missing(row, ending) for name, ending in ENDINGS.items()]
        if answers:
            agrees = _agrees(row, {name: answer for name, (_, answer) in answers.items()})
        else:
            agrees = next((word for word in (DIVERGED, NOT_FINISHED) if word in ours), NOT_TRAINED)
        return [row.claim, row.paper, *ours, agrees]

    def _missing(self, row: Row, ending: str) -> str:
        """Return what a row says in a parametrisation in which not all of its models have a loss."""
        names = [model + ending for model in row.models]
        if not all(name in self._begun for name in names):
            return NOT_TRAINED

        diverged = any(self._begun[name].complete and self._begun[name].chosen is None for name in names)
        return DIVERGED if diverged else NOT_FINISHED

    def _answers(self, row: Row) -> dict[str, Answer]:
        """Return the answer in each parametrisation in which all models of the row are trained."""
        found = {}
        for name, ending in ENDINGS.items():
            models = [self._models.get(model + ending) for model in row.models]
            if None not in models:
                found[name] = row.check(*models)
        return found


def _agrees(row: Row, answers: Mapping[str, str]) -> str:
    """Return the cell that says whether our models agree with the paper, given at least one answer."""
    if not row.claimed:
        return "no claim"
    if len(answers) == len(ENDINGS) and len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{name}: {answer}" for name, answer in answers.items())


def current_models(folder: Path) -> dict[str, Cell]:
    """Return the models of a folder that are not stale.

    Raises:
        DamagedFileError: a file is damaged, or no model's.
        ValueError: the models read different texts.
    """
    return {name: cell for name, cell in read_models(folder, alike=False).items() if not is_stale_model(name, cell)}


def finished(models: Models) -> dict[str, Cell]:
    """Return the finished models; those whose runs all diverged are left out."""
    return {name: cell for name, cell in models.items() if cell.complete and cell.chosen is not None}


def table_of_runs(models: Models) -> list[list[str]]:
    """Return the headings and a row for each model: its losses at every learning rate, and of its second seed.

    The loss at the chosen rate has a star, once the model is finished.
    """
    runs = {name: {(run.lr, run.seed): run.validation_loss for run in cell.runs} for name, cell in models.items()}
    rates = sorted({rate for of_model in runs.values() for rate, _ in of_model})
    done = finished(models)

    def row(name: str) -> list[str]:
        chosen = models[name].chosen if name in done else None
        seeds = [_loss(runs[name], (rate, SEEDS[0])) + "*" * (rate == chosen) for rate in rates]
        others = [place for place in runs[name] if place[1] != SEEDS[0]]
        second = ", ".join(f"{_loss(runs[name], place)} (lr {place[0]:g})" for place in others)
        return [name, abbreviated(models[name].parameters_without_embeddings), *seeds, second or "–"]

    return [["model", "parameters", *(f"lr {rate:g}" for rate in rates), "second seed"], *map(row, models)]


def _loss(losses: Mapping[Place, float | None], place: Place) -> str:
    """Return the loss of a run in words; a dash for a run that is not trained."""
    loss = losses.get(place, math.nan)
    return "diverged" if loss is None else "–" if math.isnan(loss) else f"{loss:.3f}"


def _losses(cell: Cell) -> Sequence[float]:
    """Return the validation loss of each seed at the best learning rate."""
    return [run.validation_loss for run in cell.best]


def _in_words(cell: Cell) -> str:
    """Return the mean loss, half the difference between the seeds, and the learning rate."""
    losses = _losses(cell)
    return f"{fmean(losses):.3f} ± {(max(losses) - min(losses)) / 2:.3f} (lr {cell.chosen:g})"
