"""Pretraining from a configuration to a result: one run, or the paper's grid of runs.

The Python function ``pretrain`` and the command ``python -m runners.c4`` both build a configuration for
``train_config``.
"""

import gc
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import nn

from mixers import MIXERS
from mixers.base import Layer
from mixers.contract import check_foreign, warn_unused
from mixers.named import name_of
from mixers.options import converted
from mixers.registry import building, find_mixer
from runners.c4.config import PRESETS, Config, identity, with_tokenizer
from runners.c4.costs import model_parameters
from runners.c4.data.corpus import Corpus
from runners.c4.data.prepare import prepare
from runners.c4.distributed import World, require_shared, world
from runners.c4.evaluation.downstream import read_items
from runners.c4.loop import RunError
from runners.c4.model import layer_of
from runners.c4.progress import Progress
from runners.c4.train import loss_of, train
from runners.device import require_memory
from runners.options import applicable, from_keywords
from runners.progress import open_console
from runners.records import Record, read_all


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run; after a search, its best run.

    Attributes:
        folder: folder of the run's files.
        record: record of the run; ``record.metrics`` has its figures by split.
        chart: PNG file with the curves of all runs on the same corpus.
        config: configuration of the run.
        place: place by validation loss among the runs in the results folder that read as many tokens of the same text,
            such as ``2nd of 5``; known to the first process.
    """

    folder: Path
    record: Record
    chart: Path
    config: Config
    place: str = ""

    @property
    def validation_loss(self) -> float:
        """Validation cross-entropy after the last step, in nats per token."""
        return loss_of(self.record)

    def curve(self) -> list[dict[str, Any]]:
        """Return one dict per step, with the fields of ``runners.c4.checkpoints.StepRow`` as keys; NaN for no value.

        ``pandas.DataFrame(result.curve())`` makes a table of it.
        """
        return pd.read_csv(self.folder / "curve.csv").to_dict("records")


def pretrain(
    mixer: str | type[nn.Module] = "rt",
    *,
    preset: str = "paper",
    mixer_options: dict[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Pretrain a language model; continue an interrupted run; return the result of a finished one.

    The command ``python -m runners.c4`` with the same options trains the same run.

    Args:
        mixer: layer to train: a registered name, ``package.module:Class``, a class, or a stack such as
            ``3*gated-deltanet+transformer``, repeated to the number of layers.
        preset: ``paper``, ``tiny``, which trains in two minutes on a CPU, ``ranking`` or ``30m``
            (``runners.c4.reference``).
        mixer_options: options of the layer, such as ``{"block": 4}``, of a stack ``{"rt__block": 4}``; the number of
            heads is ``heads``.
        progress: whether to print progress.
        **options: other attributes of ``runners.c4.config.Config``, such as ``layers``, ``data``, ``steps`` or ``lr``;
            ``data`` takes one path or several.

    Raises:
        TypeError: there is no such option.
        ValueError: an option is invalid, or data or tokenizer are not available; the message says what to do.
        RunError: the run diverged, another process trains it, or memory is full.
        OSError: a file cannot be written, for example because the disk is full.
        StoppedError: Ctrl-C or SIGTERM during training; the state is saved, and the same call continues the run.
    """
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}: choose from {', '.join(PRESETS)}")
    for name in {"data", "tokenizer", "downstream"} & options.keys():
        paths = options[name] if isinstance(options[name], list | tuple) else [options[name]]
        texts = tuple(fspath(path) if isinstance(path, PathLike) else path for path in paths)
        options[name] = texts if name == "data" else texts[0]

    name, layer_options = name_of(mixer, MIXERS), mixer_options or {}
    given = from_keywords(PRESETS[preset], "pretrain", {"mixer": name, **options})
    own = applicable("mixer", layer_options, {name: find_mixer(name).Config}, print)[name]
    config = with_tokenizer(given)
    own = checked_options(config, own)
    with world(config.device) as here:
        check_layer(config, own, here.device)
        return train_config(config, own, here, open_console(quiet=not (progress and here.is_first)))


