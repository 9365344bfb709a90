"""Train every layer as a small language model, and keep the figures of each in a file.

    python -m runners.c4 convert .corpus manuals/ --clean --vocabulary 8000    # the text, once
    python -m runners.c4.reference --data .corpus                              # every missing run
    python -m runners.c4.reference --data .corpus --layers rt transformer
    python -m runners.c4.reference --data .corpus --dry-run                    # which runs are missing, and how long

A model has 4 layers of width 256 and reads 131M tokens (the preset ``ranking``). Each layer is trained at learning
rates 1e-3, 3e-3 and 1e-2, further ones while the best is at the edge, and a second seed of the best. All layers read
the same tokens in the same order.

The figures of a layer are a small file in ``results/reference/language-models``, written after each run. A stopped run
continues from its checkpoint in ``--out``, if that folder is still there. Several commands may share both folders: each
layer is trained by one of them.
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
from statistics import fmean
from typing import Any

import tyro
from filelock import FileLock, Timeout
from rich.console import Console

from mixers import MIXERS
from runners.c4.config import Config
from runners.c4.corpus.convert import FOLDER_OF_TOKENIZER
from runners.c4.corpus.prepare import Corpus
from runners.c4.corpus.sources import find_files
from runners.c4.corpus.windows import Windows
from runners.c4.distributed import World, world
from runners.c4.errors import RunError
from runners.c4.evaluation.recall import RecallSplit, split_recall
from runners.c4.presets import PRESETS
from runners.c4.pretraining import check, check_memory, corpus_of
from runners.c4.reference.cells import (
    FOLDER,
    Cell,
    cell_file,
    check_cell,
    is_stale,
    new_cell,
    next_place,
    read_cell,
    runs_left,
    train_place,
    write_cell,
)
from runners.c4.watchers import Bar
from runners.cli import check_out, cli, run_command, user_errors
from runners.device import device_name, find_devices
from runners.progress import spell

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Train every layer as a small language model.

    Attributes:
        data: folder that python -m runners.c4 convert made: texts and tokenizer.
        layers: registered layers to train, all unless given.
        folder: where the layers' files are stored.
        out: folder of the runs behind them.
        dry_run: print which runs are missing and how long training takes, and train nothing.
    """

    data: Path
    layers: tuple[str, ...] = ()
    folder: Path = FOLDER
    out: Path = Path("results/reference-language-models")
    dry_run: bool = False

    @property
    def tokenizer(self) -> Path:
        """File of the tokenizer."""
        return self.data / FOLDER_OF_TOKENIZER / "tokenizer.json"

    def config(self, mixer: str) -> Config:
        """Return the configuration that all runs of a layer share."""
        data, tokenizer = (str(self.data),), str(self.tokenizer)
        return replace(PRESETS["ranking"], mixer=mixer, data=data, tokenizer=tokenizer, out=self.out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    console = Console(markup=False)
    with user_errors(ValueError, OSError):
        arguments = sys.argv[1:] if arguments is None else arguments
        options = cli(ReferenceOptions, ReferenceOptions(data=tyro.MISSING), arguments)
        check_out(options.out)
        find_files([str(options.data)])
        if not options.tokenizer.is_file():
            raise ValueError(f"no {options.tokenizer}: give --data a folder that python -m runners.c4 convert made")
        configs = {mixer: options.config(mixer) for mixer in chosen_layers(options.layers)}
        for config in configs.values():
            check(config, {}, ())
        cells = {mixer: read_cell(cell_file(options.folder, mixer)) for mixer in configs}
        print_state(cells, configs, options, partial(console.print, soft_wrap=True))
    if options.dry_run:
        return

    missing = [mixer for mixer, cell in cells.items() if cell is None or next_place(cell["runs"]) is not None]
    if missing and not train_layers([configs[mixer] for mixer in missing], options, console):
        raise SystemExit(1)


def chosen_layers(names: Sequence[str]) -> list[str]:
    """Return the layers by name, all registered ones if there are no names.

    Raises:
        ValueError: there is no such layer.
    """
    if unknown := [name for name in names if name not in MIXERS]:
        raise ValueError(f"no layer {unknown[0]!r}: choose from {', '.join(MIXERS)}")
    return list(dict.fromkeys(names)) or list(MIXERS)


def print_state(
    cells: Mapping[str, Cell | None], configs: Mapping[str, Config], options: ReferenceOptions, say: Say
) -> None:
    """Say which layers are finished, which runs the others lack at least, and how long these take on this device."""
    left = {mixer: runs_left(cell["runs"] if cell else []) for mixer, cell in cells.items()}
    finished = sum(count == 0 for count in left.values())
    say(f"{finished} of {len(cells)} layers are finished in {options.folder}")
    for mixer, cell in cells.items():
        if cell is not None and is_stale(cell, configs[mixer]):
            say(f"stale: {mixer} was trained by code that trains otherwise: delete its file to train it again")
    if options.dry_run:
        for mixer, count in left.items():
            if count:
                say(f"missing: {mixer}, {count} run{'s' * (count > 1)} at least")
    if finished == len(cells):
        return

    config = next(iter(configs.values()))
    tokens = config.steps * config.batch_size * config.seq_len
    runs = sum(left.values())
    say(f"to train: at least {runs} runs of {tokens:,} tokens; Ctrl-C stops, and the same command resumes")
    known = seconds_of_runs(options.folder, device_name(find_devices("auto")[0]))
    if known:
        others = fmean(known.values())
        estimate = sum(count * known.get(mixer, others) for mixer, count in left.items())
        unknown = [mixer for mixer, count in left.items() if count and mixer not in known]
        guess = f", with the mean of the others for {', '.join(unknown)}" if unknown else ""
        say(f"time: about {spell(estimate)} as the finished runs took on this device{guess}")
    else:
        say("time: not known before a first run is finished on this device")


def seconds_of_runs(folder: Path, device: str) -> dict[str, float]:
    """Return the mean seconds of a run of each layer that has runs of a device."""
    found = {}
    for mixer in MIXERS:
        runs = (read_cell(cell_file(folder, mixer)) or {"runs": []})["runs"]
        if seconds := [
            run["seconds"] for run in runs if run["device"] == device and run["validation_loss"] is not None
        ]:
            found[mixer] = fmean(seconds)
    return found


def train_layers(configs: Sequence[Config], options: ReferenceOptions, console: Console) -> bool:
    """Train the missing runs of layers; return whether all could be trained or are another process's."""
    whole = True
    with world("auto") as here, user_errors(ValueError, OSError):
        corpus = corpus_of(configs[0], console)
        console.print(corpus.shortage(configs[0].seq_len), soft_wrap=True)
        windows = Windows(corpus, "validation", configs[0].seq_len, None)
        split = split_recall(corpus, windows, configs[0].validation_tokens, configs[0].seq_len)

        for config in configs:
            try:
                train_if_free(config, corpus, split, here, options, console)
            except RunError as error:
                print(f"{config.mixer} stopped: {error}", file=sys.stderr)
                whole = False
    return whole


def train_if_free(
    config: Config, corpus: Corpus, split: RecallSplit, here: World, options: ReferenceOptions, console: Console
) -> None:
    """Train the missing runs of a layer, unless another process does.

    Raises:
        RunError: a run cannot continue.
        StoppedError: the process was asked to stop; its state is saved.
        ValueError: the layer's file is of another corpus or other settings.
    """
    file = cell_file(options.folder, config.mixer)
    locks = options.out / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(locks / config.mixer, timeout=0):
            cell = read_cell(file) or new_cell(config, corpus, split)
            check_cell(cell, config, corpus, file)
            check_memory(config, {}, here)
            while (place := next_place(cell["runs"])) is not None:
                with closing(Bar(console)) as bar:
                    run = train_place(place, config, corpus, split, here, [bar])
                cell["runs"].append(run)
                write_cell(file, cell)
                console.print(f"{file}: {in_words(run)}", soft_wrap=True)
    except Timeout:
        return


def in_words(run: Mapping[str, Any]) -> str:
    """Return the figures of a run in a line."""
    where = f"lr {run['lr']:g}, seed {run['seed']}"
    if run["validation_loss"] is None:
        return f"{where}: diverged at step {run['diverged_at']}"
    losses = f"validation {run['validation_loss']:.4f}, recall {run['recall_loss']:.4f}, rest {run['rest_loss']:.4f}"
    return f"{where}: {losses}, {run['seconds']:.0f} s"


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoints")
