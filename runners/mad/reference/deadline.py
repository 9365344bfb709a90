"""The time that a command has, and which cells still end within it."""

from collections.abc import Mapping
from time import monotonic

from runners.mad.duration import Duration

BESIDE_TRAINING = 30.0
"""Seconds that a cell takes beside its training: compilation, diagnosis, the model's file."""
Place = tuple[str, str]
"""Row and task."""


class Deadline:
    """Says whether a cell that begins now is expected to end in time.

    On a CPU, a cell is expected to take what its steps take; on a GPU, what the reference results took on theirs.
    Another GPU, or one that several commands share, has another pace. It is known once the first cell is finished.

    Args:
        end: when the time is over, as ``time.monotonic`` tells it.
        durations: how long the training of each cell takes.
    """

    def __init__(self, end: float, durations: Mapping[Place, Duration]) -> None:
        self._end = end
        self._durations = durations
        self._taken = self._expected = 0.0

    def allows(self, place: Place) -> bool:
        """Return whether a cell that begins now is expected to end in time."""
        pace = self._taken / self._expected if self._expected else 1.0
        return monotonic() + pace * self._seconds(place) <= self._end

    def learn(self, place: Place, seconds: float) -> None:
        """Take into account how long a finished cell has taken."""
        self._taken += seconds
        self._expected += self._seconds(place)

    def _seconds(self, place: Place) -> float:
        duration = self._durations[place]
        training = duration.recorded if duration.here is None else duration.here
        return BESIDE_TRAINING + (training or 0.0)
