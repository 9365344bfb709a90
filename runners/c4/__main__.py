"""Pretrain a language model of any registered layer on C4.

    python -m runners.c4 --layers 6                                     # the paper's 300M Recurrent Transformer
    torchrun --nproc-per-node 8 -m runners.c4 --layers 6
    python -m runners.c4 --layers 6 --dry-run
    python -m runners.c4 --preset tiny --data my_folder --tokenizer tokenizer.json
    python -m runners.c4 --mixer transformer --size 150m --layers 12 --search
    python -m runners.c4 generate results/c4/RUN --prompt "The weather"

The same command again goes on where it stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mixers.base import Layer
from mixers.contract import check_foreign
from mixers.registry import building
from runners.c4.config import PRESETS, Config
from runners.c4.corpus.prepare import Corpus, prepare
from runners.c4.corpus.sources import find_files
from runners.c4.cost import ACTIVATIONS, cost, describe, vocabulary
from runners.c4.distributed import World, world
from runners.c4.evaluation import generate
from runners.c4.evaluation.downstream import HUB, print_scores, read_items
from runners.c4.model import build, layer_of
from runners.c4.search import best, points_of, print_results, search, study_file
from runners.c4.track import Bar, Wandb, plot_curves
from runners.c4.train import RunError, run_folder, train
from runners.cli import parse, run_command, user_errors
from runners.files import read_json
from runners.interrupt import StoppedError
from runners.storage import Store
from runners.tracking import check_login


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "generate":
        generate.main(arguments[1:])
        return
    with user_errors(ValueError, OSError):
        config, options = read(arguments)
        if config.dry_run:
            find_files(config.data)
            console, found = Console(markup=False), cost(config, options, vocabulary(config.tokenizer))
            if ACTIVATIONS in found.memory:  # the layer runs without a GPU
                check_foreign(
                    config.mixer, lambda: _layer(config, options), torch.device("cpu"), lambda: config.seq_len
                )
            console.print(describe(found, config))
            if config.search:
                console.print(f"the search trains {len(points_of(config))} such runs")
            return
        with world(config.device) as here:
            console = Console(markup=False, quiet=not here.is_first)
            config.check(here.size)
            if here.is_first:
                check_login(config.wandb)
            check_foreign(config.mixer, lambda: _layer(config, options), here.device, lambda: config.seq_len)
            tokens = config.steps * config.batch_size * config.seq_len + 1
            wanted = (tokens, config.validation_tokens + 1)
            corpus = prepare(config.out, config.data, config.tokenizer, *wanted, console)
            if shortage := corpus.shortage(config.seq_len):
                console.print(shortage, soft_wrap=True)
            try:
                _train(config, options, corpus, here, console)
            except RunError as error:
                if here.is_first:
                    print(f"stopped: {error}", file=sys.stderr)
                raise SystemExit(1) from error
            except StoppedError as error:
                if here.is_first:
                    raise
                raise SystemExit(error.status) from error


def read(arguments: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Configuration of a command line, and what is set of the layer's own options.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", nargs="?", default="paper")
    preset = PRESETS.get(peek.parse_known_args(arguments)[0].preset, PRESETS["paper"])
    config, nested = parse(Config, preset, arguments)
    config.check()
    if config.search and {"--lr", "--beta2"} & {argument.partition("=")[0] for argument in arguments}:
        raise ValueError("--search tries its own learning rates and beta2: leave --lr and --beta2 out")
    try:
        with torch.device("meta"):
            build(config, nested["mixer"], 1)
    except ValueError:  # a user's layer may read values while it is built, and tensors there have none
        _layer(config, nested["mixer"])
    if config.downstream is not None and not (config.dry_run and config.downstream == HUB):  # which needs no network
        read_items(config.downstream)
    return config, nested["mixer"]


def _layer(config: Config, options: dict[str, Any]) -> Layer:
    """One that leaves no trace in random numbers."""
    layer, layer_config = layer_of(config, options)
    with torch.random.fork_rng(devices=[]), building(config.mixer):
        return layer(layer_config, config.shape())


def _has_steps(config: Config, options: dict[str, Any], device: torch.device) -> bool:
    """Whether a layer goes from one position to the next by itself, as ``generate`` needs."""
    try:
        layer = _layer(config, options).to(device)
        with device:
            layer.step(torch.zeros(1, layer.shape.width), layer.init_state(1))
    except Exception:  # a user's layer may fail in any way, and its training is done
        return False
    return True


def _train(config: Config, options: dict[str, Any], corpus: Corpus, here: World, console: Console) -> None:
    """Train one run, or all of a search, and show what came out."""
    bar, wandb = Bar(console), Wandb(config.wandb, config.out)
    with closing(bar), closing(wandb):
        if config.search:
            with closing(Store(config.out, str(study_file(config.out)))) as store:
                results = search(config, options, corpus, here, [bar, wandb], store)
            print_results(results, console)
            if (chosen := best(results)) is None:
                raise RunError("every point of the grid diverged")
            config, result = chosen
        else:
            result = train(config, options, corpus, here, [bar, wandb])
    folder = run_folder(config, options, corpus)
    console.print(
        f"validation cross-entropy {result['validation_loss']:.4f} nats a token, run {folder}", soft_wrap=True
    )
    if "downstream" in result:
        print_scores(result["downstream"], console)
    if here.is_first:
        chart = config.out / "figures" / f"c4-{corpus.folder.name}.png"
        plot_curves(_runs_on(corpus, config.out), chart)
        console.print(f"curves: {chart}", soft_wrap=True)
        if _has_steps(config, options, here.device):
            console.print(f"generate: python -m runners.c4 generate {folder} --prompt ...", soft_wrap=True)
        if config.search:
            console.print(f"dashboard: optuna-dashboard {study_file(config.out)}", soft_wrap=True)


def _runs_on(corpus: Corpus, out: Path) -> list[Path]:
    """Folders of all runs on a corpus."""
    described = {path.parent: read_json(path) for path in sorted((out / "c4").glob("*/run.json"))}
    return [folder for folder, run in described.items() if run["corpus"]["folder"] == corpus.folder.name]


if __name__ == "__main__":
    run_command(main, "interrupted: the same command goes on from the last checkpoint, if there is one")
