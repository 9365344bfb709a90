"""Train small language models for an experiment, and keep the record of each run.

    python -m runners.c4 convert .corpus manuals/ --clean --vocabulary 8000    # make the corpus, once
    python -m runners.c4.reference --data .corpus                              # train every missing run of every layer
    python -m runners.c4.reference --data .corpus --rows rt transformer my_layer:MyLayer
    python -m runners.c4.reference --data .corpus --dry-run                    # list missing runs and their time
    python -m runners.c4.reference --data .corpus --experiment transition      # RT against the Transformer
    python -m runners.c4.reference --data .corpus --experiment variants --rows rt-6-block-4 rt-6-block-16

``runners.c4.reference.rows`` says which models an experiment trains, and at which learning rates and seeds. ``ranking``
trains every layer with 4 layers of width 256 on 131M tokens; ``transition`` and ``variants`` train models of 30M
parameters on 301M tokens. All models of a folder read the same text; models of another text need another ``--folder``.

The records of a model are a file ``<row>.jsonl`` below ``results/reference/language-models``, which is written after
each run. A stopped run continues from its checkpoint in ``--out``, if that folder still exists. The checkpoints of a
finished run are deleted. On several GPUs, one process per GPU takes runs. Several commands may share both folders: each
run is trained by one of them. An error in a model is one line; the other models are trained, and the command ends with
status 1.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import gc
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from runners.c4.checkpoints import load_run, newest
from runners.c4.config import PRESETS, Config, identity
from runners.c4.costs import time_of_run
from runners.c4.data.corpus import Corpus, Windows
from runners.c4.data.prepare import open_sources
from runners.c4.data.sources import find_files
from runners.c4.data.tokenizer import file_beside
from runners.c4.distributed import World, world
from runners.c4.evaluation.evaluate import RecallSplit, split_recall, windows_together
from runners.c4.evaluation.gradients import SEQUENCES, sizes_by_distance
from runners.c4.loop import RunError
from runners.c4.model import layer_of
from runners.c4.pretraining import check_layer, check_memory, checked_options, corpus_of
from runners.c4.progress import Progress
from runners.c4.reference.rows import EXPERIMENTS, SEEDS, Place, open_places
from runners.c4.train import settings_of, train
from runners.device import find_devices
from runners.ending import others_continue, run_command, user_errors
from runners.files import rounded
from runners.gpus import is_worker, run_on_all_gpus, starts_workers
from runners.options import parse
from runners.progress import open_console
from runners.records import RECORD, TRAINED_REFERENCE, Record, read_all, write_all
from runners.runs import LOCK

RUNS = "reference-language-models"
"""Name of the folder of the runs below the results folder, so that no run of ``runners.c4`` itself is deleted."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train small language models for an experiment.

    Attributes:
        data: folder of texts and tokenizer, made by python -m runners.c4 convert.
        experiment: the models to train: every layer; RT and the Transformer; variants of RT in either parametrisation;
            those whose text is read once.
        rows: models of the experiment to train, all unless given; package.module:Class is a layer of your own.
        folder: where the models' files are stored; models of another text need another folder.
        out: results folder; runs that are not finished lie in reference-language-models below it.
        dry_run: print which runs are missing and how long training takes, and train nothing.
    """

    data: Path
    experiment: Literal["ranking", "transition", "variants", "variants-authors", "read-once"] = "ranking"
    rows: tuple[str, ...] = ()
    folder: Path = TRAINED_REFERENCE / "language-models"
    out: Path = Path("results")
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
        name: name of its row.
        config: configuration that its runs share.
        options: options of its layer that differ from their defaults.
        file: file of its records.
    """

    name: str
    config: Config
    options: dict[str, Any]
    file: Path

    def records(self) -> list[Record]:
        """Return the records of its finished runs.

        Raises:
            DamagedFileError: the file is damaged.
        """
        return [record for _, record in read_all(self.file)] if self.file.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = open_console(soft_wrap=True, quiet=is_worker())
    with user_errors(ValueError, OSError):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("run this command without torchrun: it starts one process per GPU by itself")
        options = parse(Options, arguments)
        find_files([str(options.data)])
        models, device = models_of(options), find_devices("auto")[0]
        check_files(models)

        # What is missing.
        places = {model.name: open_places(model.records()) for model in models}
        missing = [model for model in models if places[model.name]]
        console.print(f"{len(models) - len(missing)} of {len(models)} models are finished in {models[0].file.parent}")
        for model in missing:
            check_layer(model.config, model.options, device)
            if options.dry_run:
                runs = ", ".join(f"lr {lr:g} seed {seed}" for lr, seed in places[model.name])
                taken = time_of_run(model.config, model.options, device)
                console.print(f"missing: {model.name}, {runs}; a run takes {taken}")
    if options.dry_run or not missing:
        return

    whole = run_on_all_gpus("runners.c4.reference", arguments) if starts_workers() else train_models(models)
    if left := [model.name for model in missing if open_places(model.records())]:
        console.print(f"not finished: {', '.join(left)} (failed, or trained by other processes)")
    if not whole:
        raise SystemExit(1)


