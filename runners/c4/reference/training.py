"""The training of one run of a reference language model, and its entry in the model's file.

Runs of other seeds than the first are also measured for the size of their gradients by distance
(``runners.c4.evaluation.gradients``).
"""

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from filelock import FileLock, Timeout

from mixers.models import LanguageModel
from runners.c4.checkpoints import discard, load_model, newest
from runners.c4.config import Config
from runners.c4.curve import read_curve
from runners.c4.data.corpus import Corpus, Windows
from runners.c4.distributed import World
from runners.c4.errors import DivergedError
from runners.c4.evaluation.evaluate import RecallSplit, windows_together
from runners.c4.evaluation.gradients import SEQUENCES, sizes_by_distance
from runners.c4.identity import run_code, run_folder
from runners.c4.records import read_record
from runners.c4.reference.cells import ConvergedRun, DivergedRun, Run
from runners.c4.reference.order import SEEDS, Place
from runners.c4.rehearsal import trajectory, unrehearsed_code
from runners.c4.train import LOCK, train
from runners.c4.watchers import Watcher
from runners.device import device_name
from runners.files import rounded


def train_place(
    place: Place,
    config: Config,
    options: dict[str, Any],
    corpus: Corpus,
    split: RecallSplit,
    world: World,
    watchers: Sequence[Watcher],
) -> Run:
    """Train one run, or read its result if it is finished; return its entry in the model's file.

    Raises:
        RunError: the run cannot continue.
        StoppedError: the process was asked to stop; the same call continues the run.
        DamagedFileError: the last checkpoint is damaged.
    """
    # The CUDA graphs of the run before hold their memory in cycles of references, until the collector runs.
    gc.collect()

    config = replace(config, lr=place[0], seed=place[1])
    folder = run_folder(config, options, corpus.folder.name)
    described: dict[str, Any] = {
        "lr": config.lr,
        "seed": config.seed,
        "device": device_name(world.device),
        "code": run_code(config),
        "unrehearsed_code": unrehearsed_code(),
        "trajectory": trajectory(config, options),
    }
    try:
        result = train(config, options, corpus, world, watchers)
    except DivergedError:
        diverged = read_record(folder / "diverged.json")
        assert diverged is not None  # ``train`` has written or read it
        return DivergedRun(**described, diverged_at=diverged["step"])

    # An earlier checkpoint would have other losses than the result, so a damaged last one is an error.
    model, _ = load_model(newest(folder) or folder)
    began = monotonic()
    recall, rest = split.losses(model.to(world.device), windows_together(config, world.device), world.device)
    evaluation_seconds = monotonic() - began
    curve = [
        (row.step, rounded(row.loss), rounded(row.validation_loss))
        for row in read_curve(folder, config.steps)
        if row.validation_loss is not None
    ]
    bytes_per_token = result["corpus"]["bytes_per_token"]
    return ConvergedRun(
        **described,
        validation_loss=result["validation_loss"],
        bits_per_byte=bytes_per_token and result["validation_loss"] / math.log(2) / bytes_per_token,
        recall_loss=recall,
        rest_loss=rest,
        curve=curve,
        seconds=round(result["seconds"], 1),
        evaluation_seconds=round(evaluation_seconds, 2),
        **(_gradients(model, split.windows, world) if config.seed != SEEDS[0] else {}),
        tokens_per_second=round(result["tokens_per_second"]),
        versions=result["versions"],
    )


def _gradients(model: LanguageModel, windows: Windows, world: World) -> dict[str, Any]:
    """Return the gradient norm at each distance in the first validation windows, and half its 95% interval.

    A single window has no interval and is not measured.
    """
    count = min(SEQUENCES, len(windows))
    if count < 2:
        return {}
    tokens_ST = torch.from_numpy(windows.batch(0, count))
    found = sizes_by_distance(model, tokens_ST, world.device)
    return {"gradient": found.gradient, "gradient_half_width": found.half_width}


def folder_of(place: Place, config: Config, options: dict[str, Any], corpus: str) -> Path:
    """Return the folder of a run.

    Args:
        place: learning rate and seed of the run.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
    """
    lr, seed = place
    return run_folder(replace(config, lr=lr, seed=seed), options, corpus)


def discard_run(folder: Path) -> None:
    """Delete the folder of a run that a model's file holds: one of 30M parameters takes about a gigabyte.

    A run that another process trains for a file in another folder keeps its folder.
    """
    with suppress(Timeout), FileLock(folder / LOCK, timeout=0):
        discard(folder)
