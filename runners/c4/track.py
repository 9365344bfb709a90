"""What a run shows of itself: a progress bar, Weights & Biases, charts of loss curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from runners.c4.curve import Row, read_curve
from runners.files import write_atomically
from runners.tracking import Mode

PROJECT = "c4"
LINES = ("-", "--", "-.", ":")
"""One for each ten runs of a chart, which has ten colours."""


class Bar:
    """A progress bar with the step's figures; each evaluation leaves a line."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}\n{task.fields[figures]}", table_column=Column()),  # one that may wrap
            BarColumn(bar_width=max(8, min(40, console.width - 88))),  # about what stands beside it
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", figures="", start=False)

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """Show the bar."""
        done, total = row.step if row else 0, description["config"]["steps"]
        self._progress.console.print(f"{name}: {'going on after' if done else 'from'} step {done}", soft_wrap=True)
        self._progress.update(self._task, description=name, completed=done, total=total)
        self._progress.start_task(self._task)
        self._progress.start()

    def stepped(self, row: Row) -> None:
        """Move it."""
        utilisation = "" if row.mfu is None else f"  MFU {row.mfu:.1%}  {row.memory_gib:.1f} GiB"
        speed = f"{row.tokens_per_second:,.0f} tok/s{utilisation}"
        figures = f"loss {row.loss:.3f}  norm {row.grad_norm:.2f}  {speed}"
        self._progress.update(self._task, completed=row.step, figures=figures)
        if row.validation_loss is not None:
            losses = f"loss {row.loss:.4f}, validation {row.validation_loss:.4f}"
            self._progress.console.print(f"step {row.step:>6}: {losses}, lr {row.lr:.2e}, {speed}")

    def evaluating(self, name: str, number: int, sets: int) -> None:
        """Begin anew, with sets of questions in place of steps."""
        self._progress.console.print(f"evaluating {name}: set {number} of {sets}", soft_wrap=True)
        if number == 1:
            self._progress.reset(self._task, total=sets, description="downstream")
            self._progress.start()
        self._progress.update(self._task, completed=number - 1, figures=name)

    def finished(self, result: dict[str, Any]) -> None:
        """Take it away."""
        self._progress.update(self._task, completed=self._progress.tasks[0].total)
        self._progress.stop()

    def close(self) -> None:
        """Give the terminal back, whatever happened."""
        self._progress.stop()


class Wandb:
    """Curves in Weights & Biases; with mode ``disabled`` it does nothing."""

    def __init__(self, mode: Mode, folder: Path) -> None:
        self.mode, self.folder = mode, folder
        self._run: Any = None

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """Open the run; online, a resumed one goes on where it was."""
        if self.mode == "disabled":
            return
        import wandb  # slow to import, and seldom wanted

        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT,
            dir=self.folder,
            mode=self.mode,
            name=name,
            id=name,
            resume="allow" if self.mode == "online" else None,
            config=description,
            settings=wandb.Settings(silent=True),
        )

    def stepped(self, row: Row) -> None:
        """Log one step."""
        if self._run is not None:
            values = {name: value for name, value in vars(row).items() if value is not None}
            self._run.log(values, step=row.step)

    def evaluating(self, name: str, number: int, sets: int) -> None:
        """Nothing: the scores are part of the result."""

    def finished(self, result: dict[str, Any]) -> None:
        """Write the result and close."""
        if self._run is not None:
            self._run.summary.update(result)
        self.close()

    def close(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def plot_curves(folders: Sequence[Path], path: Path) -> None:
    """Training and validation loss of runs against tokens read, as PNG; the legend tells lines and runs apart."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    training: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}
    validation: dict[str, Any] = {"marker": "o", "markersize": 3}
    for i, folder in enumerate(folders):
        rows, color, line = read_curve(folder), f"C{i % 10}", LINES[i // 10 % len(LINES)]
        measured = [(row.tokens, row.validation_loss) for row in rows if row.validation_loss is not None]
        axes.plot(
            [row.tokens for row in rows],
            [row.loss for row in rows],
            color=color,
            linestyle=line,
            **training,
        )
        axes.plot(
            [tokens for tokens, _ in measured],
            [loss for _, loss in measured],
            color=color,
            linestyle=line,
            label=folder.name,
            **validation,
        )
    for name, kind in (("validation", validation), ("training, each step", training)):
        axes.plot([], [], color="black", label=name, **kind)
    axes.set_xscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
