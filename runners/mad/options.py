"""Options of ``python -m runners.mad``, and its presets."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from mixers.base import Shape
from mixers.matching import Figure
from runners.cli import check_out
from runners.guidance import flag_of
from runners.mad.results.choice import PAPER_LRS, WIDE_LRS
from runners.mad.results.kept import Keep
from runners.mad.search.study import LR_BOUNDS, WEIGHT_DECAY_BOUNDS
from runners.mad.studies import Settings
from runners.mad.training.protocol import Protocol, Run
from runners.nested_options import parse
from runners.storage import check_writable
from runners.tracking import Mode, Tracking

GridName = Literal["paper", "wide"]
GRIDS: dict[GridName, tuple[float, ...]] = {
    "paper": PAPER_LRS,
    "wide": WIDE_LRS,
}
"""Learning rates of each grid."""
WEIGHT_DECAYS = (0.0, 0.1)

MOST = {
    "seeds": 10**5,
    "steps": 10**9,
    "epochs": 10**9,
    "evaluations": 10**5,
    "layers": 10**3,
    "short_convolution": 10**3,
}
"""Largest values of options; larger values would take years."""
LARGEST = 10**12
"""Largest value of the other whole numbers; ``runners.mad.memory`` refuses settings that do not fit into memory."""

FEW_EXAMPLES = {"train_examples": 3200, "eval_examples": 320}
QUICK_TASKS: dict[str, dict[str, Any]] = {
    "in-context-recall": {**FEW_EXAMPLES, "length": 24, "vocab_size": 10},
    "noisy-in-context-recall": {**FEW_EXAMPLES, "length": 32, "vocab_size": 14, "noise_vocab_size": 4},
    "fuzzy-in-context-recall": {**FEW_EXAMPLES, "length": 32, "vocab_size": 12, "max_motif": 2},
    "selective-copying": {**FEW_EXAMPLES, "length": 24, "vocab_size": 10, "tokens_to_copy": 6},
    "compression": {**FEW_EXAMPLES, "length": 8},
    "memorization": {"eval_examples": 320, "length": 16},
    "copying": {
        **FEW_EXAMPLES,
        "min_length": 3,
        "max_length": 8,
        "context": 24,
        "eval_length": 8,
        "extrapolation_lengths": (11,),
    },
    "mqar": {**FEW_EXAMPLES, "length": 32, "vocab_size": 32, "pairs": 4},
    "parity": {**FEW_EXAMPLES, "length": 24},
    "s5-permutations": {**FEW_EXAMPLES, "length": 12, "degree": 3},
}
"""Settings of the tasks in the preset ``quick``, in which a layer of width 64 trains in about a minute on a laptop."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train single layers on diagnostic tasks and tabulate their accuracies.

    Name layers and tasks beside --help to see their options, too.

    Attributes:
        mixer: layers to train: registered names, package.module:Class, or all.
        task: tasks to train on: registered names, package.module:Class, or all.
        difficulty: baseline, all (every sweep of the task), or names such as vocab-size-32.
        preset: grid is the published grid; full is that of the reference results, the wide grid with five seeds of the
            chosen point; quick trains every task in a small setting, in minutes on a laptop, and is not the published
            protocol; demo trains one RT layer and one Transformer layer on a short in-context recall.
        seeds: repetitions with seeds 0, 1, ...; more than one gives means with 95% intervals.
        seeds_of: all repeats every grid point; chosen trains the grid with seed 0, then repeats the chosen point.
        grid: paper has learning rates 1e-4, 5e-4, 1e-3; wide also has 2e-3 and 5e-3; both have weight decays 0, 0.1.
        lr: peak learning rates, in place of the grid's.
        weight_decay: weight decays, in place of the grid's.
        epochs: passes over the training split, 200 unless --steps are given.
        steps: optimizer steps, in place of epochs.
        batch_size: sequences per step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: stacked layers.
        short_convolution: positions that a causal convolution before each layer spans; 0 for none.
        match: choose for every other layer the width that gives it the Transformer's parameters, state or FLOPs; state
            and FLOPs are counted at 128 positions, independent of the task's length.
        together: runs trained as one ensemble, on a CPU fewer if their steps are long; lower it to share a study among
            processes or to save memory.
        device: auto takes the GPUs if there are any; several share the work.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default studies.journal in the results folder.
        rebuild: before training, add finished runs that the storage lacks, from their folders.
        keep: which models are kept after a study has its result: all; best, those of the chosen point; or none.
        wandb: Weights & Biases mode.
        wandb_project: W&B project, mad unless given.
        wandb_entity: W&B user or team, the default of your login unless given.
        wandb_tags: W&B tags of each run.
        reference: reference rows beside yours: shipped, none, or a folder written by runners.mad.reference.
        list: print the layers with parameters, state and FLOPs, and train nothing.
        dry_run: print which runs would be trained, which are finished and how long the others take, and train nothing.
    """

    groups: ClassVar[dict[str, str]] = {"mixer": "study", "width": "model", "together": "output"}
    """First field of each group of the help; the fields after it belong to the same group."""

    mixer: tuple[str, ...]
    task: tuple[str, ...]
    difficulty: tuple[str, ...] = ("baseline",)
    preset: Literal["grid", "full", "quick", "demo"] = "grid"
    seeds: int = 1
    seeds_of: Literal["all", "chosen"] = "all"
    grid: GridName = "paper"
    lr: tuple[float, ...] = ()
    weight_decay: tuple[float, ...] = ()
    epochs: int | None = None
    steps: int | None = Protocol.steps
    batch_size: int = Protocol.batch_size
    evaluations: int = Protocol.evaluations
    width: int = Shape.width
    mlp_width: int = Shape.mlp_width
    layers: int = Shape.layers
    short_convolution: int = 0
    match: Figure | None = None
    together: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")
    storage: str | None = None
    rebuild: bool = False
    keep: Keep = "all"
    wandb: Mode = "disabled"
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()
    reference: str = "shipped"
    list: bool = False
    dry_run: bool = False

    @property
    def runs(self) -> Sequence[Run]:
        """Grid points × seeds; with ``seeds_of`` chosen, only seed 0."""
        lrs, decays = self.lr or GRIDS[self.grid], self.weight_decay or WEIGHT_DECAYS
        seeds = range(self.seeds if self.seeds_of == "all" else 1)
        points = product(lrs, decays, seeds)
        return tuple(dict.fromkeys(Run(lr=lr, weight_decay=decay, seed=seed) for lr, decay, seed in points))

    @property
    def more_seeds(self) -> Sequence[int]:
        """Seeds with which only the chosen point is repeated."""
        return () if self.seeds_of == "all" else range(1, self.seeds)

    @property
    def tracking(self) -> Tracking:
        """Settings of Weights & Biases."""
        return Tracking(
            mode=self.wandb,
            folder=self.out,
            project=self.wandb_project,
            entity=self.wandb_entity,
            tags=self.wandb_tags,
        )

    @property
    def settings(self) -> Settings:
        """Where and how studies are trained."""
        storage = self.storage or str(self.out / "studies.journal")
        return Settings(
            out=self.out,
            storage=storage,
            device=self.device,
            together=self.together,
            tracking=self.tracking,
            rebuild=self.rebuild,
            keep=self.keep,
        )


PRESETS: dict[str, tuple[Options, Mapping[str, dict[str, Any]]]] = {
    "grid": (Options(mixer=(), task=()), {}),
    "full": (Options(mixer=(), task=(), grid="wide", seeds=5, seeds_of="chosen", preset="full"), {}),
    "quick": (
        Options(
            mixer=(),
            task=("all",),
            lr=(2e-3, 5e-3),
            weight_decay=(0.0,),
            seeds=3,
            seeds_of="chosen",
            steps=1000,
            batch_size=16,
            evaluations=10,
            width=64,
            mlp_width=128,
            preset="quick",
        ),
        QUICK_TASKS,
    ),
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
            reference="none",
        ),
        {"in-context-recall": {"length": 48, "eval_examples": 320}},
    ),
}
"""Defaults of each preset: options, and settings of its own tasks by name."""


OF_A_PRESET = ("epochs", "steps", "batch_size", "evaluations", "width", "mlp_width")
"""Options that define a preset. If one of them has another value, results do not have the preset's name."""


