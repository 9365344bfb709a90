"""The file of a reference language model: the order of its runs, and how they are kept.

A model is trained at three learning rates with the first seed. While the best rate is the lowest or highest one tried,
its next neighbour is tried as well. The best rate is then trained with the other seeds. If one of them diverges, the
next best rate takes its place. The file of the model is written after each run, so that the files alone show which runs
are missing. Processes share the runs of a model: each run has a lock beside the file, and the file has one for as long
as a run is added to it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from runners.c4.config import Config
from runners.c4.corpus.prepare import Corpus
from runners.c4.cost import flops_per_token, model_parameters
from runners.c4.evaluation.recall import RecallSplit
from runners.c4.model import layer_of
from runners.files import check_entries, damaged, make_durable, read_json, write_json

SHIPPED = Path(__file__).parents[3] / "results" / "reference"
NAME = "language-models"
"""Name of the folder below the reference results."""
FOLDER = (SHIPPED if SHIPPED.is_dir() else Path("results/reference")) / NAME
"""Lies in the checkout of this file; without a checkout, in the current folder."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Learning rates that may be tried, in ascending order."""
FIRST = RATES[3:6]
"""Learning rates at which every model is trained. At 1e-3, every loss measured with RT or the Transformer is at least
0.3 nats above that at 3e-3 (results/LOG.md). A model whose best rate is 3e-3 is trained at 1e-3 as well."""
SEEDS = (0, 1)

KINDS: dict[str, Any] = {
    **dict.fromkeys(("options", "config", "corpus"), dict),
    **dict.fromkeys(("layer", "family"), str),
    **dict.fromkeys(("tokens", "parameters_without_embeddings", "flops_per_token"), int),
    "runs": list,
}
"""Types of the entries of a model's file that are read, by name; below those of its corpus and of a run."""
KINDS_OF_CORPUS: dict[str, Any] = {"name": str, "vocab_size": int, "train_tokens": int}
KINDS_OF_RUN: dict[str, Any] = {
    "lr": float,
    "seed": int,
    "device": str,
    "code": str,
    "trajectory": list,
    "validation_loss": float | int | None,
}
KINDS_OF_CONVERGED_RUN: dict[str, Any] = {
    **dict.fromkeys(("recall_loss", "rest_loss", "seconds"), float | int),
    "bits_per_byte": float | int | None,
    "curve": list,
}
REMEDY = "move it elsewhere, or delete it to train the model again"

Cell = dict[str, Any]
Place = tuple[float, int]
"""Learning rate and seed of a run."""


def cell_file(folder: Path, name: str) -> Path:
    """Return the file of a model's runs; the colon in the name of a user's own layer becomes a dot."""
    return folder / f"{name.replace(':', '.')}.json"


def cell_files(folder: Path) -> list[Path]:
    """Return the files of all models in a folder, without those that another process is writing or has left."""
    return sorted(folder.glob("[!.]*.json"))


def read_cell(file: Path) -> Cell | None:
    """Return the content of a model's file; None if there is none.

    Raises:
        DamagedFileError: it is damaged, or no model's file.
    """
    if not file.exists():
        return None

    cell: Cell = read_json(file, REMEDY)
    check_entries(file, cell, KINDS, REMEDY)
    check_entries(file, cell["corpus"], KINDS_OF_CORPUS, REMEDY)
    for run in cell["runs"]:
        check_entries(file, run, KINDS_OF_RUN, REMEDY)
        if run["lr"] not in RATES:
            raise damaged(file, f"a run has the learning rate {run['lr']:g}, which is never tried", REMEDY)
        if run["validation_loss"] is not None:
            check_entries(file, run, KINDS_OF_CONVERGED_RUN, REMEDY)
    return cell


def runs_in(file: Path) -> list[dict[str, Any]]:
    """Return the runs in a model's file; none if there is no file.

    Raises:
        DamagedFileError: it is damaged, or no model's file.
    """
    cell = read_cell(file)
    return [] if cell is None else list(cell["runs"])


