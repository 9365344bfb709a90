"""Options of ``python -m runners.mad`` and of ``runners.mad.study``, presets, and the grid of runs that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

from mixers import MIXERS
from mixers.base import Shape
from mixers.matching import Figure
from mixers.registry import find_mixer
from runners.mad.training.protocol import Protocol, Run
from runners.options import expand, flag_of, parse_nested, peek
from runners.search import JOURNAL
from runners.task_names import find_task
from runners.tracking import Tracking
from tasks import PUBLISHED, TASKS
from tasks.base import Task

PresetName = Literal["grid", "full", "quick", "demo", "profile"]

PAPER = (1e-4, 5e-4, 1e-3)
"""Learning rates of Oncescu et al. 2026, appendix "Synthetic experiments"."""
WIDE = (*PAPER, 2e-3, 5e-3)
BEYOND = (1e-2, 2e-2)
"""Learning rates that the reference protocol adds where the largest of the wide grid is chosen, below the ceiling."""
WEIGHT_DECAYS = (0.0, 0.1)
MOST = {"seeds": 10**4, "evaluations": 10**5, "layers": 10**3}
"""Largest values of options; memory bounds the others (``runners.mad.checks``)."""
BOUNDS = {"lr": (1e-8, 10.0), "weight_decay": (0.0, 10.0)}
"""Smallest and largest values; AdamW changes each parameter by about ``lr`` in a step."""

ON_A_CPU: dict[str, Any] = {"steps": 1_000, "batch_size": 16, "evaluations": 4}
"""Training of a profile on a CPU, where that on a GPU would take a day."""
HEADS = 4
"""Heads of a profile's layers that have heads. Those of attention have 16 channels at width 64."""
START = 3
"""Rung of a ladder that chooses the learning rate of a profile."""
RUNGS = ("rung-3", "rung-4", "rung-5", "rung-6", "rung-2", "rung-1")
"""Difficulties of a profile, in the order in which they are trained."""

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
    "modular-arithmetic": {**FEW_EXAMPLES, "length": 20},
    "group-words": {**FEW_EXAMPLES, "length": 12, "group": "S3", "copies": 4},
    "forgetting-mqar": {**FEW_EXAMPLES, "length": 32, "vocab_size": 32, "pairs": 4, "updates": 2},
    "joint-keys": {**FEW_EXAMPLES, "length": 32, "vocab_size": 48, "grid": 2},
    "flip-flop": {**FEW_EXAMPLES, "length": 64},
    "multi-hop": {**FEW_EXAMPLES, "nodes": 10, "hops": 2, "queries": 6},
}
"""Settings of the tasks in the preset ``quick``, in which a layer of width 64 trains in about a minute on a laptop."""


@dataclass(frozen=True, kw_only=True)
class Options(Tracking):
    """Train single layers on diagnostic tasks and tabulate their accuracies.

    Name layers and tasks beside --help to see their options, too.

    Attributes:
        mixer: layers to train: registered names, package.module:Class, stacks such as "3*gated-deltanet+transformer",
            or all.
        task: tasks to train on: registered names, package.module:Class, or all, the ten of the published table.
        difficulty: baseline, all (every sweep of the task), or names such as vocab-size-32.
        preset: grid is that of the paper, one seed, without reference rows; full is the reference protocol, that of the
            reference results: the wide grid with five seeds of the chosen point; quick trains every task in a small
            setting, in minutes on a laptop, and is not the reference protocol; demo trains one RT layer and one
            Transformer layer on a short recall; profile trains the ladder of difficulty of each task and says where the
            layer breaks.
        seeds: repetitions with seeds 0, 1, ...; more than one gives means with 95% intervals.
        seeds_of: all repeats every grid point; chosen trains the grid with seed 0, then repeats the chosen point.
        lr: peak learning rates; unless given, those of the preset: 1e-4, 5e-4, 1e-3, with full 2e-3 and 5e-3, too.
        weight_decay: weight decays; unless given, those of the preset: 0, 0.1.
        epochs: passes over the training split, 200 unless --steps are given.
        steps: optimizer steps, in place of epochs.
        batch_size: sequences per step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP; 0 for layers without MLP.
        layers: stacked layers; unless given, 1, or those of a stack such as "3*gated-deltanet+transformer".
        short_convolution: positions that a causal convolution before each layer spans; 0 for none.
        match: choose for every other layer the width that gives it the Transformer's parameters, state or FLOPs; state
            and FLOPs are counted at 128 positions, independent of the task's length.
        together: runs trained as one ensemble, on a CPU fewer if their steps are long; lower it to share a study among
            processes or to save memory.
        device: auto takes the GPUs if there are any; several share the work.
        storage: Optuna storage URL, or path of a journal file; by default optuna.journal in the results folder.
        keep: which models are kept after a study has its result: all; best, those of the chosen point; or none.
        reference: reference rows beside yours: shipped, none, or a folder written by runners.mad.reference.
        verbose: print all grid points, and all reference rows with their costs.
        list: print the layers with parameters, state and FLOPs, and train nothing.
        dry_run: print which runs would be trained, which are finished and how long the others take, and train nothing.

    Raises:
        ValueError: a value is out of bounds, or excluded by another option.
    """

    mixer: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    difficulty: tuple[str, ...] = ("baseline",)
    preset: PresetName = "grid"
    seeds: int = 1
    seeds_of: Literal["all", "chosen"] = "all"
    lr: tuple[float, ...] = ()
    weight_decay: tuple[float, ...] = ()
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = Protocol.batch_size
    evaluations: int = Protocol.evaluations
    width: int = Shape.width
    mlp_width: int = Shape.mlp_width
    layers: int | None = None
    short_convolution: int = 0
    match: Figure | None = None
    together: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"
    storage: str | None = None
    keep: Literal["all", "best", "none"] = "all"
    reference: str = "shipped"
    verbose: bool = False
    list: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        counts = ("seeds", "epochs", "steps", "batch_size", "evaluations", "width", "mlp_width", "layers", "together")
        for name in counts:
            value, least, most = getattr(self, name), int(name != "mlp_width"), MOST.get(name, 10**9)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{flag_of(name)} {value} must be at least {least} and at most {most:,}")
        if self.short_convolution != 0 and not 2 <= self.short_convolution <= MOST["layers"]:
            raise ValueError(f"--short-convolution {self.short_convolution} must be 0 for none, or 2 to 1,000")
        for name, (low, high) in BOUNDS.items():
            if bad := [value for value in getattr(self, name) if not low <= value <= high]:
                raise ValueError(f"{flag_of(name)} {bad[0]:g} must lie between {low:g} and {high:g}")

        if self.steps is not None and self.epochs is not None:
            raise ValueError("--epochs and --steps exclude each other: give one")
        if (self.preset == "profile") != (self.difficulty == RUNGS):
            raise ValueError(
                "--difficulty and --preset profile exclude each other: a profile has all rungs of a ladder"
            )
        if self.list and self.dry_run:
            raise ValueError("--list and --dry-run exclude each other: give one")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is a file: name a folder")
        self.check_tracking()

    @property
    def runs(self) -> Sequence[Run]:
        """Grid points × seeds; with ``seeds_of`` chosen, only seed 0."""
        lrs = self.lr or (WIDE if self.preset == "full" else PAPER)
        seeds = range(self.seeds if self.seeds_of == "all" else 1)
        points = product(lrs, self.weight_decay or WEIGHT_DECAYS, seeds)
        return tuple(dict.fromkeys(Run(lr=lr, weight_decay=decay, seed=seed) for lr, decay, seed in points))

    @property
    def more_seeds(self) -> Sequence[int]:
        """Seeds with which only the chosen point is repeated."""
        return () if self.seeds_of == "all" else range(1, self.seeds)

    @property
    def protocol(self) -> Protocol:
        """Length and settings of training."""
        return Protocol(
            batch_size=self.batch_size,
            epochs=Protocol.epochs if self.epochs is None else self.epochs,
            steps=self.steps,
            evaluations=self.evaluations,
        )

    @property
    def place(self) -> str:
        """The Optuna storage."""
        return self.storage or str(self.out / JOURNAL)