OF_THE_LIST = (
    *("list", "mixer", "preset", "width", "mlp_width", "layers", "short_convolution", "match"),
    *("device", "out"),
)
"""Options that ``--list`` may be given with; the last two say where to train, for all commands of a script say."""


def preset_name(options: Options) -> str:
    """Return the preset that names results of these options; ``grid`` if an option of the chosen one was changed.

    Runs of ``full`` are those of ``grid``, only more of them, and have its name.
    """
    preset, _ = PRESETS[options.preset]
    same = all(getattr(options, name) == getattr(preset, name) for name in OF_A_PRESET)
    return options.preset if same and options.preset != "full" else "grid"


def read_options(arguments: Sequence[str]) -> tuple[Options, dict[str, Any], dict[str, Any]]:
    """Return the options of a command line, and the settings that it gives to layers and to tasks.

    Raises:
        ValueError: an option is unknown, missing, or out of bounds; the message says what to do.
    """
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]

    # The preset, and options that exclude its defaults, decide how the rest is read.
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", nargs="?", default="grid")
    preset, of_tasks = PRESETS.get(peek.parse_known_args(arguments)[0].preset, PRESETS["grid"])
    if "--list" in flags:
        preset = replace(preset, mixer=("all",))
    if "--epochs" in flags:
        preset = replace(preset, steps=None)

    options, nested = parse(Options, preset, arguments, of_preset=of_tasks)
    check_options(options, grid_given="--grid" in flags)
    if options.list:
        _check_list(flags)
    return options, nested["mixer"], nested["task"]


