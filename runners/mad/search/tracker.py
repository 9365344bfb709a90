"""Weights & Biases: each run of an ensemble as a run of its own, grouped by study."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from mixers.costs import costs
from runners.mad.experiment import Experiment
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.tracking import Tracking

PROJECT = "mad"


class Tracker(Watcher):
    """Logs the curve of each run; with mode ``disabled`` it does nothing.

    A run stays open after its training, until ``close``, for the test figures of the chosen point.
    """

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking
        self._runs: Sequence[Run] = ()
        self._open: list[Any] = []
        self._trained: dict[Run, tuple[Any, int]] = {}

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int, more: int = 0) -> None:
        """Open one W&B run for each member."""
        if self.tracking.mode == "disabled":
            return
        self._runs, facts = runs, _facts(experiment)
        self._open = [
            self.tracking.open_run(
                project=PROJECT,
                job_type="diagnostics",
                group=experiment.title,
                name=f"{experiment.label} {experiment.task} lr {run.lr:g} wd {run.weight_decay:g} seed {run.seed}",
                run_id=experiment.run_id(run),
                config={**experiment.to_dict(), **asdict(run), **facts},
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
        """Write what the kept parameters reach."""
        if not self._open:
            return
        for at, run, result in zip(self._runs, self._open, results, strict=True):
            if result.validation is not None:
                run.summary.update({f"kept/{name}": value for name, value in asdict(result.validation).items()})
            run.summary["diverged_step"] = result.diverged_step
            self._trained[at] = run, 0 if result.diverged_step is None else 1
        self._open = []

    def close(self, readings: Mapping[Run, Mapping[str, Any]] = MappingProxyType({})) -> None:
        """Write test figures into the summaries of the runs that have some, and close all runs.

        Args:
            readings: figures on the test split by run and name.
        """
        for at, (run, exit_code) in self._trained.items():
            run.summary.update({f"test/{name}": value for name, value in readings.get(at, {}).items()})
            run.finish(exit_code=exit_code)
        self._trained = {}


def _facts(experiment: Experiment) -> dict[str, Any]:
    """Return what is known of a run before its training, besides its settings."""
    counted = costs(experiment.layer, experiment.mixer_config, experiment.shape)
    return {
        "parameters": counted.parameters,
        **{f"state_{length}": floats for length, floats in (counted.state_floats or {}).items()},
        **{f"flops_per_token_{length}": flops for length, flops in (counted.flops_per_token or {}).items()},
        "family": experiment.layer.family,
        "fingerprint": experiment.fingerprint,
    }
