"""What is shown of a run in training."""

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

from runners.c4.checkpoints import StepRow
from runners.progress import TrainingDisplay, spell
from runners.records import Record
from runners.tables import abbreviated

RECENT = 50
"""Number of steps over which the displayed training loss and speed are averaged."""


class Progress(TrainingDisplay):
    """Shows the events of runs, in the first process; an evaluation prints a line on a terminal, time does in a log.

    Attributes:
        after_step: is called after each step.
    """

    after_step: Callable[[StepRow], object] | None = None

    def began(self, name: str, info: dict[str, Any], row: StepRow | None) -> None:
        """A run begins, or continues after ``row``."""
        config, done = info["config"], row.step if row else 0
        self._steps = config["steps"]
        self._bytes_per_token = info["corpus"]["bytes_per_token"]
        self._recent, self._evaluated = deque[StepRow](maxlen=RECENT), ""
        self.say(f"{name}: {'continuing after' if done else 'from'} step {done}")
        self.open_bar(name, self._steps, done)

        # Seeds and the points of a search form a group, named after model and number of steps.
        self.open_log(
            project="c4",
            job_type="pretraining",
            group=f"{name.partition('-lr')[0]} {self._steps} steps of {config['batch_size']} × {config['seq_len']}",
            name=name,
            run_id=name,
            config=config | {key: value for key, value in info.items() if key != "config"},
        )

    def stepped(self, row: StepRow) -> None:
        """Advance the bar; print a line if the step was evaluated, or if one is due in a log."""
        self.log([vars(row)], row.step)
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
        line = f"step {row.step:>6}: training loss {loss:.3f}{self._evaluated}, lr {row.lr:.3g}, {pace}"
        self.move_bar(row.step, shown, line, stays=row.validation_loss is not None and self.console.is_terminal)
        if self.after_step is not None:
            self.after_step(row)

    def finished(self, record: Record) -> None:
        """The run is finished and its record is written."""
        figures = {f"{split}.{name}": y for split, found in record.metrics.items() for name, y in found.items()}
        self.close_logs([{**figures, "seconds": record.seconds, "diverged_step": record.diverged_step}])
        self.close()


def with_bits(loss: float, bytes_per_token: float | None) -> str:
    """Return a loss in nats per token, and in bits per byte if the mean bytes per token are known."""
    nats = f"{loss:.3f} nats per token"
    return nats if bytes_per_token is None else f"{nats} = {loss / math.log(2) / bytes_per_token:.3f} bits per byte"
