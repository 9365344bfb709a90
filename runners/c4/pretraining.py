"""Pretraining from a configuration to a result: one run, or the paper's grid of runs.

The Python function ``pretrain`` and the command ``python -m runners.c4`` both build a configuration, ``check`` it, and
``run`` it.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import nn

from mixers import MIXERS
from mixers.models import LanguageModel
from mixers.named import name_of
from mixers.registry import find_mixer
from runners.c4.checkpoints import load_model
from runners.c4.checks import check, check_memory, check_users_layer, deciding
from runners.c4.config import Config
from runners.c4.cost import flops_per_token, model_parameters
from runners.c4.curve import read_curve
from runners.c4.data.corpus import Corpus
from runners.c4.data.prepare import corpus_name, prepare
from runners.c4.distributed import World, world
from runners.c4.errors import RunError
from runners.c4.identity import run_folder
from runners.c4.model import layer_of
from runners.c4.presets import configure, with_tokenizer
from runners.c4.search import best, print_results, search, study_file
from runners.c4.shared_folder import require_shared
from runners.c4.stored import curves_of, stored_runs
from runners.c4.train import train
from runners.c4.watchers import Bar, Wandb
from runners.cli import applicable
from runners.guidance import naming_arguments
from runners.progress import console_of_call
from runners.storage import Store
from runners.tracking import check_login

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run; after a search, its best run.

    Attributes:
        folder: folder of the run's files.
        validation_loss: validation cross-entropy after the last step, in nats per token.
        bytes_per_token: mean bytes of validation text per token; None if unknown.
        downstream: ``runners.c4.evaluation.downstream.Scores`` as a dict, by name of the downstream set.
        chart: PNG file with the curves of all runs on the same corpus.
        config: configuration of the run.
    """

    folder: Path
    validation_loss: float
    bytes_per_token: float | None
    downstream: dict[str, dict[str, Any]]
    chart: Path
    config: Config = field(repr=False)

    def curve(self) -> list[dict[str, Any]]:
        """Return one dict per step, with the attributes of ``runners.c4.curve.Row`` as keys.

        ``pandas.DataFrame(result.curve())`` makes a table of it.
        """
        return [asdict(row) for row in read_curve(self.folder, self.config.steps)]

    @property
    def model(self) -> LanguageModel:
        """The trained model on the CPU, in evaluation mode; loaded on first use."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the model; loaded on first use."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[LanguageModel, "Tokenizer"]:
        return load_model(self.folder)


def pretrain(
    mixer: str | type[nn.Module] = "rt",
    *,
    layers: int | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    tokenizer: str | Path | None = None,
    preset: str = "paper",
    out: str | Path = "results",
    mixer_options: dict[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Pretrain a language model; continue an interrupted run; return the result of a finished one.

    The command ``python -m runners.c4`` with the same options trains the same run.

    Args:
        mixer: layer to train: a registered name, ``package.module:Class``, or a class.
        layers: number of stacked layers; unless given, the preset's number.
        data: C4-format json.gz file or folder, or several; unless given, ``allenai/c4`` streamed from the hub.
        tokenizer: name on the Hugging Face hub, or a tokenizer.json file; unless given, the one that ``convert`` has
            made beside the data, or else ``google-t5/t5-base``.
        preset: ``paper``, ``tiny``, which trains in two minutes on a CPU, ``ranking`` or ``30m``
            (``runners.c4.reference``).
        out: folder of results.
        mixer_options: options of the layer, such as ``{"block": 4}``; the number of heads is ``heads``.
        progress: whether to print progress.
        **options: other attributes of ``runners.c4.config.Config``, such as ``steps`` or ``lr``.

    Raises:
        ValueError: an option is invalid, or data or tokenizer are not available; the message says what to do.
        RunError: the run diverged, another process trains it, it was begun with other code, or memory or disk are full.
        StoppedError: Ctrl-C or SIGTERM during training; the state is saved, and the same call continues the run.
    """
    layer_options, mixer = mixer_options or {}, name_of(mixer, MIXERS)
    arguments = {"preset", *(field.name for field in fields(Config))}
    with naming_arguments(arguments):
        # Put the caller's options on top of the preset.
        given = {"layers": layers, "data": data, "tokenizer": tokenizer}
        values = {"mixer": mixer, "out": out, **{name: value for name, value in given.items() if value is not None}}
        config = with_tokenizer(configure(preset, values | options), values)

        # Refuse options that the layer does not have.
        applicable("mixer", layer_options, {mixer: find_mixer(mixer).Config}, print)
        check(config, layer_options, options)

        with world(config.device) as here:
            return run(config, layer_options, here, console_of_call(arguments, quiet=not (progress and here.is_first)))


