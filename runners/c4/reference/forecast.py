"""How long the missing runs of language models take, from the times of finished runs on the same device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from runners.c4.reference.cells import cell_files, read_cell


def seconds_of_runs(folder: Path, device: str) -> dict[str, float]:
    """Return by name the mean seconds of the runs of each model in a folder that has runs on ``device``."""
    found = {}
    for file in cell_files(folder):
        runs = (read_cell(file) or {"runs": []})["runs"]
        if seconds := [
            seconds_of(run) for run in runs if run["device"] == device and run["validation_loss"] is not None
        ]:
            found[file.stem] = fmean(seconds)
    return found


def seconds_of(run: Mapping[str, Any]) -> float:
    """Return the seconds that a converged run took: its steps, its evaluations, and the evaluation of recall tokens.

    All evaluations read the same windows, so that one is timed. Runs of earlier versions have none timed.
    """
    return float(run["seconds"] + (len(run["curve"]) + 1) * run.get("evaluation_seconds", 0.0))


def seconds_of_run(name: str, known: Mapping[str, float]) -> float:
    """Return the expected seconds of a run of a model: the mean of its runs, or of all models; 0 without any."""
    return known.get(name, fmean(known.values())) if known else 0.0


def seconds_on(devices: int, works: Sequence[float]) -> float:
    """Return when the last of ``devices`` is done, if each takes the next work as soon as it is free."""
    ends = [0.0] * devices
    for seconds in works:
        ends[ends.index(min(ends))] += seconds
    return max(ends)
