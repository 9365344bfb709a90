"""What is shown of a training: bars on a terminal, lines elsewhere, and runs of Weights & Biases."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Self

from rich.console import Console
from rich.progress import TaskID

from runners.mad.experiment import Experiment
from runners.mad.training.loop import CurvePoint, Result
from runners.mad.training.protocol import Run
from runners.progress import SECONDS_BETWEEN_LINES, SECONDS_TO_FIRST_LINE, progress_bars, spell
from runners.tracking import Tracking


class Display:
    """Shows one ensemble after another: task, layer, step, loss, validation accuracies, steps per second, time left.

    Without a terminal a line is printed every ``SECONDS_BETWEEN_LINES``.
    Each run is a W&B run of its own, grouped by study, unless the mode is ``disabled``.
    """

    def __init__(self, console: Console, tracking: Tracking) -> None:
        self.say = partial(console.print, soft_wrap=True)
        self.tracking = tracking
        self._progress = progress_bars(console)
        self._bar: TaskID | None = None
        self._figures = ""
        self._line_due = time.monotonic() + SECONDS_TO_FIRST_LINE
        self._logs: list[Any] = []

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, experiment: Experiment, runs: Sequence[Run], waiting: int) -> None:
        """Open the bar of an ensemble, and a W&B run for each member; ``waiting`` runs of the grid have not begun."""
        self.close()
        seeds = sorted({run.seed for run in runs})
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        counted = f"{len(runs)} run{'s' * (len(runs) > 1)}" + f", then {waiting} more" * (waiting > 0)
        words = (experiment.task, experiment.label, experiment.difficulty, named, counted)
        self._bar = self._progress.add_task(" · ".join(words), total=experiment.steps, figures="starting")
        self._figures = ""

        if self.tracking.mode != "disabled":
            self._logs = [
                self.tracking.open_run(
                    project="mad",
                    job_type="diagnostics",
                    group=experiment.name,
                    name=f"{experiment.label} {experiment.task} lr {run.lr:g} wd {run.weight_decay:g} seed {run.seed}",
                    run_id=f"{experiment.fingerprint[:16]}-{run.lr}-{run.weight_decay}-{run.seed}",
                    config={**experiment.facts, **asdict(run)},
                )
                for run in runs
            ]

    def resumed(self, step: int) -> None:
        """Say after which step the ensemble resumes; measure its speed from there."""
        if self._bar is not None:
            self._progress.reset(self._bar, completed=step)
            self.say(f"{self._progress.tasks[-1].description}: resumes after step {step}")

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
        for log, point in zip(self._logs, points, strict=False):
            figures = {} if point.validation is None else asdict(point.validation)
            log.log({"train_loss": point.train_loss, **{f"validation/{k}": v for k, v in figures.items()}}, step=step)
        self.progressed(step)

    def progressed(self, step: int) -> None:
        """Move the bar to a step; without a terminal print a line if one is due."""
        if self._bar is None:
            return
        self._progress.update(self._bar, completed=step)
        task = self._progress.tasks[-1]
        figures = [self._figures] if self._figures else []
        if task.speed:
            figures.append(f"{task.speed:.2f} steps/s")
        self._progress.update(self._bar, figures="  ".join(figures))

        if figures and not self._progress.console.is_terminal and time.monotonic() >= self._line_due:
            if task.time_remaining:
                figures.append(f"{spell(task.time_remaining)} left")
            self.say(f"{task.description}: step {step} of {task.total:.0f}: {'  '.join(figures)}")
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES

    def finished(self, results: Sequence[Result]) -> None:
        """Close the bar, and the W&B runs with what the kept parameters reach."""
        for log, result in zip(self._logs, results, strict=False):
            kept = {} if result.validation is None else asdict(result.validation)
            log.summary.update({f"kept/{name}": value for name, value in kept.items()})
            log.summary["diverged_step"] = result.diverged_step
            log.finish(exit_code=0 if result.diverged_step is None else 1)
        self._logs = []
        self.close()

    def waiting(self, runs: int) -> None:
        """Show that other processes train the missing runs."""
        if self._bar is None:
            self._bar = self._progress.add_task("", total=None, figures="")
        self._progress.update(self._bar, description=f"waiting for {runs} runs of other processes")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
