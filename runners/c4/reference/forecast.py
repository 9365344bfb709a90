"""How long the missing runs of language models take, from the times of finished runs on the same device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from runners.c4.checkpoints import steps_done
from runners.c4.config import Config
from runners.c4.identity import run_folder
from runners.c4.reference.cells import Place, cell_files, next_place, read_cell, runs_left


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


def share_left(place: Place, config: Config, options: dict[str, Any], corpus: str) -> float:
    """Return the share of a run's steps that remain after its newest intact checkpoint: 1 for a run without one.

    Args:
        place: learning rate and seed of the run.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
    """
    lr, seed = place
    return 1 - steps_done(run_folder(replace(config, lr=lr, seed=seed), options, corpus)) / config.steps


def work_left(runs: Sequence[Mapping[str, Any]], config: Config, options: dict[str, Any], corpus: str) -> float:
    """Return the work that a model still needs at least, in runs, of which the next one may have been begun.

    Args:
        runs: the model's finished runs.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
    """
    place = next_place(runs)
    return 0.0 if place is None else runs_left(runs) - 1 + share_left(place, config, options, corpus)


def seconds_on(devices: int, works: Sequence[float]) -> float:
    """Return when the last of ``devices`` is done, if each takes the next work as soon as it is free."""
    ends = [0.0] * devices
    for seconds in works:
        ends[ends.index(min(ends))] += seconds
    return max(ends)
