"""What a campaign has tried, and what broke."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """One line of the table of campaigns.

    Attributes:
        name: of the campaign.
        seconds: time that it may take.
        tried: number of trials.
        ends: number of trials by how they ended well.
        broken: what broke, in words, one entry for each trial that failed.
    """

    name: str
    seconds: float
    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    dice: random.Random = field(default_factory=random.Random)
    began: float = field(default_factory=time.monotonic)

    def has_time(self) -> bool:
        """Return whether another trial may begin; the first always may."""
        return not self.tried or time.monotonic() - self.began < self.seconds

    def add(self, trial: str, fault: str | None, end: str = "survived") -> None:
        """Enter a trial, with what is wrong, or how it ended well."""
        self.tried += 1
        if fault is None:
            self.ends[end] += 1
        else:
            self.broken.append(f"{trial}: {fault}")

    def row(self) -> str:
        """Return the row of the table in Markdown."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        survived = self.tried - len(self.broken)
        return f"| {self.name} | {self.tried} | {survived}: {ends} | {len(self.broken) or 'nothing'} |"
