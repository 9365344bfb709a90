"""Watchers of a run: a progress bar, and Weights & Biases."""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

from rich.console import Console

from runners.c4.curve import Row
from runners.progress import SECONDS_BETWEEN_LINES, SECONDS_TO_FIRST_LINE, progress_bars, spell
from runners.tracking import Tracking

PROJECT = "c4"
RECENT = 50
"""Number of steps over which the displayed training loss and speed are averaged."""


class Watcher:
    """Receives the events of a run, in the first process. The methods of this base class do nothing."""

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """A run begins, or continues after ``row``."""

    def stepped(self, row: Row) -> None:
        """A step is done."""

    def evaluating(self, name: str, number: int, sets: int) -> None:
        """Training is finished, and the evaluation of a downstream set begins, the ``number``-th of ``sets``."""

    def finished(self, result: dict[str, Any]) -> None:
        """The run is finished and its result is stored."""


class Bar(Watcher):
    """A progress bar with figures of the last steps; each evaluation prints a line.

    Without a terminal, a line is also printed every ``SECONDS_BETWEEN_LINES``.
    """

    def __init__(self, console: Console) -> None:
        self._progress = progress_bars(console)
        self._task = self._progress.add_task("", figures="", start=False)
        self._steps = 0
        self._bytes_per_token: float | None = None
        self._recent: deque[Row] = deque(maxlen=RECENT)
        self._line_due = 0.0

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """Show the bar."""
        done = row.step if row else 0
        self._steps = description["config"]["steps"]
        self._bytes_per_token = description["corpus"].get("bytes_per_token")
        self._recent.clear()
        self._line_due = time.monotonic() + SECONDS_TO_FIRST_LINE
        begin = "continuing after" if done else "from"

        # A line for logs, and the bar.
        self._progress.console.print(f"{name}: {begin} step {done}", soft_wrap=True)
        self._progress.update(self._task, description=name, completed=done, total=self._steps)
        self._progress.start_task(self._task)
        self._progress.start()

    def stepped(self, row: Row) -> None:
        """Advance the bar; print a line if the step was evaluated, or if one is due in a log."""
        self._recent.append(row)
        loss = fmean(recent.loss for recent in self._recent)
        figures = f"training loss {loss:.4f}"
        if row.validation_loss is not None:
            figures += f", validation {with_bits(row.validation_loss, self._bytes_per_token)}"

        # Speed and time left, from the last steps.
        tokens = row.tokens / row.step
        seconds = fmean(tokens / recent.tokens_per_second for recent in self._recent)
        left = spell(seconds * (self._steps - row.step))
        utilisation = "" if row.mfu is None else f", MFU {row.mfu:.1%}, {row.memory_gib:.1f} GiB"
        pace = f"{tokens / seconds:,.0f} tokens/s{utilisation}, {left} left"

        # The bar, and a line that stays.
        self._progress.update(
            self._task, completed=row.step, figures=f"training loss {loss:.3f}  norm {row.grad_norm:.2f}  {pace}"
        )
        is_due = not self._progress.console.is_terminal and time.monotonic() >= self._line_due
        if row.validation_loss is not None or is_due:
            line = f"step {row.step:>6}: {figures}, lr {row.lr:.2e}, {pace}"
            self._progress.console.print(line, soft_wrap=True)
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES

    def evaluating(self, name: str, number: int, sets: int) -> None:
        """Count downstream sets in place of steps."""
        self._progress.console.print(f"evaluating {name}: set {number} of {sets}", soft_wrap=True)

        # The first set begins a new bar.
        if number == 1:
            self._progress.reset(self._task, total=sets, description="downstream")
            self._progress.start()

        self._progress.update(self._task, completed=number - 1, figures=name)

    def finished(self, result: dict[str, Any]) -> None:
        """Fill and stop the bar."""
        self._progress.update(self._task, completed=self._progress.tasks[0].total)
        self._progress.stop()

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self._progress.stop()


def with_bits(loss: float, bytes_per_token: float | None) -> str:
    """Return a loss in nats per token, and in bits per byte if the mean bytes per token are known."""
    nats = f"{loss:.4f} nats per token"
    return nats if bytes_per_token is None else f"{nats} = {loss / math.log(2) / bytes_per_token:.4f} bits per byte"


class Wandb(Watcher):
    """Curves in Weights & Biases; mode ``disabled`` logs nothing.

    Args:
        tracking: settings of Weights & Biases.
        facts: returns figures of the model that are known before training; called if a run is logged.
    """

    def __init__(self, tracking: Tracking, facts: Callable[[], dict[str, Any]]) -> None:
        self.tracking = tracking
        self.facts = facts
        self._run: Any = None

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """Open the run; in mode ``online``, a resumed run continues its curves."""
        if self.tracking.mode == "disabled":
            return

        # Seeds and the points of a search form a group, named after model and number of steps.
        config = description["config"]
        kind = name.partition("-lr")[0]
        group = f"{kind} {config['steps']} steps of {config['batch_size']} × {config['seq_len']}"
        others = {key: value for key, value in description.items() if key != "config"}
        self._run = self.tracking.open_run(
            project=PROJECT,
            job_type="pretraining",
            group=group,
            name=name,
            run_id=name,
            config={**config, **others, **self.facts()},
        )

    def stepped(self, row: Row) -> None:
        """Log one step."""
        if self._run is not None:
            values = {name: value for name, value in vars(row).items() if value is not None}
            self._run.log(values, step=row.step)

    def finished(self, result: dict[str, Any]) -> None:
        """Write the result and close the run."""
        if self._run is not None:
            self._run.summary.update(result)
        self.close()

    def close(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
