"""Train single layers on diagnostic tasks and tabulate what they reach.

    python -m runners.mad --mixer rt --task compression
    python -m runners.mad --mixer rt transformer --task all --seeds 5
    python -m runners.mad --mixer my_package.my_module:MyLayer --task in-context-recall --steps 2000
    python -m runners.mad --mixer rt transformer --task compression --mixer.heads 4 --match flops
    python -m runners.mad --preset demo
    python -m runners.mad --mixer all --task all --dry-run
    python -m runners.mad --list

By default the six points of the published grid (Oncescu et al. 2026, appendix "Synthetic experiments") at the task's
baseline setting. The same command again goes on where it stopped.
"""

import argparse
import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from mixers import MIXERS
from mixers.accounting import Figure
from mixers.base import ContractError, Layer, Shape
from runners.charts import plot_comparison
from runners.checkpoint import DamagedFileError, load_tensors, read_json
from runners.contract import POSITIONS, check_foreign
from runners.devices import Crew, CrewError, work_off
from runners.dry_run import print_forecast
from runners.ensemble import Run
from runners.environment import find_devices, product_precision
from runners.experiment import Experiment, building, call_as_in_training
from runners.held_out import Reading, read_test
from runners.layers import Choice, choose_layers, print_layers
from runners.options import applicable, check_out, expand, find_task, override, parse, run_command, user_errors
from runners.report import Display, Summary, count_seeds, print_comparison, print_summary, summarise, write_summary
from runners.search import LR_BOUNDS, WEIGHT_DECAY_BOUNDS, ForeignFolderError, Watcher, finished, run_of, search
from runners.store import Store, existing_storage
from runners.track import Mode, Tracker, check_login
from runners.train import SECONDS_BETWEEN_CHECKPOINTS, CurvePoint, Protocol, Result
from tasks import TASKS
from tasks.base import SplitOverlapError

LONGEST_NAME = 100
"""Characters of a chart's file name taken from the command line; file systems take 255 bytes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train single layers on diagnostic tasks and tabulate what they reach.

    Attributes:
        mixer: layers to train: registered names, package.module:Class, or all.
        task: tasks to train on, or all.
        difficulty: baseline, all (every sweep of the task), or names such as vocab-size-32.
        seeds: repetitions with seeds 0, 1, ...; more than one gives means with 95% intervals.
        lr: peak learning rates of the grid.
        weight_decay: weight decays of the grid.
        epochs: passes over the training split, 200 unless --steps are given.
        steps: optimizer steps, in place of epochs.
        batch_size: sequences a step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: stacked layers.
        match: make each layer but the Transformer as wide as gives it the Transformer's parameters, state, or FLOPs.
        together: runs trained as one ensemble; lower it to share a study among processes or to save memory.
        device: auto takes the GPUs if there are any; several share the work.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default studies.journal in the results folder.
        wandb: Weights & Biases mode.
        preset: demo is one RT layer against one Transformer layer on a short in-context recall.
        list: print the layers with parameters, state and FLOPs, and train nothing.
        dry_run: print what would be trained, what of it is finished and what the rest takes, and train nothing.
    """

    mixer: tuple[str, ...]
    task: tuple[str, ...]
    difficulty: tuple[str, ...] = ("baseline",)
    seeds: int = 1
    lr: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decay: tuple[float, ...] = (0.0, 0.1)
    epochs: int | None = None
    steps: int | None = Protocol.steps
    batch_size: int = Protocol.batch_size
    evaluations: int = Protocol.evaluations
    width: int = Shape.width
    mlp_width: int = Shape.mlp_width
    layers: int = Shape.layers
    match: Figure | None = None
    together: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")
    storage: str | None = None
    wandb: Mode = "disabled"
    preset: Literal["grid", "demo"] = "grid"
    list: bool = False
    dry_run: bool = False


