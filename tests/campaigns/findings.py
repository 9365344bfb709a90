"""What programs have found, without times: it must be the same however often they were killed."""

from dataclasses import asdict
from pathlib import Path

from runners.records import read_all

TIMES = ("seconds", "steps_per_second", "together", "commit", "settings", "profile")
"""Fields of a record that may differ; of these ``profile`` is of the best seed alone, which is diagnosed later."""


def found(out: Path) -> object:
    """The records in a results folder, by the names of their folders."""
    return {
        file.parent.name: {name: value for name, value in asdict(record).items() if name not in TIMES}
        for file, record in read_all(out)
    }