def open_places(runs: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Return learning rate and seed of each run that can be trained after ``runs``; none if the model is finished.

    None of them depends on the loss of another, so several processes may train them at the same time.
    """
    losses = losses_by_rate(runs)
    if rates := [rate for rate in FIRST if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Neighbours of the best rate.
    best = min(losses, key=lambda rate: (losses[rate], rate))
    at = RATES.index(best)
    if rates := [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Other seeds, unless every run diverged.
    done = {run["seed"] for run in runs if run["lr"] == best}
    return [(best, seed) for seed in SEEDS if seed not in done] if math.isfinite(losses[best]) else []


@contextmanager
def free_place(file: Path, fits: Callable[[Place], bool]) -> Iterator[Place | None]:
    """Give and lock the first run of a model that can be trained; None if there is none.

    Args:
        file: file of the model.
        fits: whether to train a run; it is asked before the run is locked.

    Raises:
        DamagedFileError: the file is damaged, or no model's file.
    """
    for place in filter(fits, open_places(runs_in(file))):
        with locked(file, place) as is_free:
            if is_free and place in open_places(runs_in(file)):  # another process may have ended it before the lock
                yield place
                return
    yield None


@contextmanager
def locked(file: Path, place: Place) -> Iterator[bool]:
    """Lock a run of a model; False if another process has locked it."""
    rate, seed = place
    with ExitStack() as stack:
        is_free = True
        try:
            stack.enter_context(FileLock(file.with_name(f".{file.stem}-lr{rate:g}-seed{seed}.lock"), timeout=0))
        except Timeout:
            is_free = False
        yield is_free


def chosen_rate(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the learning rate with the lowest validation loss of the first seed; None before a run has converged.

    A rate at which any seed diverged is not chosen.
    """
    losses = {rate: loss for rate, loss in losses_by_rate(runs).items() if math.isfinite(loss)}
    return min(losses, key=lambda rate: (losses[rate], rate), default=None)


def losses_by_rate(runs: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """Return the validation loss of the first seed at each learning rate; infinity if any seed diverged there."""
    losses = {run["lr"]: run["validation_loss"] for run in runs if run["seed"] == SEEDS[0]}
    diverged = {run["lr"] for run in runs if run["validation_loss"] is None}
    return {rate: math.inf if rate in diverged else loss for rate, loss in losses.items()}


def runs_left(runs: Sequence[Mapping[str, Any]]) -> int:
    """Return the least number of runs that a model still needs, whatever their losses turn out to be."""
    return min(_runs_if_best(rate, runs) for rate in RATES)


def _runs_if_best(best: float, runs: Sequence[Mapping[str, Any]]) -> int:
    """Return how many runs are left if ``best``, not yet tried, is the best rate and the others to try diverge.

    If ``best`` is tried already, all rates to try diverge. The other seeds of the chosen rate converge.
    """
    imagined = [*runs]
    while places := open_places(imagined):
        rate, seed = places[0]
        loss = None if seed == SEEDS[0] and rate != best else 0.0
        imagined.append({"lr": rate, "seed": seed, "validation_loss": loss})
    return len(imagined) - len(runs)


def new_cell(config: Config, options: dict[str, Any], corpus: Corpus, split: RecallSplit) -> Cell:
    """Return the content of a model's file before its first run.

    Args:
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: data of the runs.
        split: the recall tokens of the validation data.
    """
    layer, layer_config = layer_of(config, options)
    parameters, tables = model_parameters(config, options, corpus.manifest.vocab_size)
    return {
        "layer": config.mixer,
        "options": asdict(layer_config),
        "family": layer.family,
        "config": settings_of(config),
        "tokens": config.steps * config.batch_size * config.seq_len,
        "parameters": parameters,
        "parameters_without_embeddings": parameters - tables,
        "flops_per_token": flops_per_token(config, options, corpus.manifest.vocab_size),
        "corpus": {
            "name": corpus.folder.name,
            "tokenizer": corpus.manifest.tokenizer,
            "sources": corpus.manifest.sources,
            "vocab_size": corpus.manifest.vocab_size,
            "train_tokens": corpus.tokens("train"),
            "validation_tokens": corpus.targets("validation", config.seq_len),
            "recall_share": split.share,
            "rare": split.rare,
        },
        "runs": [],
    }


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that all runs of a model share."""
    own = ("mixer", "lr", "seed")
    places = ("out", "data", "tokenizer", "device", "dry_run", "search", "downstream", "parallel")
    computing = ("micro_batch_size", "recompute", "checkpoint_every")
    left_out = {*own, *places, *computing}
    return {name: y for name, y in asdict(config).items() if name not in left_out and not name.startswith("wandb")}


def settings_in(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a file names; its runs had the defaults of settings that are newer than it."""
    return settings_of(Config()) | cell["config"]


def write_cell(file: Path, cell: Mapping[str, Any]) -> None:
    """Write a model's file durably, with the chosen learning rate and whether all runs are there."""
    write_json(file, {**cell, "chosen": chosen_rate(cell["runs"]), "complete": not open_places(cell["runs"])})
    make_durable(file)