PRESETS: dict[str, tuple[Options, dict[str, Any]]] = {
    "grid": (Options(mixer=(), task=()), {}),
    "demo": (
        Options(
            mixer=("rt", "transformer"),
            task=("in-context-recall",),
            lr=(1e-3,),
            weight_decay=(0.0,),
            steps=250,
            batch_size=64,
            evaluations=5,
            preset="demo",
        ),
        {"length": 48, "eval_examples": 320},
    ),
}
"""Defaults of each preset: options, and settings of its own tasks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, console = sys.argv[1:] if arguments is None else arguments, Console()
    say = partial(console.print, soft_wrap=True)
    with user_errors(ValueError, OSError):
        if "--list" in arguments:
            print_layers(_layers(*_read(arguments)[:2], say), console)
            return
        options, experiments = plan(arguments, say)
        points = product(options.lr, options.weight_decay, range(options.seeds))
        grid = list(dict.fromkeys(Run(lr=lr, weight_decay=decay, seed=seed) for lr, decay, seed in points))
        storage = options.storage or str(options.out / "studies.journal")
        if options.dry_run:
            print_forecast(experiments, grid, existing_storage(storage), options.out, console)
            return
        check_login(options.wandb)
        devices = find_devices(options.device)[: len(experiments) * len(grid)]
    for experiment in experiments:  # before the first is trained, which may take hours
        with user_errors(ContractError):
            check_foreign(experiment.mixer, partial(_layer, experiment), devices[0], partial(_positions, experiment))
            call_as_in_training(experiment, experiment.build, min(POSITIONS, _positions(experiment)), devices[0])
    with user_errors(ValueError, OSError):
        store = Store(options.out, storage)
    together = min(options.together, math.ceil(len(grid) / len(devices)))
    if len(devices) > 1:
        console.print(f"{len(devices)} GPUs share each grid, up to {together} runs at a time on each; bars: the first")
    # Processes get what is to do without the data that the experiments hold, and a tracker of their own.
    to_do = ([replace(e) for e in experiments], grid, store.folder, store.url, together)
    work = partial(work_off, *to_do, Tracker(options.wandb, options.out))
    summaries = []
    known_errors = (SplitOverlapError, DamagedFileError, ForeignFolderError, CrewError, OSError)
    with (
        user_errors(*known_errors),
        _memory_advice(together),
        closing(store),
        Display(console) as display,
        Crew(devices[1:], work) as crew,
    ):
        watcher = Watchers(display, Tracker(options.wandb, options.out), crew)
        for experiment in experiments:
            trials = search(experiment, grid, store, devices[0], together, watcher)
            read = partial(_read_test, experiment, store, devices[0], console)
            summary = summarise(experiment, trials, read)
            folder = store.study_folder(experiment)
            write_summary(summarise(experiment, finished(experiment, store), read, chosen_among=trials), folder)
            print_summary(summary, console)
            _diagnose(summary, store, devices[0], console)
            console.print(f"stored in {folder}\n", soft_wrap=True)
            summaries.append(summary)
    if len(summaries) > 1:
        figure = options.out / "figures" / f"{_figure_name(options, experiments)}.png"
        with user_errors(OSError):
            plot_comparison(summaries, figure)
        print_comparison(summaries, console)
        console.print(f"chart: {figure}", soft_wrap=True)
    console.print(f"studies: {store.url}\ndashboard: optuna-dashboard {store.url}", soft_wrap=True)
    if options.wandb == "offline" and (logs := options.out / "wandb").exists():
        console.print(f"curves: {logs}; upload them: wandb sync {logs}/offline-run-*", soft_wrap=True)


@contextmanager
def _memory_advice(together: int) -> Iterator[None]:
    """Turn running out of GPU memory into one line and exit status 1."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        print(f"stopped: out of GPU memory: lower --together (now {together})", file=sys.stderr)
        raise SystemExit(1) from error