def check_options(options: Options, grid_given: bool) -> None:
    """Raise ValueError if an option is missing, out of bounds, or excluded by another option.

    Args:
        options: the options.
        grid_given: whether the grid was given, be it the default one.
    """
    instead = {"mixer": ", or use --preset demo", "task": ", or use --preset quick or --preset demo", "difficulty": ""}
    for name, preset in instead.items():
        if not getattr(options, name) and not (options.list and name == "task"):
            advice = preset if options.preset == "grid" else ""
            raise ValueError(f"{flag_of(name)} is missing: give at least one value{advice}")

    counts = ("seeds", "epochs", "steps", "batch_size", "evaluations", "width", "mlp_width", "layers", "together")
    for name in counts:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{flag_of(name)} {value} must be at least 1")
        if value is not None and value > (most := MOST.get(name, LARGEST)):
            raise ValueError(f"{flag_of(name)} {value} must be at most {most:,}")
    if (size := options.short_convolution) < 0 or size == 1:
        raise ValueError(f"--short-convolution {size} must be at least 2, or 0 for none")
    if size > (most := MOST["short_convolution"]):
        raise ValueError(f"--short-convolution {size} must be at most {most:,}")
    for name, (low, high) in {"lr": LR_BOUNDS, "weight_decay": WEIGHT_DECAY_BOUNDS}.items():
        if bad := [value for value in getattr(options, name) if not low <= value <= high]:
            raise ValueError(f"{flag_of(name)} {bad[0]:g} must lie between {low:g} and {high:g}")

    options.tracking.check()
    if not options.list:
        check_out(options.out, writes=not options.dry_run)
    if not options.list and not options.dry_run:
        check_writable(options.settings.storage, options.out)
    if grid_given and options.lr:
        source = "--lr" if options.lr != PRESETS[options.preset][0].lr else f"--preset {options.preset}"
        raise ValueError(f"--grid {options.grid} has no effect beside the learning rates of {source}: give one")
    if options.list and options.dry_run:
        raise ValueError("--list and --dry-run exclude each other: give one")
    if options.rebuild and (options.list or options.dry_run):
        raise ValueError("--rebuild writes to the storage: give it without --list and --dry-run")
    if options.steps is not None and options.epochs is not None:
        raise ValueError("--epochs and --steps exclude each other: give one")


def _check_list(flags: Sequence[str]) -> None:
    """Raise ValueError if one of the flags is an option that the list of layers does not depend on."""
    for flag in flags:
        if flag.removeprefix("--").partition(".")[0].replace("-", "_") not in OF_THE_LIST:
            raise ValueError(f"{flag} has no effect on --list, which trains nothing: leave it out")
