"""What is shown of the training of studies."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from runners.mad.experiment import Experiment
from runners.mad.points import chosen, points
from runners.mad.training.loop import CurvePoint, Result
from runners.mad.training.protocol import Run
from runners.progress import TrainingDisplay, spell


class Display(TrainingDisplay):
    """Shows one ensemble after another: task, layer, step, loss, validation accuracies, steps per second, time left.

    Without a terminal a line is printed every ``SECONDS_BETWEEN_LINES``. Each run is a W&B run of its own, and so is
    the chosen point; those of a study are a group.
    """

    def started(self, experiment: Experiment, runs: Sequence[Run], waiting: int) -> None:
        """Open the bar of an ensemble, and a W&B run for each member; ``waiting`` runs of the grid have not begun."""
        seeds = sorted({run.seed for run in runs})
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        counted = f"{len(runs)} run{'s' * (len(runs) > 1)}" + f", then {waiting} more" * (waiting > 0)
        words = (experiment.task, experiment.label, experiment.difficulty, named, counted)
        self.open_bar(" · ".join(words), experiment.steps)
        self._figures = ""

        for run in runs:
            kind = ("diagnostics", f"lr {run.lr:g} wd {run.weight_decay:g} seed {run.seed}")
            self.open_log(**log_of(experiment, *kind, f"{run.lr}-{run.weight_decay}-{run.seed}", asdict(run)))

    def resumed(self, step: int) -> None:
        """Say after which step the ensemble resumes; measure its speed from there."""
        task = self._bars.tasks[-1]
        self._bars.reset(task.id, completed=step)
        self.say(f"{task.description}: resumes after step {step}")

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Show the figures of the run with the best validation score, and log those of all."""
        alive = [(point.validation, point.train_loss) for point in points if point.validation is not None]
        self._figures = "all runs diverged"
        if alive:
            best, loss = max(alive, key=lambda pair: pair[0].score)
            self._figures = (
                f"loss train {math.nan if loss is None else loss:.3f} val {best.loss:.3f}  "
                f"seq {best.sequence_accuracy:.3f} token {best.token_accuracy:.3f}"
            )

        validation = [{} if point.validation is None else asdict(point.validation) for point in points]
        figures = [{f"validation/{name}": y for name, y in of_run.items()} for of_run in validation]
        self.log([{"train_loss": p.train_loss, **own} for p, own in zip(points, figures, strict=True)], step)
        self.progressed(step)

    def progressed(self, step: int) -> None:
        """Move the bar to a step; without a terminal print a line if one is due."""
        task = self._bars.tasks[-1]
        self._bars.update(task.id, completed=step)
        speed = [f"{task.speed:.2f} steps/s"] if task.speed else []
        left = [f"{spell(task.time_remaining)} left"] if task.time_remaining else []
        figures = "  ".join(filter(None, [self._figures, *speed, *left]))
        line = f"{task.description}: step {step} of {task.total:.0f}: {figures}"
        self.move_bar(step, self._figures, line)

    def finished(self, results: Sequence[Result]) -> None:
        """Close the bar, and the W&B runs with what the kept parameters reach."""
        kept = [{} if result.validation is None else asdict(result.validation) for result in results]
        summaries = [{f"kept/{name}": y for name, y in figures.items()} for figures in kept]
        self.close_logs([{"diverged_step": r.diverged_step, **own} for r, own in zip(results, summaries, strict=True)])
        self.remove_bar()

    def chosen(self, experiment: Experiment, table: pd.DataFrame) -> None:
        """Log the chosen point of a study, with the means over its seeds, as a W&B run of its own."""
        (best,) = chosen(points(table)).to_dict("records")
        own = {name: best[name] for name in ("lr", "weight_decay", "seeds")}
        self.open_log(**log_of(experiment, "chosen point", "chosen point", "chosen", own))
        self.close_logs([{f"mean/{name}": y for name, y in best.items() if "." in str(name)}])


def log_of(experiment: Experiment, job_type: str, name: str, ending: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Tracking.open_run`` for a W&B run of a study.

    Args:
        experiment: the study.
        job_type: kind of work.
        name: end of its name.
        ending: end of its identity.
        own: its settings, beside those of the study.
    """
    return {
        "project": "mad",
        "job_type": job_type,
        "group": experiment.name,
        "name": f"{experiment.label} {experiment.task} {name}",
        "run_id": f"{experiment.fingerprint[:16]}-{ending}",
        "config": {**experiment.facts, **own},
    }
