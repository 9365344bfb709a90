"""What is told of the progress of a search."""

from collections.abc import Callable, Sequence

from runners.mad.experiment import Experiment
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result


class Watcher:
    """Told what a search does; subclasses draw progress or log curves. By default nothing happens."""

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int, more: int = 0) -> None:
        """An ensemble of ``runs`` starts or resumes; ``more`` runs of the grid have not begun."""

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        """The ensemble resumes after ``step``, with the curve of each run up to there."""

    def progressed(self, step: int) -> None:
        """The ensemble has done ``step`` steps and is between two evaluations."""

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Each run of the ensemble has been evaluated after ``step`` steps."""

    def finished(self, results: Sequence[Result]) -> None:
        """The ensemble is trained and stored."""

    def waiting(self, trials: int) -> None:
        """Other processes train the ``trials`` that are missing; 0 ends the wait."""

    def close(self) -> None:
        """Nothing of the study is left to train."""


class Watchers(Watcher):
    """Several watchers as one.

    Args:
        members: told in this order.
        check: called before each message; may raise to end the search.
    """

    def __init__(self, *members: Watcher, check: Callable[[], None] = lambda: None) -> None:
        self.members, self.check = members, check

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int, more: int = 0) -> None:
        self.check()
        for member in self.members:
            member.started(experiment, runs, total_steps, more)

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        self.check()
        for member in self.members:
            member.resumed(step, curves)

    def progressed(self, step: int) -> None:
        self.check()
        for member in self.members:
            member.progressed(step)

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        self.check()
        for member in self.members:
            member.evaluated(step, points)

    def finished(self, results: Sequence[Result]) -> None:
        self.check()
        for member in self.members:
            member.finished(results)

    def waiting(self, trials: int) -> None:
        self.check()
        for member in self.members:
            member.waiting(trials)
