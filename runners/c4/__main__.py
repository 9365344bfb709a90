"""Pretrain a language model of any layer on C4, or on other text.

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

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

from rich.console import Console

from mixers import MIXERS, find_mixer
from runners.c4.config import PRESETS, Config, with_tokenizer
from runners.c4.costs import cost_table, time_of_run
from runners.c4.data.sources import find_files
from runners.c4.distributed import world
from runners.c4.loop import RunError
from runners.c4.pretraining import Result, check_layer, checked_options, train_config
from runners.c4.progress import with_bits
from runners.device import find_devices, ran_out_of_memory
from runners.ending import others_continue, run_command, user_errors
from runners.options import applicable, expand, parse_nested, peek, print_help
from runners.progress import open_console
from runners.tables import abbreviated

COMMANDS = {
    "convert": "runners.c4.data.convert",
    "generate": "runners.c4.evaluation.generate",
    "compare": "runners.c4.compare",
    "export": "runners.c4.export",
    "gradients": "runners.c4.evaluation.gradients",
    "lm_eval": "runners.c4.evaluation.lm_eval_adapter",
}
"""Modules of the commands that follow ``python -m runners.c4``; without one, it trains."""
Run = tuple[Config, dict[str, Any]]
"""Configuration of a run, and the options of its layer that differ from their defaults."""


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """Pretrain a language model of any layer on C4, or on other text.

    In place of options, convert FOLDER TEXTS makes data of text files, compare tabulates runs, generate RUN continues
    texts, export RUN FOLDER writes the model for use elsewhere, gradients RUN measures how far back it reaches, and
    lm_eval runs lm-evaluation-harness: see their --help.

    Attributes:
        mixer: layers to train one after another: registered names, all, package.module:Class, or stacks such as
            "3*gated-deltanet+transformer", repeated to the number of layers.
        lr: peak learning rates; a command trains several one after another.
        seed: seeds of the initial parameters and of the order of the data; a command trains several one after another.
    """

    mixer: tuple[str, ...]  # type: ignore[assignment]
    lr: tuple[float, ...]  # type: ignore[assignment]
    seed: tuple[int, ...]  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check nothing: the configuration of each run is checked."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print_help(__doc__)
    if arguments[0] in COMMANDS:
        import_module(COMMANDS[arguments[0]]).main(arguments[1:])
        return

    with user_errors(ValueError, OSError, RunError):
        runs = read(arguments)
        find_files(runs[0][0].data)  # only for its errors, before a process group and layers are made
        if runs[0][0].dry_run:
            print_costs(runs)
            return

        with world(runs[0][0].device) as here:
            console = open_console(quiet=not here.is_first)
            for config, options in runs:
                check_layer(config, options, here.device)

            results, failed = list[Result](), list[str]()
            for config, options in runs:
                several: AbstractContextManager[None] = nullcontext()
                if len(runs) > 1:
                    several = others_continue(config.mixer, failed, RunError)
                try:
                    with several:
                        results.append(train_config(config, options, here, console))
                        print_result(results[-1], len(runs) == 1, console)
                except StoppedError as error:
                    if here.is_first:
                        raise
                    raise SystemExit(error.status) from error

            if here.is_first and len(results) > 1:
                from runners.c4.compare import compare

                compare([result.record for result in results], results[0].config.out, console)
            if failed:
                raise SystemExit(1)


def read(arguments: Sequence[str]) -> list[Run]:
    """Return the runs of a command line: one for each layer, learning rate and seed.

    Raises:
        SystemExit: an option is unknown or cannot be read.
        ValueError: an option is invalid; the message says what to do.
    """
    # The preset decides the defaults, and the layers decide which options there are.
    words = peek(arguments, preset="paper", mixer=())
    preset = PRESETS.get(words["preset"], PRESETS["paper"])
    names = expand(words["mixer"] or (preset.mixer,), MIXERS)
    configs: Mapping[str, type] = {name: find_mixer(name).Config for name in names}

    several = {"mixer": (preset.mixer,), "lr": (preset.lr,), "seed": (preset.seed,)}
    default = Options(**{**vars(preset), **several})
    given, nested = parse_nested(Options, arguments, default, {"mixer": configs})

    if not (given.lr and given.seed):
        raise ValueError("--lr and --seed take at least one value")
    if given.search and any(peek(arguments, lr=(), beta2="").values()):
        raise ValueError("--search tries its own learning rates and beta2: leave --lr and --beta2 out")
    layer_options = applicable("mixer", nested["mixer"], configs, partial(print, file=sys.stderr))
    points = product(names, dict.fromkeys(given.lr), dict.fromkeys(given.seed))
    runs = [Config(**{**vars(given), "mixer": mixer, "lr": lr, "seed": seed}) for mixer, lr, seed in points]
    return [(config, checked_options(config, layer_options[config.mixer])) for config in map(with_tokenizer, runs)]


def print_costs(runs: Sequence[Run]) -> None:
    """Print the cost of each model, and the number of runs if there are more; nothing is trained or written.

    Models that differ in learning rate and seed alone cost the same.

    Raises:
        ValueError: the tokenizer is not available, or the layer cannot be trained.
        Exception: the layer's own error.
    """
    console = open_console()
    device = find_devices(runs[0][0].device)[0]
    models = {config.mixer: (replace(config, lr=runs[0][0].lr), options) for config, options in reversed(runs)}
    for config, options in reversed(models.values()):
        check_layer(config, options, device)
        console.print(cost_table(config, options))
        try:
            console.print(f"a run takes {time_of_run(config, options, device)}", soft_wrap=True)
        except Exception as error:  # a user's layer may fail in any way
            lacks = ran_out_of_memory(error)
            why = "too little memory, see --micro-batch-size" if lacks else f"{type(error).__name__}: {error}"
            console.print(f"the time of a run here is not known: {why}", soft_wrap=True)

    if runs[0][0].search:
        from runners.c4.search import points_of  # imports Optuna

        console.print(f"each of {len(runs)} searches trains {len(points_of(runs[0][0]))} runs")
    elif len(runs) > len(models):
        console.print(f"the command makes {len(runs)} runs, {len(runs) // len(models)} of each model")


def print_result(result: Result, alone: bool, console: Console) -> None:
    """Print the result of a run, and what to do with it if the command trains no other."""
    loss = with_bits(result.validation_loss, result.record.task_config["bytes_per_token"])
    alike = f"{result.place} among runs that read {abbreviated(result.config.tokens)} tokens of this text"
    console.print(f"{result.record.layer}: validation cross-entropy {loss}, {alike}", soft_wrap=True)
    console.print(f"run: {result.folder}", soft_wrap=True)
    if scores := {name: y for name, y in result.record.metrics.items() if name not in ("training", "validation")}:
        from runners.c4.evaluation.downstream import print_scores

        print_scores(scores, console)
    if alone:
        console.print(f"curves: {result.chart}", soft_wrap=True)
        console.print(f"generate: python -m runners.c4 generate {result.folder} --prompt ...", soft_wrap=True)
        if (advice := result.config.advice()) is not None:
            console.print(advice, soft_wrap=True)


if __name__ == "__main__":
    run_command(main, "interrupted: the same command continues from the last checkpoint, or begins again")