def models_of(options: Options) -> list[Model]:
    """Return the chosen models.

    Raises:
        ValueError: the experiment has no such model, its layer cannot be built, or the data have no tokenizer.
    """
    experiment, tokenizer = EXPERIMENTS[options.experiment], file_beside(options.data)
    if not tokenizer.is_file():
        raise ValueError(f"no {tokenizer}: give --data a folder that python -m runners.c4 convert made")
    models = []
    for name in dict.fromkeys(options.rows or experiment.rows):
        row = experiment.row(name)
        places: dict[str, Any] = {"data": (str(options.data),), "tokenizer": str(tokenizer), "out": options.out / RUNS}
        config = replace(PRESETS[experiment.preset], mixer=row.mixer, **row.settings, **places)
        file = options.folder / experiment.folder / f"{name.replace(':', '.')}.jsonl"
        models.append(Model(name=name, config=config, options=checked_options(config, dict(row.options)), file=file))
    return models


def check_files(models: Sequence[Model]) -> None:
    """Check that the records of all models are of today's text and settings.

    Raises:
        ValueError: they are not; the message says what to do.
    """
    config = models[0].config  # all models read the same text
    corpus, *_ = open_sources(config.data, str(config.tokenizer), config.validation_tokens + 1)
    for model in models:
        expected = settings_of(model.config, model.options)
        for record in model.records():
            known = {**vars(record), "settings": {n: record.settings.get(n) for n in expected["settings"]}}
            known["mixer_config"] = vars(layer_of(model.config, {})[1]) | record.mixer_config  # older than a switch
            if record.task_config["name"] != corpus:
                raise ValueError(f"{model.file} is of another text: give yours a --folder of its own")
            if any(known[name] != value for name, value in expected.items()):
                raise ValueError(
                    f"{model.file} is of other settings: give another --folder, or delete it to train again"
                )


def train_models(models: Sequence[Model]) -> bool:
    """Train the missing runs of models; return False if one of them stopped with an error.

    A run that another process trains counts as trained.
    """
    failed: list[str] = []
    console = open_console()
    config = models[0].config
    with user_errors(ValueError, OSError), world("auto") as here:
        corpus = corpus_of(config, console)
        windows = Windows(corpus, "validation", config.seq_len, None)
        split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
        for model in models:
            with others_continue(model.name, failed, RunError, ValueError):
                check_memory(model.config, model.options, here)
                for record in model.records():  # whose folder a killed command has left
                    discard(model, (record.lr, record.seed), corpus)
                while any(train_place(model, p, corpus, split, here, console) for p in open_places(model.records())):
                    continue
    return not failed


def train_place(model: Model, place: Place, corpus: Corpus, split: RecallSplit, world: World, console: Console) -> bool:
    """Train a run of a model and add its record to the model's file; return False if another process does so.

    Raises:
        RunError: the run cannot continue.
        StoppedError: the process was asked to stop; the same call continues the run.
        DamagedFileError: the last checkpoint is damaged.
        OSError: a file cannot be written.
    """
    gc.collect()  # the CUDA graphs of a run before hold their memory in cycles of references
    config = replace(model.config, lr=place[0], seed=place[1])
    model.file.parent.mkdir(parents=True, exist_ok=True)
    lock = model.file.with_name(f".{model.file.stem}-lr{config.lr:g}-seed{config.seed}.lock")
    with suppress(Timeout), FileLock(lock, timeout=0), closing(Progress(console, config)) as progress:
        if place not in open_places(model.records()):  # another process may have ended it before the lock
            return False
        record = train(config, model.options, corpus, world, progress)
        if record.diverged_step is None:
            record = measured(record, config, identity(config, model.options, corpus.folder.name).folder, split, world)
        text = {**record.task_config, "recall_share": split.share, "rare": split.rare}
        record = replace(record, study=model.name, task_config=text)

        with FileLock(model.file.with_name(f".{model.file.stem}.lock")):
            write_all(model.file, [*model.records(), record])
        discard(model, place, corpus)

        loss = record.metrics.get("validation", {}).get("loss")
        said = f"diverged at step {record.diverged_step}" if loss is None else f"validation {loss:.4f}"
        run = f"lr {config.lr:g}, seed {config.seed}"
        console.print(f"{model.file}: {run}: {said}, {record.seconds:.0f} s", soft_wrap=True)
        return True
    return False


def measured(record: Record, config: Config, folder: Path, split: RecallSplit, world: World) -> Record:
    """Return the record of a run with the losses of recall tokens and of others, and rounded curves.

    Runs of other seeds than the first are also measured for the size of their gradients by distance.
    """
    # An earlier checkpoint would have other losses than the result, so a damaged last one is an error.
    model, _ = load_run(newest(folder) or folder)
    recall, rest = split.losses(model.to(world.device), windows_together(config, world.device), world.device)
    validation = {**record.metrics["validation"], "recall_loss": recall, "rest_loss": rest}
    curve = {name: [*map(rounded, values)] if name != "step" else values for name, values in record.curve.items()}

    # A single window has no interval and is not measured.
    gradient, count = None, min(SEQUENCES, len(split.windows))
    if config.seed != SEEDS[0] and count > 1:
        found = sizes_by_distance(model, torch.from_numpy(split.windows.batch(0, count)), world.device)
        gradient = {"norm": [*found.gradient], "half_width": [*found.half_width]}
    metrics = {**record.metrics, "validation": validation}
    return replace(record, metrics=metrics, curve=curve, gradient=gradient)


def discard(model: Model, place: Place, corpus: Corpus) -> None:
    """Delete the folder of a run that the model's file holds, unless another process trains it for another file.

    The record goes first, because a run that has a record but no model would neither be trained nor measured.
    """
    config = replace(model.config, lr=place[0], seed=place[1])
    folder = identity(config, model.options, corpus.folder.name).folder
    if folder.is_dir():
        with suppress(Timeout), FileLock(folder / LOCK, timeout=0):
            (folder / RECORD).unlink(missing_ok=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoints")
