"""Targets of benchmarks: what a figure of the record should reach."""

from typing import Any, NamedTuple


class Target(NamedTuple):
    """A figure of the record, and the least or largest value that it should have."""

    figure: str
    bound: float
    at_least: bool = False

    def judge(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON-able form of the target; ``met`` is None if its figure is unknown."""
        value = figures.get(self.figure)
        reached = None if value is None else bool(value >= self.bound if self.at_least else value <= self.bound)
        return {
            "figure": self.figure,
            "at_least" if self.at_least else "at_most": self.bound,
            "met": reached,
        }
