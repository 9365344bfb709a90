"""What is told of the progress of a search."""

from collections.abc import Sequence
from typing import Protocol

from runners.mad.experiment import Experiment
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result


class Watcher(Protocol):
    """Told what the search does; draws progress, logs to a tracker."""

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int) -> None:
        """An ensemble begins or goes on."""

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Each run of the ensemble has been evaluated."""

    def progressed(self, step: int) -> None:
        """The ensemble is on its way to the next evaluation."""

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        """The ensemble goes on after ``step``; the curve of each run up to there."""

    def finished(self, results: Sequence[Result]) -> None:
        """The ensemble is done and stored."""

    def waiting(self, trials: int) -> None:
        """All that is missing, so many trials, is being trained by other processes; 0 ends the wait."""


class Watchers:
    """Several watchers as one."""

    def __init__(self, *members: Watcher) -> None:
        self.members = members

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int) -> None:
        for member in self.members:
            member.started(experiment, runs, total_steps)

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        for member in self.members:
            member.evaluated(step, points)

    def progressed(self, step: int) -> None:
        for member in self.members:
            member.progressed(step)

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        for member in self.members:
            member.resumed(step, curves)

    def finished(self, results: Sequence[Result]) -> None:
        for member in self.members:
            member.finished(results)

    def waiting(self, trials: int) -> None:
        for member in self.members:
            member.waiting(trials)
