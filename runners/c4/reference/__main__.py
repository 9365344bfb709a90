"""Train small language models for an experiment, and keep the figures of each in a file.

    python -m runners.c4 convert .corpus manuals/ --clean --vocabulary 8000    # make the corpus, once
    python -m runners.c4.reference --data .corpus                              # train every missing run of every layer
    python -m runners.c4.reference --data .corpus --rows rt transformer my_layer:MyLayer
    python -m runners.c4.reference --data .corpus --dry-run                    # list missing runs and their time
    python -m runners.c4.reference --data .corpus --minutes 60                 # begin only what ends within an hour
    python -m runners.c4.reference --data .corpus --experiment transition      # RT against the Transformer
    python -m runners.c4.reference --data .corpus --experiment variants --rows rt-6-block-4 rt-6-block-16

``runners.c4.reference.experiments`` says which models an experiment trains. ``ranking`` trains every layer with 4
layers of width 256 on 131M tokens; ``transition`` and ``variants`` train models of 30M parameters on 301M tokens. Each
model is trained at learning rates 3e-3, 1e-2 and 3e-2. While the best rate is the lowest or highest one tried, its next
neighbour is tried as well. The best rate is then trained with a second seed. If that seed diverges, the next best rate
takes its place. All models of a folder read the same text; models of another text need another ``--folder``.

The figures of a model are kept in a small file below ``results/reference/language-models``, which is written after each
run. A stopped run continues from its checkpoint in ``--out``, if that folder still exists. The checkpoints of a
finished run are deleted. On several GPUs, one process per GPU takes runs. Several commands may share both folders: each
run is trained by one of them. With ``--minutes``, a run is left for another time if it is expected to end too late. A
stopped run counts for its remaining steps; a run whose time is not known begins. An error in a model is one line; the
other models are trained, and the command ends with status 1.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from filelock import FileLock
from rich.console import Console

from runners.c4.checks import check, check_memory, check_users_layer
from runners.c4.config import Config
from runners.c4.data.corpus import Corpus, Windows
from runners.c4.data.sources import find_files
from runners.c4.data.tokenizer import file_beside
from runners.c4.distributed import World, from_torchrun, world
from runners.c4.errors import RunError
from runners.c4.evaluation.evaluate import RecallSplit, split_recall
from runners.c4.pretraining import corpus_name_of, corpus_of
from runners.c4.reference.cells import (
    FOLDER,
    Cell,
    DivergedRun,
    Run,
    cell_file,
    cell_files,
    free_place,
    locked,
    new_cell,
    read_cell,
    runs_in,
    write_cell,
)
from runners.c4.reference.experiments import EXPERIMENTS
from runners.c4.reference.forecast import seconds_of_run, seconds_of_runs, seconds_on, share_left, work_left
from runners.c4.reference.order import Place, open_places, runs_left
from runners.c4.reference.staleness import check_cell, check_terms, is_stale
from runners.c4.reference.training import discard_run, folder_of, train_place
from runners.c4.watchers import Bar
from runners.cli import check_out, cli, shown_as
from runners.deadline import Deadline
from runners.device import device_name, find_devices
from runners.ending import others_continue, run_command, user_errors
from runners.gpus import beginning, is_worker, run_on_all_gpus, starts_workers
from runners.progress import spell

RUNS = "reference-language-models"
"""Name of the folder of the runs below the results folder, so that no run of ``runners.c4`` itself is deleted."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Train small language models for an experiment.

    Attributes:
        data: folder of texts and tokenizer, made by python -m runners.c4 convert.
        experiment: the models to train: every layer; RT and the Transformer; variants of RT in either parametrisation.
        rows: models of the experiment to train, all unless given; package.module:Class is a layer of your own.
        folder: where the models' files are stored; models of another text need another folder.
        out: results folder; runs that are not finished lie in reference-language-models below it.
        minutes: begin only runs that are expected to end within this time, for rented machines and batch queues.
        dry_run: print which runs are missing and how long training takes, and train nothing.
    """

    data: Path
    experiment: Literal["ranking", "transition", "variants", "variants-authors"] = "ranking"
    rows: Annotated[tuple[str, ...], shown_as()] = ()
    folder: Path = FOLDER
    out: Path = Path("results")
    minutes: Annotated[float | None, shown_as("FLOAT")] = None
    dry_run: bool = False

    @property
    def tokenizer(self) -> Path:
        """File of the tokenizer."""
        return file_beside(self.data)

    def models(self) -> list["Model"]:
        """Return the chosen models.

        Raises:
            ValueError: the experiment has no such model.
        """
        experiment = EXPERIMENTS[self.experiment]
        data = {"data": (str(self.data),), "tokenizer": str(self.tokenizer)}
        shared = {**data, "out": self.out / RUNS, "dry_run": self.dry_run}
        return [
            Model(
                name=name,
                config=experiment.config(name, **shared),
                options=dict(experiment.row(name).options),
                file=cell_file(self.folder / experiment.folder, name),
            )
            for name in dict.fromkeys(self.rows or experiment.rows)
        ]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
        name: name of its row.
        config: configuration that its runs share.
        options: options of its layer that differ from their defaults.
        file: file of its runs.
    """

    name: str
    config: Config
    options: dict[str, Any]
    file: Path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    began = beginning()
    console = Console(markup=False)
    arguments = sys.argv[1:] if arguments is None else arguments
    with user_errors(ValueError, OSError):
        if from_torchrun("WORLD_SIZE", 1) > 1:
            raise ValueError("run this command without torchrun: it starts one process per GPU by itself")
        if given := [word.partition("=")[0] for word in arguments if word.startswith("--mixer.")]:
            raise ValueError(
                f"{given[0]} is no option here: a row has the default options of its layer; for other ones, name a "
                "class derived from your layer whose defaults they are"
            )
        options = cli(ReferenceOptions, ReferenceOptions(data=tyro.MISSING), arguments)
        check_out(options.out, writes=not options.dry_run)
        check_out(options.folder, "--folder", writes=not options.dry_run)
        deadline = None if options.minutes is None else Deadline(options.minutes, began)
        find_files([str(options.data)])
        if not options.tokenizer.is_file():
            raise ValueError(f"no {options.tokenizer}: give --data a folder that python -m runners.c4 convert made")
        models = options.models()
        for model in models:
            check(model.config, model.options, ())
            if not is_worker():
                check_users_layer(model.config, model.options, find_devices("auto")[0])
        cells = {model.name: read_cell(model.file) for model in models}
        if not is_worker():
            corpus = corpus_name_of(models[0].config)  # all models read the same text
            check_files(cells, models, corpus)
            if not options.dry_run:
                discard_leftovers(cells, models, corpus)
            print_state(cells, models, corpus, options, partial(console.print, soft_wrap=True))
    missing = [model for model in models if (cell := cells[model.name]) is None or not cell.complete]
    if options.dry_run or not missing:
        return

    if starts_workers():
        whole = run_on_all_gpus("runners.c4.reference", arguments, began)
    else:
        whole = train_models(models, deadline, options, console)
    if not is_worker():
        with user_errors(ValueError, OSError):
            print_unfinished(missing, deadline)
    if not whole:
        raise SystemExit(1)