PRESETS: dict[PresetName, tuple[Options, Mapping[str, dict[str, Any]]]] = {
    "grid": (Options(), {}),
    "full": (Options(seeds=5, seeds_of="chosen", preset="full"), {}),
    "quick": (
        Options(
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
    "profile": (
        Options(
            task=(*TASKS,),
            difficulty=RUNGS,
            lr=(3e-4, 1e-3, 2.5e-3, 7e-3, 2e-2),
            weight_decay=(0.0,),
            seeds=3,
            steps=3_200,  # each of the 102,400 sequences once
            batch_size=32,
            evaluations=16,
            width=64,
            mlp_width=256,
            keep="best",
            preset="profile",
        ),
        {},
    ),
}
"""Defaults of each preset: options, and settings of its own tasks by name."""

OF_A_PRESET = ("epochs", "steps", "batch_size", "evaluations", "width", "mlp_width")
"""Options that define a preset. If one of them has another value, results do not have the preset's name."""


def tasks_of(preset: str) -> dict[str, type[Task]]:
    """Return the tasks that ``--task all`` means: those of the published table; in a profile, all registered ones."""
    return TASKS if preset == "profile" else PUBLISHED


def defaults(preset: str, **given: Any) -> Options:
    """Return the defaults of a preset on the device, without those that a given option excludes.

    Args:
        preset: name of the preset; that of an unknown one is left to the parser.
        **given: options that are given, or None.
    """
    options, _ = PRESETS.get(preset, PRESETS["grid"])  # type: ignore[call-overload]
    on_a_cpu = given.get("device", options.device) == "cpu" or not torch.cuda.is_available()
    if preset == "profile" and on_a_cpu:
        options = replace(options, **ON_A_CPU)
    if given.get("epochs") is not None and given.get("steps") is None:
        options = replace(options, steps=None)
    return options


def preset_name(options: Options) -> PresetName:
    """Return the preset that names results of these options; ``grid`` if an option of the chosen one was changed.

    Runs of ``full`` are those of ``grid``, only more of them, and have its name.
    """
    preset = defaults(options.preset, device=options.device)
    same = all(getattr(options, name) == getattr(preset, name) for name in OF_A_PRESET)
    return options.preset if same and options.preset != "full" else "grid"


def read_options(arguments: Sequence[str]) -> tuple[Options, dict[str, Any], dict[str, Any]]:
    """Return the options of a command line, and the settings that it gives to layers and to tasks.

    Raises:
        SystemExit: an option is unknown, or its value cannot be read.
        ValueError: a layer or a task is unknown, or a value is out of bounds; the message says what to do.
    """
    given = peek(arguments, preset="grid", epochs=None, steps=None, device="auto")
    default = defaults(**given) if "--list" not in arguments else replace(defaults(**given), mixer=("all",))
    named = peek(arguments, mixer=default.mixer, task=default.task)
    configs = {
        "mixer": {name: find_mixer(name).Config for name in expand(named["mixer"], MIXERS)},
        "task": {name: find_task(name).Config for name in expand(named["task"], tasks_of(default.preset))},
    }
    options, values = parse_nested(Options, arguments, default, configs)
    return options, values["mixer"], values["task"]
