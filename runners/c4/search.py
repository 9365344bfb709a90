"""The paper's grid of learning rates and second-moment decays as an Optuna study; each point is trained once."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import optuna
import pandas as pd
from optuna.distributions import FloatDistribution
from rich.console import Console

from runners.c4.checkpoints import StepRow
from runners.c4.config import Config, identity
from runners.c4.data.corpus import Corpus
from runners.c4.distributed import World
from runners.c4.loop import RunError
from runners.c4.progress import Progress
from runners.c4.train import BusyError, loss_of, train
from runners.records import Record
from runners.search import JOURNAL, Outcome, ask, catch_up, open_storage, open_study, report

LRS = (1e-3, 3e-3, 1e-2)
BETA2S = (0.95, 0.99)
SECONDS_BETWEEN_LOOKS = 5.0
"""Seconds to wait while other processes train the remaining points."""
Results = Sequence[tuple[Config, Record]]


def points_of(config: Config) -> list[Config]:
    """Return the configurations of the grid's runs."""
    return [replace(config, lr=lr, beta2=beta2, search=False) for lr, beta2 in product(LRS, BETA2S)]


def search(config: Config, options: dict[str, Any], corpus: Corpus, world: World, progress: Progress) -> Results:
    """Train all points of the grid (paper, section "C4 pretraining experiments").

    Several commands may share one search: each trains points that no other command is training.

    Args:
        config: configuration that the points share.
        options: options of the layer that differ from its defaults.
        corpus: the data.
        world: the processes of this command.
        progress: shows the runs, in the first process.

    Returns:
        Configuration and record of each point.

    Raises:
        RunError, StoppedError, ValueError, OSError: as ``train``.
    """
    points, found = points_of(config), dict[Config, Record]()
    space = {
        "lr": FloatDistribution(min(LRS), max(LRS), log=True),
        "beta2": FloatDistribution(min(BETA2S), max(BETA2S)),
    }
    runs = {point: identity(point, options, corpus.folder.name) for point in points}

    # The first process tells the study of all.
    study = None
    if world.is_first:
        name = f"c4 {runs[points[0]].study} seed {config.seed}"
        facts = {"value": "validation cross-entropy in nats per token", "steps": config.steps, "tokens": config.tokens}
        study = open_study(open_storage(str(config.out / JOURNAL)), name, "minimize", facts)

    while len(found) < len(points):
        for point in [point for point in points if point not in found]:
            run, params = runs[point].folder.name, {"lr": point.lr, "beta2": point.beta2}
            if study is not None:
                progress.after_step = partial(report_step, study, space, run, params)
            try:
                record = found[point] = train(point, options, corpus, world, progress)
            except BusyError:
                continue
            if study is not None:
                value = loss_of(record) if record.diverged_step is None else None
                curve = dict(zip(record.curve["step"], record.curve["loss"], strict=True))
                catch_up(study, space, [Outcome(run=run, params=params, value=value, curve=curve)])

        # The remaining points belong to other processes.
        if len(found) < len(points):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    progress.after_step = None
    return [(point, found[point]) for point in points]


def best(results: Results) -> tuple[Config, Record]:
    """Return the point with the lowest validation cross-entropy, and its record.

    Raises:
        RunError: every point diverged.
    """
    finite = [pair for pair in results if pair[1].diverged_step is None]
    if not finite:
        raise RunError("every point of the grid diverged")
    return min(finite, key=lambda pair: loss_of(pair[1]))


def print_results(results: Results, console: Console) -> None:
    """Print a table with one row per point, an arrow at the best point, and whether it is at an end of the grid."""
    chosen = best(results)[0]
    rows = []
    for point, record in results:
        loss = "diverged" if record.diverged_step else f"{loss_of(record):.4f}"
        rows.append({"": "→" * (point == chosen), "lr": point.lr, "beta2": point.beta2, "nats per token": loss})
    console.print(pd.DataFrame(rows).to_string(index=False), soft_wrap=True)
    if chosen.lr in (min(LRS), max(LRS)):
        end = "smallest" if chosen.lr == min(LRS) else "largest"
        console.print(f"lr {chosen.lr:g} is the {end} of the grid: try --lr, without --search", soft_wrap=True)


def report_step(
    study: optuna.Study,
    space: Mapping[str, FloatDistribution],
    run: str,
    params: Mapping[str, float],
    row: StepRow,
) -> None:
    """Report an evaluation of a run, whose trial begins with the first one."""
    if row.validation_loss is not None:
        report(study, ask(study, space, run, params), row.validation_loss, row.step)