def check_files(cells: Mapping[str, Cell | None], models: Sequence[Model], corpus: str) -> None:
    """Check that today's command can add to the files of all models, and that their folder holds no other text.

    Raises:
        ValueError: a file in the folder belongs to another corpus, or one of a model to other settings, or that one is
            unfinished and stale.
    """
    folder = models[0].file.parent
    found = {file.stem: cell for file in cell_files(folder) if (cell := read_cell(file)) is not None}
    if others := [name for name, cell in found.items() if cell.corpus.name != corpus]:
        raise ValueError(
            f"{folder} holds models of another text ({', '.join(others)}): give yours a folder of its own, as by "
            "--folder my_language_models"
        )
    for model in models:
        if (cell := cells[model.name]) is not None:
            check_cell(cell, model.config, model.options, corpus, model.file)


def discard_leftovers(cells: Mapping[str, Cell | None], models: Sequence[Model], corpus: str) -> None:
    """Delete the folders that killed commands left of finished runs, but those that other processes use."""
    for model in models:
        cell = cells[model.name]
        for place in [(run.lr, run.seed) for run in cell.runs] if cell else []:
            folder = folder_of(place, model.config, model.options, corpus)
            if folder.is_dir():
                with locked(model.file, place) as is_free:
                    if is_free:
                        discard_run(folder)


