"""The result of ``runners.mad.study``."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runners.mad.experiment import Experiment, study_folder
from runners.mad.reference.rows import Ranking, rankings
from runners.mad.results.held_out import read_test
from runners.mad.results.ranking import ranked
from runners.mad.results.standings import Standing
from runners.mad.results.summary import Estimate, Summary, means_beyond_training
from runners.mad.studies import kept_model, kept_record
from runners.mad.training.protocol import Run
from tasks.base import Accuracy, Batch

Table = list[dict[str, Any]]
"""Rows with the same keys, from which ``pandas.DataFrame(rows)`` makes a table."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A finished study.

    Attributes:
        experiment: the experiment that was trained: layer, task, protocol.
        summary: grid points, the chosen point, ceiling, chance, costs.
        out: folder of results.
        reference: folder of reference rows; None for no reference rows.
    """

    experiment: Experiment = field(repr=False)
    summary: Summary = field(repr=False)
    out: Path
    reference: Path | None = None

    def __repr__(self) -> str:
        tested = self.test if self.summary.is_tested else {}
        figures = ", ".join(f"{name} {estimate.text()}" for name, estimate in tested.items())
        without = "every point diverged" if self.summary.chosen is None else "no test accuracy"
        return f"<{self.summary.heading}: {figures or without}>"

    @property
    def test(self) -> dict[str, Estimate]:
        """Figures of the chosen point on the test split, with 95% intervals if there are several seeds.

        Keys: ``sequence_accuracy``, ``token_accuracy``, ``loss`` (nats). Empty if every point diverged.

        Raises:
            DamagedFileError: a model or the test figures of the chosen point are missing or damaged.
        """
        chosen = self.summary.chosen_point
        if chosen is not None and not self.summary.is_tested:
            read_test(self.experiment, chosen.runs, self.out, torch.device("cpu"), together=1)
        estimates = (chosen and chosen.estimates) or {}
        return {name.removeprefix("test_"): e for name, e in estimates.items() if name.startswith("test_")}

    @property
    def extrapolation(self) -> dict[str, dict[str, Estimate]]:
        """Accuracies of the chosen point on longer sequences than those of the training, by the name of their set.

        Each set has the keys ``sequence_accuracy`` and ``token_accuracy``. Empty if the task has no such sets, or if
        every point diverged.
        """
        chosen = self.summary.chosen_point
        return {
            name: {f"{kind}_accuracy": mean for kind, mean in means.items()}
            for name, means in means_beyond_training(chosen.extrapolation if chosen else {}).items()
        }

    @property
    def ceiling(self) -> Accuracy:
        """Accuracies that a perfect solver reaches on the test split."""
        return self.summary.ceiling

    @property
    def chance(self) -> Accuracy:
        """Accuracies of guessing on the test split."""
        return self.summary.chance

    def points(self) -> Table:
        """One row per grid point: its settings, means over seeds, and whether it was chosen."""
        rows = []
        for point in self.summary.points:
            means = {name: estimate.mean for name, estimate in (point.estimates or {}).items()}
            chosen = point is self.summary.chosen_point
            at = {"lr": point.lr, "weight_decay": point.weight_decay, "seeds": len(point.seeds), "chosen": chosen}
            rows.append({**at, "diverged": len(point.diverged), **means})
        return rows

    @cached_property
    def rankings(self) -> list[Ranking]:
        """The layer among the reference rows of equal task and training; empty without reference rows."""
        return [] if self.reference is None else rankings([self.summary], [Standing.of(self.summary)], self.reference)

    def ranking(self) -> Table:
        """One row for this layer and one per reference row, best first.

        Rank, layer, seeds, test accuracies, and half the width of the 95% interval of each, None for a single seed.
        """
        rows = []
        for found in self.rankings:
            for rank, standing in ranked([*found.own, *found.rows]):
                own = {"layer": standing.mixer, "own": standing in found.own}
                rows.append({"rank": rank, **own, "seeds": standing.seeds, **standing.figures()})
        return rows

    def curves(self) -> Table:
        """One row per evaluation of a run: settings, step, training loss, validation figures (None if diverged).

        Raises:
            ValueError: the record of a run is missing or damaged.
        """
        rows = []
        for run in self.runs:
            for point in kept_record(self.experiment, run, self.out)["curve"]:
                validation = point["validation"] or dict.fromkeys(("sequence_accuracy", "token_accuracy", "loss"))
                figures = {f"validation_{name}": value for name, value in validation.items() if name != "score"}
                rows.append({**vars(run), "step": point["step"], "train_loss": point["train_loss"], **figures})
        return rows

    @property
    def runs(self) -> list[Run]:
        """All runs of the grid."""
        return self.summary.runs

    @cached_property
    def model(self) -> torch.nn.Module:
        """The chosen point's model with the best validation score, on the CPU: tokens (B, T) to logits (B, T, V).

        Raises:
            ValueError: every point diverged, or the model's file is missing or damaged.
        """
        if (run := self.summary.best_run) is None:
            raise ValueError(f"{self.summary.heading}: every point diverged, so there is no model")
        return kept_model(self.experiment, run, self.out).eval()

    @property
    def data(self) -> dict[str, Batch]:
        """The splits ``train``, ``validation`` and ``test``: arrays ``inputs_ST``, ``targets_ST``, ``scored_ST``."""
        task = self.experiment.instance
        return {name: task.split(name) for name in ("train", "validation", "test")}

    @property
    def folder(self) -> Path:
        """Folder of the study's summary."""
        return study_folder(self.out, self.experiment)