def plan(arguments: Sequence[str], say: Callable[[str], None] = lambda line: None) -> tuple[Options, list[Experiment]]:
    """Options and experiments of a command line; everything is checked that can be before training.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    options, mixer_values, task_values = _read(arguments)
    protocol = Protocol(
        batch_size=options.batch_size,
        epochs=Protocol.epochs if options.epochs is None else options.epochs,
        steps=options.steps,
        evaluations=options.evaluations,
    )
    layers = _layers(options, mixer_values, say)
    precision = product_precision(find_devices(options.device)[0])
    experiments = []
    configs = {task: find_task(task).Config for task in expand(options.task, TASKS)}
    for task, values in applicable("task", task_values, configs, say).items():
        for difficulty, task_config in settings(task, options, values):
            for layer in layers:
                experiment = Experiment(
                    mixer=layer.mixer,
                    mixer_config=layer.config,
                    task=task,
                    task_config=task_config,
                    difficulty=difficulty,
                    shape=layer.shape,
                    protocol=protocol,
                    precision=precision,
                )
                protocol.check(task_config.train_examples)
                _layer(experiment)  # so that what cannot be built is refused before anything is stored
                experiments.append(experiment)
    return options, experiments


def settings(task: str, options: Options, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Named task configurations of the chosen difficulties.

    Raises:
        ValueError: the task has no such difficulty.
    """
    task_class = find_task(task)
    preset, preset_values = PRESETS[options.preset]
    own = task in preset.task
    values = {**preset_values, **values} if own else values
    base = override(task_class.Config, values)
    named = {
        f"{name.replace('_', '-')}-{value}": {**values, name: value}
        for name, sweep in task_class.sweeps.items()
        for value in sweep
    }
    chosen = dict.fromkeys(
        n for name in options.difficulty for n in (("baseline", *named) if name == "all" else (name,))
    )
    if unknown := [name for name in chosen if name != "baseline" and name not in named]:
        raise ValueError(f"{task} has no difficulty {unknown[0]!r}: choose from baseline, all, {', '.join(named)}")
    as_preset = own and base == override(task_class.Config, preset_values)
    label = "baseline" if base == task_class.Config() else options.preset if as_preset else "custom"
    suffix = "-custom" if values else ""
    return [
        (label, base) if name == "baseline" else (name + suffix, override(task_class.Config, named[name]))
        for name in chosen
    ]


def _read(arguments: Sequence[str]) -> tuple[Options, dict[str, Any], dict[str, Any]]:
    """Options, and what is set of the mixers' and of the tasks' settings."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", nargs="?", default="grid")
    preset, _ = PRESETS.get(peek.parse_known_args(arguments)[0].preset, PRESETS["grid"])
    if "--list" in arguments:
        preset = replace(preset, mixer=("all",))
    if any(argument.partition("=")[0] == "--epochs" for argument in arguments):
        preset = replace(preset, steps=None)
    options, nested = parse(Options, preset, arguments)
    _check(options)
    return options, nested["mixer"], nested["task"]


def _layers(options: Options, values: dict[str, Any], say: Callable[[str], None]) -> list[Choice]:
    shape = Shape(width=options.width, mlp_width=options.mlp_width, layers=options.layers)
    names = expand(options.mixer, MIXERS)
    return choose_layers(names, values, shape, options.match, say, strict="all" not in options.mixer)


def _layer(experiment: Experiment) -> Layer:
    """The first layer of a model that leaves no trace in random numbers; errors name the mixer."""
    with torch.random.fork_rng(devices=[]), building(experiment.mixer):
        return experiment.build().stack[0]


def _positions(experiment: Experiment) -> int:
    """Length of the sequences that it is validated on."""
    return experiment.instance.split("validation").inputs_ST.shape[1]


def _check(options: Options) -> None:
    needed = ("mixer", "lr", "weight_decay", "difficulty")
    for name in needed if options.list else (*needed, "task"):
        if not getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing: give at least one value, or use --preset demo")
    counts = ("seeds", "epochs", "steps", "batch_size", "evaluations", "width", "mlp_width", "layers", "together")
    for name in counts:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    check_out(options.out)
    if options.list and options.dry_run:
        raise ValueError("--list and --dry-run exclude each other: give one")
    if options.steps is not None and options.epochs is not None:
        raise ValueError("--epochs and --steps exclude each other: give one")
    for name, (low, high) in {"lr": LR_BOUNDS, "weight_decay": WEIGHT_DECAY_BOUNDS}.items():
        if bad := [value for value in getattr(options, name) if not low <= value <= high]:
            raise ValueError(f"--{name.replace('_', '-')} {bad[0]:g} must lie between {low:g} and {high:g}")


class Watchers:
    """Several watchers as one."""

    def __init__(self, *members: Watcher) -> None:
        self.members = members

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int) -> None:
        for member in self.members:
            member.started(experiment, runs, total_steps)

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        for member in self.members:
            member.evaluated(step, points)

    def progressed(self, step: int) -> None:
        for member in self.members:
            member.progressed(step)

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        for member in self.members:
            member.resumed(step, curves)

    def finished(self, results: Sequence[Result]) -> None:
        for member in self.members:
            member.finished(results)

    def waiting(self, trials: int) -> None:
        for member in self.members:
            member.waiting(trials)


def _read_test(
    experiment: Experiment, store: Store, device: torch.device, console: Console, runs: Sequence[Run]
) -> dict[Run, Reading]:
    """Readings of the chosen point's runs; without its model there are none, and that is said."""
    try:
        return read_test(experiment, runs, store, device)
    except DamagedFileError as error:
        console.print(f"no test accuracy: {error}", soft_wrap=True)
        return {}