def print_state(
    cells: Mapping[str, Cell | None], models: Sequence[Model], corpus: str, options: ReferenceOptions, say: Say
) -> None:
    """Print which models are finished, the least number of runs that the others need, and the time on this device."""
    done = {name: cell.runs if cell else [] for name, cell in cells.items()}
    left = {name: runs_left(runs) for name, runs in done.items()}
    finished = sum(count == 0 for count in left.values())
    say(f"{finished} of {len(cells)} models are finished in {models[0].file.parent}")
    for model in models:
        cell = cells[model.name]
        if cell is not None and left[model.name] == 0 and is_stale(cell, model.config, model.options):
            say(f"stale: {model.name} was trained by code that trains differently: delete its file to train it again")
    if options.dry_run:
        for name, count in left.items():
            say(f"missing: {name}, {count} run{'s' * (count > 1)} at least" if count else f"finished: {name}")
    if finished == len(cells):
        return

    config = models[0].config
    tokens = config.steps * config.batch_size * config.seq_len
    runs = sum(left.values())
    say(f"to train: at least {runs} runs of {tokens:,} tokens; Ctrl-C stops, and the same command resumes")
    devices = find_devices("auto")
    known = seconds_of_runs(models[0].file.parent, device_name(devices[0]))
    if not known:
        say("time: not known before a first run is finished on this device")
        return

    works = [
        work_left(done[model.name], model.config, model.options, corpus, seconds_of_run(model.file.stem, known))
        for model in models
    ]
    unknown = [model.name for model in models if left[model.name] and model.file.stem not in known]
    guess = f", with the mean of the others for {', '.join(unknown)}" if unknown else ""
    where = f" on {len(devices)} GPUs" if len(devices) > 1 else ""
    say(f"time: about {spell(seconds_on(len(devices), works))}{where} as the finished runs took on this device{guess}")


def train_models(
    models: Sequence[Model], deadline: Deadline | None, options: ReferenceOptions, console: Console
) -> bool:
    """Train the missing runs of models; return False if one of them stopped with an error.

    A run that another process trains counts as trained.
    """
    failed: list[str] = []
    config = models[0].config  # all models read the same text
    with user_errors(ValueError, OSError), world("auto") as here:
        corpus = corpus_of(config, console)
        if shortage := corpus.shortage(config.seq_len):
            console.print(shortage, soft_wrap=True)
        windows = Windows(corpus, "validation", config.seq_len, None)
        split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
        if split.share == 0:
            console.print("the validation text has no recall tokens: a recall loss of 0 says nothing")

        for model in models:
            with others_continue(model.name, failed, RunError, ValueError):
                train_model(model, corpus, split, here, deadline, options, console)
    return not failed


def train_model(
    model: Model,
    corpus: Corpus,
    split: RecallSplit,
    here: World,
    deadline: Deadline | None,
    options: ReferenceOptions,
    console: Console,
) -> None:
    """Train the missing runs of a model as far as the deadline allows, but those that other processes train.

    Raises:
        RunError: a run cannot continue.
        StoppedError: the process was asked to stop; its state is saved.
        ValueError: another process has meanwhile written a file that ``check_files`` refuses.
    """
    config, file, text = model.config, model.file, corpus.folder.name
    file.parent.mkdir(parents=True, exist_ok=True)
    if (cell := read_cell(file)) is not None:
        check_cell(cell, config, model.options, text, file)

    def fits(place: Place) -> bool:
        if deadline is None:
            return True
        known = seconds_of_runs(file.parent, device_name(here.device))
        return deadline.allows(share_left(place, config, model.options, text) * seconds_of_run(model.file.stem, known))

    while True:
        with free_place(file, fits) as place:
            if place is None:
                return
            if (cell := read_cell(file)) is not None:  # which another process may have written meanwhile
                check_terms(cell, config, model.options, text, file)
            check_memory(config, model.options, here)
            with closing(Bar(console)) as bar:
                run = train_place(place, config, model.options, corpus, split, here, [bar])
            add_run(run, model, corpus, split)
            discard_run(folder_of(place, config, model.options, text))
            console.print(f"{file}: {in_words(run)}", soft_wrap=True)


def add_run(run: Run, model: Model, corpus: Corpus, split: RecallSplit) -> None:
    """Add a run to a model's file, while no other process does so.

    Raises:
        ValueError: another process has meanwhile written a file of another text or of other settings.
    """
    config, file = model.config, model.file
    with FileLock(file.with_name(f".{file.stem}.lock")):
        cell = read_cell(file) or new_cell(config, model.options, corpus, split)
        check_terms(cell, config, model.options, corpus.folder.name, file)
        write_cell(file, replace(cell, runs=[*cell.runs, run]))


def print_unfinished(models: Sequence[Model], deadline: Deadline | None) -> None:
    """Name the models that are not finished after all."""
    left = [model.name for model in models if open_places(runs_in(model.file))]
    if left:
        reasons = ["failed", "trained by other processes"] + ([] if deadline is None else [str(deadline)])
        print(f"not finished: {', '.join(left)} ({', '.join(reasons[:-1])}, or {reasons[-1]})", file=sys.stderr)


def in_words(run: Run) -> str:
    """Return the figures of a run as one line of text."""
    where = f"lr {run.lr:g}, seed {run.seed}"
    if isinstance(run, DivergedRun):
        return f"{where}: diverged at step {run.diverged_at}"
    losses = f"validation {run.validation_loss:.4f}, recall {run.recall_loss:.4f}, rest {run.rest_loss:.4f}"
    return f"{where}: {losses}, {run.seconds:.0f} s"


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoints")
