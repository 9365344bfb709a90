"""Pretrain a language model of any registered layer on C4.

    python -m runners.c4 --layers 6                  # the paper's 300M RT
    torchrun --nproc-per-node 8 -m runners.c4 --layers 6
    python -m runners.c4 --layers 6 --dry-run
    python -m runners.c4 --preset tiny --data my_texts --mixer rt transformer
    python -m runners.c4 convert my_texts book.txt notes/    # data of your own
    python -m runners.c4 --mixer transformer --size 150m --layers 12 --search
    python -m runners.c4 generate results/c4/RUN --prompt "The weather"
    python -m runners.c4 compare                     # a table of all runs
    python -m runners.c4 export results/c4/RUN my_model
    python -m runners.c4 gradients results/c4/RUN    # gradient by distance
    python -m runners.c4 lm_eval --help              # lm-evaluation-harness

The same command continues an interrupted run. From Python, call ``runners.c4.pretrain``.
"""

from runners.interrupt import StoppedError, end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from mixers.base import ContractError
from runners.c4 import compare, export
from runners.c4.checks import check, check_users_layer
from runners.c4.config import OF_THE_MODEL, Config
from runners.c4.cost import cost, describe, vocabulary
from runners.c4.data import convert
from runners.c4.data.sources import find_files
from runners.c4.distributed import World, world
from runners.c4.duration import seconds_of_run
from runners.c4.errors import RunError, out_of_memory
from runners.c4.evaluation import generate, gradients, lm_eval_adapter
from runners.c4.evaluation.downstream import print_scores
from runners.c4.presets import PRESETS, with_tokenizer
from runners.c4.pretraining import Result, run
from runners.c4.search import points_of, study_file
from runners.c4.several import of_each_run
from runners.c4.stored import stored_runs
from runners.c4.watchers import with_bits
from runners.cli import print_short_help
from runners.device import find_devices
from runners.ending import others_continue, run_command, user_errors
from runners.memory import ran_out_of_memory
from runners.nested_options import parse
from runners.progress import spell


class Command(NamedTuple):
    """A command: its function, and the line that it ends with after Ctrl-C."""

    main: Callable[[Sequence[str]], None]
    interrupted: str


COMMANDS = {
    "convert": Command(convert.main, "interrupted: nothing is written, the same command begins again"),
    "generate": Command(generate.main, "interrupted: the text ends here"),
    "compare": Command(compare.main, "interrupted"),
    "export": Command(export.main, "interrupted: nothing is written, the same command begins again"),
    "gradients": Command(gradients.main, "interrupted: the same command begins again"),
    "lm_eval": Command(lm_eval_adapter.main, "interrupted: the evaluation is not finished"),
}
"""Commands that follow ``python -m runners.c4``; without one, it trains."""
INTERRUPTED = (
    "interrupted: the same command continues from the last checkpoint or the last shard of tokens, if there is one"
)
"""Line after Ctrl-C while a model is not in training, for example while its text is tokenised."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print_short_help(__doc__, Config)
    if arguments[0] in COMMANDS:
        COMMANDS[arguments[0]].main(arguments[1:])
        return

    with user_errors(ValueError, OSError):
        runs = [read(words) for words in of_each_run(arguments)]
        first, _ = runs[0]
        if first.dry_run:
            print_costs(runs)
            return

        with world(first.device) as here:
            console = Console(markup=False, quiet=not here.is_first)
            if len(runs) == 1:
                train(*runs[0], here, console, alone=True)
            else:
                train_several(runs, here, console)


def train_several(runs: Sequence[tuple[Config, dict[str, Any]]], here: World, console: Console) -> None:
    """Train several models one after another, and compare those that could be trained.

    Args:
        runs: the configuration of each, and the options of its layer that were set.
        here: the processes.
        console: where to print.

    Raises:
        ContractError: a layer's outputs are wrong, before a model is trained.
        Exception: a layer's own error, likewise.
        SystemExit: a model cannot be trained.
    """
    for config, options in runs:
        check_users_layer(config, options, here.device)

    folders, failed = [], list[str]()
    for config, options in runs:
        with others_continue(config.mixer, failed, RunError):
            folders.append(train(config, options, here, console, alone=False))
    if here.is_first and folders:
        say = partial(console.print, soft_wrap=True)
        compare.compare(stored_runs(dict.fromkeys(folders), say), runs[0][0].out, console)
    if failed:
        raise SystemExit(1)


def train(config: Config, options: dict[str, Any], here: World, console: Console, alone: bool) -> Path:
    """Train a model, print its result, and return the folder of its run.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        here: the processes.
        console: where to print.
        alone: whether the command trains no other model.

    Raises:
        RunError: the run cannot go on, if there are others.
        StoppedError: the process was asked to stop.
        SystemExit: so was another process, or the only run cannot go on.
    """
    gc.collect()  # the CUDA graphs of the run before hold their memory in cycles of references
    try:
        result = run(config, options, here, console)
    except RunError as error:
        if not alone:
            raise
        if here.is_first:
            print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except StoppedError as error:
        if here.is_first:
            raise
        raise SystemExit(error.status) from error

    if here.is_first:
        print_result(result, config, console, alone)
    return result.folder


def read(arguments: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a command line, and the options of the layer that it sets.

    Raises:
        ValueError: an option is invalid; the message says what to do.
    """
    # The preset decides the defaults, so it is read first.
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", nargs="?", default="paper")
    preset = PRESETS.get(peek.parse_known_args(arguments)[0].preset, PRESETS["paper"])

    config, nested = parse(Config, preset, arguments, OF_THE_MODEL)
    options = (argument for argument in arguments if argument.startswith("--"))
    given = [option.partition("=")[0].removeprefix("--") for option in options]
    check(config, nested["mixer"], given)
    return with_tokenizer(config, given), nested["mixer"]


