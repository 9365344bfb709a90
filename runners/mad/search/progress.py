"""The display of a search's progress: bars on a terminal, lines elsewhere."""

import math
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Task, TaskID

from runners.mad.experiment import Experiment
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.progress import SECONDS_BETWEEN_LINES, SECONDS_TO_FIRST_LINE, progress_bars, spell

SECONDS_OF_A_LONG_TRAINING = 3600.0
"""A training that will take longer is announced once."""


class Display(Watcher):
    """Progress bars: task, mixer, step, loss, validation accuracies, steps per second, time left.

    Without a terminal a line is printed at each evaluation, and every ``SECONDS_BETWEEN_LINES`` between evaluations.
    """

    def __init__(self, console: Console) -> None:
        self._progress = progress_bars(console)
        self._bar: TaskID | None = None
        self._evaluation = ""
        self._line_due = 0.0
        self._first: tuple[int, float] | None = None
        self._announced = False

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int, more: int = 0) -> None:
        """Open a bar for an ensemble."""
        self._close()

        seeds = sorted({run.seed for run in runs})
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        count = f"{len(runs)} run{'s' * (len(runs) > 1)}" + f", then {more} more" * (more > 0)
        description = " · ".join((experiment.task, experiment.label, experiment.difficulty, named, count))
        self._bar = self._progress.add_task(description, total=total_steps, figures="starting")
        self._evaluation = ""
        self._line_due = time.monotonic() + SECONDS_TO_FIRST_LINE
        self._first, self._announced = None, False

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Move the bar and show the figures of the run with the best validation score."""
        if self._bar is None:
            return

        alive = [p for p in points if p.validation is not None]
        self._evaluation = "all runs diverged"
        if alive:
            best = max(alive, key=lambda p: p.validation.score if p.validation else -math.inf)
            assert best.validation is not None
            self._evaluation = (
                f"loss train {best.train_loss:.3f} val {best.validation.loss:.3f}  "
                f"seq {best.validation.sequence_accuracy:.3f} token {best.validation.token_accuracy:.3f}"
            )

        # Print a line at once.
        self._line_due = 0.0
        self._show(self._bar, step)

    def progressed(self, step: int) -> None:
        """Move the bar; without a terminal nothing is printed before a speed is known."""
        if self._bar is not None:
            self._show(self._bar, step)

    def _show(self, bar: TaskID, step: int) -> None:
        """Move the bar to a step; without a terminal print a line if one is due."""
        self._progress.update(bar, completed=step)
        task = self._progress.tasks[self._progress.task_ids.index(bar)]
        self._announce_if_long(task, step)
        figures = [self._evaluation] if self._evaluation else []

        if task.speed:
            figures.append(f"{task.speed:.2f} steps/s")
        self._progress.update(bar, figures="  ".join(figures))

        # Without a terminal: a line at times.
        if figures and not self._progress.console.is_terminal and time.monotonic() >= self._line_due:
            if task.time_remaining:
                figures.append(f"{spell(task.time_remaining)} left")
            line = f"{task.description}: step {step} of {task.total:.0f}: {'  '.join(figures)}"
            self._progress.console.print(line, soft_wrap=True)
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES

    def _announce_if_long(self, task: Task, step: int) -> None:
        """Say once how long the training will take, if that is long; measured from the first step that was reported."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        first, began = self._first
        if self._announced or step == first or task.total is None:
            return

        seconds = (now - began) / (step - first)
        if (left := seconds * (task.total - step)) > SECONDS_OF_A_LONG_TRAINING:
            speed, hours = f"{seconds:.2g} s per step", f"{left / 3600:,.1f} h"
            self._progress.console.print(f"{task.description}: {speed}: {hours} for these runs", soft_wrap=True)
        self._announced = True

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        """Print the step after which the ensemble resumes; measure its speed from there."""
        if self._bar is None:
            return

        task = self._progress.tasks[self._progress.task_ids.index(self._bar)]
        self._progress.reset(self._bar, completed=step)
        self._progress.console.print(f"{task.description}: resumes after step {step}", soft_wrap=True)

    def finished(self, results: Sequence[Result]) -> None:
        """Close the bar of an ensemble."""
        self._close()

    def waiting(self, trials: int) -> None:
        """Show that other processes hold the missing trials; close the bar once there are none."""
        if trials == 0:
            self._close()
            return

        if self._bar is None:
            self._bar = self._progress.add_task("", total=None, figures="")
        self._progress.update(self._bar, description=f"waiting for {trials} trials of other processes")

    def _close(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
