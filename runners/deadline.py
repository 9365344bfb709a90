"""The time that a command has, and which pieces of work still end within it."""

from time import monotonic

BESIDE_TRAINING = 30.0
"""Seconds that a piece of work takes beside its training: compilation, diagnosis, files."""


class Deadline:
    """Says whether work that begins now is expected to end in time.

    Another GPU than that of the forecast, or one that several commands share, has another pace. It is known once
    finished work was reported to ``learn``.

    Args:
        minutes: time of the command, in minutes.
        began: when the command began, as ``time.monotonic`` tells it.

    Raises:
        ValueError: the time is not positive.
    """

    def __init__(self, minutes: float, began: float) -> None:
        if not minutes > 0:
            raise ValueError(f"--minutes {minutes:g} must be more than 0")
        self._minutes = minutes
        self._end = began + 60 * minutes
        self._taken = self._expected = 0.0

    def allows(self, training: float) -> bool:
        """Return whether work that begins now ends in time, if its ``training`` is expected to take so many seconds."""
        pace = self._taken / self._expected if self._expected else 1.0
        return monotonic() + pace * (BESIDE_TRAINING + training) <= self._end

    def learn(self, training: float, taken: float) -> None:
        """Take into account how many seconds finished work took, and how many seconds of training were expected."""
        self._taken += taken
        self._expected += BESIDE_TRAINING + training

    def __str__(self) -> str:
        """Return in words why work was left."""
        return f"not expected to end within {self._minutes:g} minute{'s' * (self._minutes != 1)}"