def print_costs(runs: Sequence[tuple[Config, dict[str, Any]]]) -> None:
    """Print the cost of each model, and the number of runs if there are more; arguments and errors as ``print_cost``.

    Models that differ in learning rate and seed alone cost the same.
    """
    found: list[tuple[Config, dict[str, Any]]] = []
    for config, options in runs:
        model = replace(config, lr=runs[0][0].lr, seed=runs[0][0].seed), options
        if model not in found:
            found.append(model)
            print_cost(*model)
    if len(runs) > len(found):
        what = "searches" if runs[0][0].search else "runs"
        print(f"the command makes {len(runs)} {what}, {len(runs) // len(found)} of each model")


def print_cost(config: Config, options: dict[str, Any]) -> None:
    """Print the cost of a run; nothing is trained or written.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.

    Raises:
        ValueError: data or tokenizer are not available, or the layer cannot be trained.
        Exception: the layer's own error.
    """
    find_files(config.data)
    console = Console(markup=False)

    # A layer that fails on the CPU may need a GPU; without one, its cost is counted as far as possible.
    try:
        check_users_layer(config, options, torch.device("cpu"))
    except Exception as error:  # a user's layer may raise anything
        if isinstance(error, ContractError) or config.device == "cpu":
            raise
        if torch.cuda.is_available():
            check_users_layer(config, options, torch.device("cuda"))

    vocab_size = vocabulary(config.tokenizer)
    found = cost(config, options, vocab_size)
    console.print(describe(found, config))
    console.print(_time(config, options, vocab_size, found.flops_per_token), soft_wrap=True)
    if config.search:
        console.print(f"the search trains {len(points_of(config))} such runs")


def _time(config: Config, options: dict[str, Any], vocab_size: int, flops_per_token: int) -> str:
    """Return the sentence that says how long a run takes here, or why that is not known."""
    gc.collect()  # the CUDA graphs of the model before hold their memory in cycles of references
    device = find_devices(config.device)[0]
    where = "one of this machine's GPUs" if device.type == "cuda" else "this machine's CPU"
    try:
        seconds = seconds_of_run(config, options, vocab_size, flops_per_token, device)
    except Exception as error:  # a user's layer may fail in any way
        micro = config.sequences_at_once()
        why = out_of_memory(micro) if ran_out_of_memory(error) else f"{type(error).__name__}: {error}"
        return f"time on {where} unknown: {why}"
    if seconds is None:
        return f"no time is given for {where}: the model is too large for it"
    return f"a run takes about {spell(seconds)} on {where} (single steps were timed)"


def print_result(result: Result, config: Config, console: Console, alone: bool) -> None:
    """Print the result of a run, and commands that use the model unless the command trains others, too.

    Args:
        result: the result.
        config: configuration of the command.
        console: where to print.
        alone: whether the command trains no other model.
    """
    loss = with_bits(result.validation_loss, result.bytes_per_token)
    console.print(f"validation cross-entropy {loss}, run {result.folder}", soft_wrap=True)
    if result.downstream:
        print_scores(result.downstream, console)

    # Suggest the next commands.
    if not alone:
        return
    console.print(f"curves: {result.chart}", soft_wrap=True)
    if len(list(result.folder.parent.glob("*/run.json"))) > 1:
        out = "" if config.out == Config.out else f" --out {config.out}"
        console.print(f"compare: python -m runners.c4 compare{out}", soft_wrap=True)
    console.print(f"generate: python -m runners.c4 generate {result.folder} --prompt ...", soft_wrap=True)
    if (advice := config.tracking.advice()) is not None:
        console.print(advice, soft_wrap=True)
    if config.search:
        console.print(f"dashboard: optuna-dashboard {study_file(config.out)}", soft_wrap=True)


def when_interrupted(arguments: Sequence[str]) -> str:
    """Return the line for Ctrl-C of a command line."""
    return COMMANDS[arguments[0]].interrupted if arguments and arguments[0] in COMMANDS else INTERRUPTED


if __name__ == "__main__":
    run_command(main, when_interrupted(sys.argv[1:]))
