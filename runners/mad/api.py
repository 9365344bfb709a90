"""The Python function ``runners.mad.study``, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import pandas as pd
from torch import nn

from mixers import MIXERS
from mixers.named import name_of
from mixers.registry import find_mixer
from runners.mad.chosen import kept_model, runs_of_choice
from runners.mad.experiment import Experiment, plan
from runners.mad.options import defaults
from runners.mad.points import Estimate, chosen, estimate_of, points
from runners.mad.preview import print_duration
from runners.mad.profile import Profile, profile_score, seed_scores, train_profiles
from runners.mad.ranking import ranking
from runners.mad.search import prepare, print_and_rank, train_studies
from runners.options import from_keywords
from runners.progress import open_console
from tasks import TASKS
from tasks.base import Accuracy, Batch, Task


@dataclass(frozen=True, kw_only=True)
class Study:
    """A finished study.

    Attributes:
        experiment: the experiment that was trained: layer, task, protocol.
        table: its records, as ``runners.records.load`` returns them.
        out: folder of results.
        reference: records of the reference rows of the task; None for no reference rows.
    """

    experiment: Experiment = field(repr=False)
    table: pd.DataFrame = field(repr=False)
    out: Path
    reference: pd.DataFrame | None = field(repr=False, default=None)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {estimate.text()}" for name, estimate in self.test.items())
        return f"<{self.experiment.name}: {figures or 'every point diverged'}>"

    @property
    def test(self) -> dict[str, Estimate]:
        """Figures of the chosen point on the test split, with 95% intervals if there are several seeds.

        Keys: ``sequence_accuracy``, ``token_accuracy``, ``loss`` (nats). Empty if every point diverged.
        """
        return self._estimates("test")

    @property
    def extrapolation(self) -> dict[str, dict[str, Estimate]]:
        """Accuracies of the chosen point on longer sequences than those of the training, by the name of their set.

        Each set has the keys ``sequence_accuracy`` and ``token_accuracy``. Empty if the task has no such sets, or if
        every point diverged.
        """
        found = {name: self._estimates(name) for name in self.experiment.instance.extrapolation_names}
        return {name: estimates for name, estimates in found.items() if estimates}

    def _estimates(self, split: str) -> dict[str, Estimate]:
        """Return the figures of the chosen point on a split by their names."""
        point = chosen(points(self.table)).iloc[0]
        return {
            name: estimate_of(point, f"{split}.{name}")
            for name in ("sequence_accuracy", "token_accuracy", "loss")
            if pd.notna(point.get(f"{split}.{name}"))
        }

    @property
    def ceiling(self) -> Accuracy:
        """Accuracies that a perfect solver reaches on the test split."""
        return self.experiment.instance.ceiling("test")

    @property
    def chance(self) -> Accuracy:
        """Accuracies of guessing on the test split."""
        return self.experiment.instance.chance("test")

    def points(self) -> pd.DataFrame:
        """One row per grid point: its settings, means over seeds, the ends of their 95% intervals, the choice."""
        found = points(self.table)
        settings = ["lr", "weight_decay", "seeds", "diverged", "chosen", "edge", "steps_per_second"]
        return found[[*settings, *(name for name in found if "." in name)]]

    def ranking(self) -> pd.DataFrame:
        """One row for this layer and one per reference row, best first; empty without reference rows."""
        return ranking(self.table, self.reference)

    def curves(self) -> pd.DataFrame:
        """One row per evaluation of a run: settings, step, training loss, validation figures (NaN if diverged)."""
        runs = self.table[["lr", "weight_decay", "seed", "curve"]].itertuples(index=False)
        return pd.concat(
            [
                pd.DataFrame({"lr": lr, "weight_decay": decay, "seed": seed, **curve}).astype({"train_loss": float})
                for lr, decay, seed, curve in runs
            ],
            ignore_index=True,
        )

    @cached_property
    def model(self) -> nn.Module:
        """The chosen point's model with the best validation score, on the CPU: tokens (B, T) to logits (B, T, V).

        Raises:
            ValueError: every point diverged, or the model's file is missing or damaged.
        """
        files = runs_of_choice(self.table)["file"]
        if files.empty:
            raise ValueError(f"{self.experiment.name}: every point diverged, so there is no model")
        return kept_model(self.experiment, files.iloc[0].parent)

    @property
    def data(self) -> dict[str, Batch]:
        """The splits ``train``, ``validation`` and ``test``: arrays ``inputs_ST``, ``targets_ST``, ``scored_ST``."""
        task = self.experiment.instance
        return {name: task.split(name) for name in ("train", "validation", "test")}

    @property
    def folder(self) -> Path:
        """Folder of the study's runs."""
        return self.experiment.folder(self.out)