def _diagnose(summary: Summary, store: Store, device: torch.device, console: Console) -> None:
    """Look into the chosen model, unless that has been done, and say where it stands and what could not be read."""
    if summary.chosen_trial is None:
        return
    experiment, run = summary.experiment, run_of(summary.chosen_trial)
    folder, model_path = store.study_folder(experiment), store.run_folder(experiment, run) / "model.safetensors"
    seeds = count_seeds([summary])
    best = f", the best of {seeds} seeds on validation" if seeds > 1 else ""
    title = f"{experiment.name}, lr {run.lr:g}, weight decay {run.weight_decay:g}, seed {run.seed}{best}"
    there = folder / "diagnosis.json"
    say = partial(console.print, soft_wrap=True, markup=False)
    if (read_json(there) or {}).get("title") != title:
        from runners.diagnose import diagnose  # slow to import
        from runners.probe import UnreadableError

        if not model_path.exists():
            say(f"no diagnosis: {model_path} is gone")
            return
        model = experiment.build()
        try:
            model.load_state_dict(load_tensors(model_path)[0], strict=False)  # it has parameters alone, each once
            diagnose(model.to(device), experiment.instance, folder, title)
        except DamagedFileError:
            say(f"no diagnosis: {model_path} is damaged; another --out trains it anew")
            return
        except UnreadableError as error:
            say(f"no diagnosis: {experiment.mixer} on {experiment.setting} cannot be read on the test split: {error}")
            return
    for name, reason in read_json(there).get("unreadable_sets", {}).items():
        say(f"diagnosis without {name!r}: {experiment.mixer} on {experiment.setting} cannot be read there: {reason}")
    say(f"diagnosis of the chosen model: {folder / 'diagnosis.png'}")


def _figure_name(options: Options, experiments: Sequence[Experiment]) -> str:
    """What was asked for, as far as it fits, and a digest of all settings, so that others have a chart of their own."""
    found = list(dict.fromkeys(experiment.difficulty for experiment in experiments))
    difficulties = options.difficulty if "all" in options.difficulty else found
    words = [options.preset] if options.preset == "demo" else [*options.mixer, *options.task, *difficulties]
    readable = re.sub(r"[^\w.+-]+", "-", "-".join(words))[:LONGEST_NAME]
    digest = hashlib.sha256("".join(experiment.name for experiment in experiments).encode()).hexdigest()
    return f"{readable}-{digest[:8]}"


if __name__ == "__main__":
    due = f"one is due every {SECONDS_BETWEEN_CHECKPOINTS:.0f} seconds"
    run_command(main, f"interrupted: the same command goes on from the last checkpoint, if there is one yet ({due})")
