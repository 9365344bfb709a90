"""How long the missing runs of language models take, from the times of finished runs on the same device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from runners.c4.checkpoints import steps_done
from runners.c4.config import Config
from runners.c4.reference.cells import ConvergedRun, Run, cell_files, runs_in
from runners.c4.reference.order import Place, open_places, runs_left
from runners.c4.reference.training import folder_of


def seconds_of_runs(folder: Path, device: str) -> dict[str, float]:
    """Return by name the mean seconds of the runs of each model in a folder that has runs on ``device``."""
    found = {}
    for file in cell_files(folder):
        runs = [run for run in runs_in(file) if isinstance(run, ConvergedRun) and run.device == device]
        if seconds := [seconds_of(run) for run in runs]:
            found[file.stem] = fmean(seconds)
    return found


def seconds_of(run: ConvergedRun) -> float:
    """Return the seconds that a converged run took: its steps, its evaluations, and the evaluation of recall tokens.

    All evaluations read the same windows, so that one is timed. Runs of earlier versions have none timed.
    """
    return run.seconds + (len(run.curve) + 1) * run.evaluation_seconds


def seconds_of_run(name: str, known: Mapping[str, float]) -> float:
    """Return the expected seconds of a run of a model: the mean of its runs, or of all models; 0 without any."""
    return known.get(name, fmean(known.values())) if known else 0.0


def share_left(place: Place, config: Config, options: dict[str, Any], corpus: str) -> float:
    """Return the share of a run's steps that remain after its newest intact checkpoint: 1 for a run without one.

    Args:
        place: learning rate and seed of the run.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
    """
    return 1 - steps_done(folder_of(place, config, options, corpus)) / config.steps


class Work(NamedTuple):
    """The least training that a model still needs.

    Attributes:
        open: seconds of each run that can begin now.
        later: seconds of the runs that follow one another once all of these have ended.
    """

    open: list[float]
    later: float


def work_left(runs: Sequence[Run], config: Config, options: dict[str, Any], corpus: str, seconds: float) -> Work:
    """Return the work that a model still needs at least; runs that can begin now may have been begun before.

    Args:
        runs: the model's finished runs.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
        seconds: expected seconds of a run.
    """
    shares = [share_left(place, config, options, corpus) for place in open_places(runs)]
    return Work([share * seconds for share in shares], (runs_left(runs) - len(shares)) * seconds)


def seconds_on(devices: int, works: Sequence[Work]) -> float:
    """Return when the last of ``devices`` is done.

    Each takes the next run as soon as it is free; the one that ends a model's last open run trains the later ones.
    """
    ends = [0.0] * devices
    for work in works:
        taken = []
        for seconds in work.open:
            device = ends.index(min(ends))
            ends[device] += seconds
            taken.append(device)
        if taken:
            ends[max(taken, key=lambda at: ends[at])] += work.later
    return max(ends)
