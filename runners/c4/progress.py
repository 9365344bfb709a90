"""What a run shows while it is in training: a progress bar, lines in a log, and curves in Weights & Biases."""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

from rich.console import Console

from runners.c4.checkpoints import Row
from runners.progress import SECONDS_BETWEEN_LINES, SECONDS_TO_FIRST_LINE, progress_bars, spell
from runners.records import Record
from runners.tables import abbreviated
from runners.tracking import Tracking

PROJECT = "c4"
RECENT = 50
"""Number of steps over which the displayed training loss and speed are averaged."""


class Progress:
    """Shows the events of runs, in the first process.

    Each evaluation prints a line. Without a terminal, a line is printed every ``SECONDS_BETWEEN_LINES`` instead, with
    the last evaluation.

    Args:
        console: where to print.
        tracking: settings of Weights & Biases; mode ``disabled`` logs nothing.

    Attributes:
        after_step: is called after each step.
    """

    after_step: Callable[[Row], object] | None = None

    def __init__(self, console: Console, tracking: Tracking) -> None:
        self.console = console
        self.tracking = tracking
        self._bars = progress_bars(console)
        self._task = self._bars.add_task("", figures="", start=False)
        self._wandb: Any = None
        self._line_due = time.monotonic() + SECONDS_TO_FIRST_LINE

    def began(self, name: str, described: dict[str, Any], row: Row | None) -> None:
        """A run begins, or continues after ``row``."""
        config, done = described["config"], row.step if row else 0
        self._steps = config["steps"]
        self._bytes_per_token = described["corpus"]["bytes_per_token"]
        self._recent, self._evaluated = deque[Row](maxlen=RECENT), ""

        # A line for logs, and the bar.
        self.console.print(f"{name}: {'continuing after' if done else 'from'} step {done}", soft_wrap=True)
        self._bars.update(self._task, description=name, completed=done, total=self._steps)
        self._bars.start_task(self._task)
        self._bars.start()

        # Seeds and the points of a search form a group, named after model and number of steps.
        if self.tracking.mode != "disabled":
            kind = name.partition("-lr")[0]
            group = f"{kind} {config['steps']} steps of {config['batch_size']} × {config['seq_len']}"
            others = {key: value for key, value in described.items() if key != "config"}
            self._wandb = self.tracking.open_run(
                project=PROJECT, job_type="pretraining", group=group, name=name, run_id=name, config=config | others
            )

    def stepped(self, row: Row) -> None:
        """Advance the bar; print a line if the step was evaluated, or if one is due in a log."""
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in vars(row).items() if value is not None}, step=row.step)

        self._recent.append(row)
        loss = fmean(recent.loss for recent in self._recent)
        if row.validation_loss is not None:
            evaluated = with_bits(row.validation_loss, self._bytes_per_token)
            self._evaluated = f", validation {evaluated} at step {row.step}"

        # Speed and time left, from the last steps.
        tokens = row.tokens / row.step
        seconds = fmean(tokens / recent.tokens_per_second for recent in self._recent)
        utilisation = "" if row.mfu is None else f", MFU {row.mfu:.1%}, {row.memory_gib:.1f} GiB"
        left = spell(seconds * (self._steps - row.step))
        pace = f"{abbreviated(round(tokens / seconds))} tokens/s{utilisation}, {left} left"

        # The bar, and a line that stays.
        shown = f"training loss {loss:.3f}  norm {row.grad_norm:.2f}  {pace}"
        self._bars.update(self._task, completed=row.step, figures=shown)
        is_due = time.monotonic() >= self._line_due
        if row.validation_loss is not None if self.console.is_terminal else is_due:
            figures = f"training loss {loss:.3f}{self._evaluated}"
            self.console.print(f"step {row.step:>6}: {figures}, lr {row.lr:.3g}, {pace}", soft_wrap=True)
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES
        if self.after_step is not None:
            self.after_step(row)

    def finished(self, record: Record) -> None:
        """The run is finished and its record is written."""
        if self._wandb is not None:
            of_splits = record.metrics.items()
            figures = {f"{split}.{name}": y for split, of_split in of_splits for name, y in of_split.items()}
            self._wandb.summary.update({**figures, "seconds": record.seconds, "diverged_step": record.diverged_step})
        self.close()

    def close(self) -> None:
        """Release the terminal and close the run of Weights & Biases, also after an error."""
        self._bars.stop()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def with_bits(loss: float, bytes_per_token: float | None) -> str:
    """Return a loss in nats per token, and in bits per byte if the mean bytes per token are known."""
    nats = f"{loss:.3f} nats per token"
    return nats if bytes_per_token is None else f"{nats} = {loss / math.log(2) / bytes_per_token:.3f} bits per byte"