@overload
def study(
    mixer: str | type[nn.Module],
    task: str | type[Task] = ...,
    *,
    preset: Literal["profile"],
    mixer_options: Mapping[str, Any] | None = ...,
    task_options: Mapping[str, Any] | None = ...,
    quiet: bool = ...,
    **options: Any,
) -> Profile: ...


@overload
def study(
    mixer: str | type[nn.Module],
    task: str | type[Task],
    *,
    preset: str = ...,
    mixer_options: Mapping[str, Any] | None = ...,
    task_options: Mapping[str, Any] | None = ...,
    quiet: bool = ...,
    **options: Any,
) -> Study: ...


def study(
    mixer: str | type[nn.Module],
    task: str | type[Task] = "all",
    *,
    preset: str = "grid",
    mixer_options: Mapping[str, Any] | None = None,
    task_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Study | Profile:
    """Train one layer on one task over a grid; reuse runs that earlier calls or commands have trained.

    >>> result = study("rt", "compression", lr=[1e-3], seeds=2, steps=2000, mixer_options={"heads": 8})
    >>> profile = study("rt", preset="profile")

    Args:
        mixer: registered name, ``package.module:Class``, a stack such as ``3*gated-deltanet+transformer``, or a class,
            also one that a notebook defines.
        task: registered name, ``package.module:Class``, or a class derived from ``tasks.base.Task``; ``all`` in a
            profile.
        preset: ``grid``, ``full``, ``quick``, ``demo``; or ``profile``, which trains the ladders of the tasks.
        mixer_options: settings of the layer, by the names of its ``Config``; of a stack, ``transformer__heads``.
        task_options: settings of the task, by the names of its ``Config``.
        quiet: print nothing but warnings; ``Study.ranking`` returns the places.
        **options: fields of ``runners.mad.options.Options``, the options of the command.

    Returns:
        The study; with the preset ``profile`` the ``Profile``.

    Raises:
        TypeError: there is no such argument.
        ValueError: an argument is invalid, or the storage fails; the message says what to do.
        ContractError: a layer from outside breaks a rule that the trainer relies on.
        StoppedError: Ctrl-C or SIGTERM; the same call resumes from the checkpoints.
    """
    is_profile = preset == "profile"
    named = {"mixer": name_of(mixer, MIXERS), "task": name_of(task, TASKS), "preset": preset}
    named |= ({} if is_profile else {"difficulty": "baseline"}) | options
    ones = ("mixer",) if is_profile else ("mixer", "task", "difficulty")
    if any(not isinstance(named[name], str) or named[name] == "all" for name in ones):
        raise ValueError("study trains one layer on one task, each a name or a class: call it once for each")
    find_mixer(named["mixer"])  # its message on a class or a module is the better one
    parsed = from_keywords(defaults(preset, **options), "study", named)
    experiments = plan(parsed, dict(mixer_options or {}), dict(task_options or {}))
    console = open_console(quiet=quiet)
    experiments, reference = prepare(experiments, parsed, console.print)
    if is_profile:
        print_duration(experiments, parsed, console)
        table, _ = train_profiles(train_studies(experiments, parsed, console), parsed, console)
        return Profile(table=table, score=profile_score(seed_scores(table)))
    trained, _ = print_and_rank(
        train_studies(experiments, parsed, console), parsed, reference, console, diagnosed=False
    )
    return Study(experiment=experiments[0], table=trained, out=parsed.out.resolve(), reference=reference)