def checked_options(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Check what can be checked before anything is written.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.

    Returns:
        The options of the layer that differ from its defaults.

    Raises:
        ValueError: the layer cannot be built, or the downstream sets cannot be read.
    """
    layer, defaults = layer_of(config, {})
    options = {n: y for n, y in converted(layer.Config, options).items() if y != getattr(defaults, n)}
    with torch.random.fork_rng(devices=[]):
        _build_layer(config, options)
    if config.downstream is not None:
        read_items(config.downstream)
    return options


def check_layer(config: Config, options: dict[str, Any], device: torch.device) -> None:
    """Check a layer from outside, and warn of parameters that no gradient reaches.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
        device: where the layer is called.

    Raises:
        ContractError: the layer's outputs or steps are wrong.
        Exception: the layer's own error.
    """
    made = partial(_build_layer, config, options)
    warn_unused(config.mixer, check_foreign(config.mixer, made, device, lambda: config.seq_len, several=False))


def check_memory(config: Config, options: dict[str, Any], here: World) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Raises:
        ValueError: model and activations take more memory than the device has.
    """
    # Each parameter takes four floats: itself, its gradient, and two moments. Each layer keeps at least its inputs for
    # the backward pass, in 16 bits or more.
    shape = config.shape()
    model = 16 * model_parameters(config, options, 1)[0] // (here.size if config.parallel == "fsdp" else 1)
    kept = 2 * config.sequences_at_once(here.size) * config.seq_len * shape.width
    needed = model + kept * (1 if config.recompute else shape.layers)
    require_memory(needed, here.device, "training", "lower --width, --layers, --batch-size or --micro-batch-size")


def train_config(config: Config, options: dict[str, Any], here: World, console: Console) -> Result:
    """Prepare the data, train one run or all of a search, and draw the curves.

    Args:
        config: configuration of the run.
        options: options of the layer that ``checked_options`` has returned; ``check_layer`` accepts it.
        here: the processes.
        console: console for progress; silent in all processes but the first.

    Raises:
        ValueError: the options do not fit the processes or the layer, data or tokenizer are not available, or the
            processes do not share the results folder.
        RunError: the run cannot continue, it diverged, or every point of the search did.
        StoppedError: the process was asked to stop.
        OSError: a file cannot be written.
    """
    gc.collect()  # the CUDA graphs of a run before hold their memory in cycles of references
    config.check_shares(here.size)
    check_memory(config, options, here)
    require_shared(config.out, here)
    if here.is_first:
        config.log_in()
    corpus = corpus_of(config, console)

    # Training.
    with closing(Progress(console, config)) as progress:
        if config.search:
            from runners.c4.search import best, print_results, search  # imports Optuna

            results = search(config, options, corpus, here, progress)
            config, record = best(results)
            print_results(results, console)
        else:
            record = train(config, options, corpus, here, progress)
    folder = identity(config, options, corpus.folder.name).folder
    if record.diverged_step is not None:
        again = f"to train it again, delete {folder / 'record.json'}"
        raise RunError(f"diverged at step {record.diverged_step}: lower --lr; {again}")

    # Draw a chart of all runs that are validated on the same text.
    chart, place = config.out / "figures" / f"c4-{corpus.folder.name}.png", ""
    if here.is_first:
        from runners.c4.charts import plot_curves  # imports Matplotlib
        from runners.c4.compare import by_label, place_of

        runs = [other for _, other in read_all(config.out / "c4")]
        plot_curves(by_label([other for other in runs if other.task_config["name"] == corpus.folder.name]), chart)
        place = place_of(record, runs)
    return Result(folder=folder, record=record, chart=chart, config=config, place=place)


def corpus_of(config: Config, console: Console) -> Corpus:
    """Return the corpus of a run; tokenise it as far as the run needs, and say where it is short.

    Each split needs one token more than it has targets.

    Raises:
        ValueError: data or tokenizer are not available, a shard is damaged, or the disk is full.
    """
    needed = config.tokens + 1, config.validation_tokens + 1
    corpus = prepare(config.out, config.data, str(config.tokenizer), *needed, console, config.seq_len)
    lines = [corpus.shortage(config.seq_len), *(corpus.warnings(config.seq_len) if config.data else [])]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)
    return corpus


def _build_layer(config: Config, options: dict[str, Any]) -> Layer:
    """Build one layer of the model, with parameters from torch's global generator."""
    layer, layer_config = layer_of(config, options)
    with building(config.mixer):
        return layer(layer_config, config.shape())