def run(config: Config, options: dict[str, Any], world: World, console: Console) -> Result:
    """Prepare the data, train one run or all of a search, and draw the curves.

    Args:
        config: configuration that ``check`` has passed.
        options: options of the layer that were set; those with the default value do not change the run.
        world: the processes.
        console: console for progress; silent in all processes but the first.

    Raises:
        ValueError: the options do not fit the processes or the layer, data or tokenizer are not available, or the
            processes do not share the results folder.
        RunError: the run cannot continue, or every point of the search diverged.
        StoppedError: the process was asked to stop.
    """
    options = deciding(config, options)
    config.check(world.size)
    check_memory(config, options, world)
    require_shared(config.out, world)
    if world.is_first:
        check_login(config.wandb)
    check_users_layer(config, options, world.device)

    corpus = corpus_of(config, console)
    if shortage := corpus.shortage(config.seq_len):
        console.print(shortage, soft_wrap=True)
    if config.data:
        for line in corpus.warnings(config.seq_len):
            console.print(line, soft_wrap=True)

    # Training.
    bar, wandb = Bar(console), Wandb(config.tracking, partial(facts, config, options, corpus))
    with closing(bar), closing(wandb):
        if config.search:
            config, result = _search(config, options, corpus, world, [bar, wandb], console)
        else:
            result = train(config, options, corpus, world, [bar, wandb])
    if warning := _worse_than_guessing(result["validation_loss"], corpus.manifest.vocab_size):
        console.print(warning, soft_wrap=True)

    # Draw a chart of all runs that are validated on the same text.
    folder = run_folder(config, options, corpus.folder.name)
    chart = config.out / "figures" / f"c4-{corpus.folder.name}.png"
    if world.is_first:
        from runners.c4.charts import plot_curves  # imports Matplotlib

        say = partial(console.print, soft_wrap=True)
        runs = stored_runs(sorted((config.out / "c4").glob("*")), say)
        mine = [run for run in runs if run.folder == folder]
        plot_curves(curves_of(run for run in runs if any(map(run.is_comparable, mine))), chart)

    return Result(
        folder=folder,
        validation_loss=result["validation_loss"],
        bytes_per_token=result["corpus"].get("bytes_per_token"),
        downstream=result.get("downstream", {}),
        chart=chart,
        config=config,
    )


def _worse_than_guessing(loss: float, vocab_size: int) -> str:
    """Return a warning if a final validation loss, in nats per token, is above that of equal probabilities; else "".

    Such a run has diverged, although all its losses are finite, or it has had too few steps.
    """
    guessing = math.log(vocab_size)
    if loss <= guessing:
        return ""
    return (
        f"the final validation loss {loss:.4f} is worse than guessing all {vocab_size:,} tokens alike "
        f"({guessing:.4f}): a smaller learning rate may help, or more steps"
    )


def corpus_of(config: Config, console: Console) -> Corpus:
    """Return the corpus of a run; tokenise it as far as the run needs.

    Raises:
        ValueError: data or tokenizer are not available, a shard is damaged, or the disk is full.
    """
    train_tokens, validation_tokens = _tokens_of(config)
    return prepare(config.out, config.data, config.tokenizer, train_tokens, validation_tokens, console, config.seq_len)


def corpus_name_of(config: Config) -> str:
    """Return the name of the folder of a run's corpus, which need not exist; nothing is tokenised.

    Raises:
        ValueError: data or tokenizer are not available.
    """
    return corpus_name(config.data, config.tokenizer, _tokens_of(config)[1])


def _tokens_of(config: Config) -> tuple[int, int]:
    """Return how many training and validation tokens a run needs; each split needs one more than it has targets."""
    return config.steps * config.batch_size * config.seq_len + 1, config.validation_tokens + 1


def facts(config: Config, options: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Return the figures of a model that are known before its training, for the tables of Weights & Biases."""
    vocab_size = corpus.manifest.vocab_size
    parameters, tables = model_parameters(config, options, vocab_size)
    return {
        "parameters": parameters,
        "parameters_without_embeddings": parameters - tables,
        "flops_per_token": flops_per_token(config, options, vocab_size),
        "family": layer_of(config, options)[0].family,
    }


def _search(
    config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: list[Bar | Wandb], console: Console
) -> tuple[Config, dict[str, Any]]:
    """Train all points of the grid; return the best one and its result.

    Raises:
        RunError: every point diverged.
    """
    with closing(Store(config.out, str(study_file(config.out)))) as store:
        results = search(config, options, corpus, world, watchers, store)
    print_results(results, console)

    if (chosen := best(results)) is None:
        raise RunError("every point of the grid diverged")
    return chosen
