"""Weights & Biases: each run of an ensemble as a run of its own, grouped by study."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runners.mad.experiment import Experiment
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.tracking import Mode, open_run

PROJECT = "mad"


class Tracker(Watcher):
    """Logs the curve of each run; with mode ``disabled`` it does nothing."""

    def __init__(self, mode: Mode, folder: Path) -> None:
        self.mode, self.folder = mode, folder
        self._open: list[Any] = []

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int) -> None:
        """Open one W&B run for each member."""
        if self.mode == "disabled":
            return
        self._open = [
            open_run(
                self.mode,
                self.folder,
                project=PROJECT,
                group=experiment.name,
                name=f"{experiment.label} {experiment.task} lr {run.lr:g} wd {run.weight_decay:g} seed {run.seed}",
                run_id=experiment.run_id(run),
                config={**experiment.to_dict(), **asdict(run)},
            )
            for run in runs
        ]

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        """Log the curves up to here."""
        for points in zip(*curves, strict=True):
            self.evaluated(points[0].step, points)

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Log one point of each curve."""
        for run, point in zip(self._open, points, strict=False):
            metrics = {} if point.validation is None else asdict(point.validation)
            run.log({"train_loss": point.train_loss, **{f"validation/{k}": v for k, v in metrics.items()}}, step=step)

    def finished(self, results: Sequence[Result]) -> None:
        """Write what the kept parameters reach, and close."""
        for run, result in zip(self._open, results, strict=False):
            if result.validation is not None:
                run.summary.update({f"kept/{name}": value for name, value in asdict(result.validation).items()})
            run.summary["diverged_step"] = result.diverged_step
            run.finish(exit_code=0 if result.diverged_step is None else 1)
        self._open = []
