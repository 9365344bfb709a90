"""The Python function behind ``runners.mad.study``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mixers.costs import Figure
from mixers.options import converted
from mixers.registry import find_mixer
from runners.device import find_devices
from runners.mad.options import PRESETS, Grid, Options, check_options
from runners.mad.plan import plan_experiments
from runners.mad.reference.rows import print_rankings, reference_folder
from runners.mad.result import Study
from runners.mad.results.kept import Keep, delete_models
from runners.mad.studies import train_studies, try_layers
from runners.tracking import check_login


def study(
    mixer: str,
    task: str,
    *,
    preset: Literal["grid", "quick"] = "grid",
    grid: Grid | None = None,
    lr: Sequence[float] | None = None,
    weight_decay: Sequence[float] | None = None,
    seeds: int | None = None,
    seeds_of: Literal["all", "chosen"] | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    evaluations: int | None = None,
    width: int | None = None,
    mlp_width: int | None = None,
    layers: int = Options.layers,
    short_convolution: int = Options.short_convolution,
    match: Figure | None = Options.match,
    difficulty: str = "baseline",
    mixer_options: Mapping[str, Any] | None = None,
    task_options: Mapping[str, Any] | None = None,
    together: int = Options.together,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: str | Path = Options.out,
    storage: str | None = None,
    rebuild: bool = False,
    keep: Keep = Options.keep,
    reference: str | Path = Options.reference,
    quiet: bool = False,
) -> Study:
    """Train one layer on one task over a grid; reuse runs that earlier calls or commands have trained.

    >>> result = study("rt", "compression", lr=[1e-3], seeds=2, steps=2000, mixer_options={"heads": 8})

    Arguments that are not given have the values of the preset.

    Args:
        mixer: registered name, or ``package.module:Class``; ``__main__:Class`` in a notebook.
        task: registered name.
        preset: ``grid`` is the published protocol, ``quick`` a small setting of each task.
        grid: ``paper`` unless given, or ``wide``; excludes ``lr`` and the preset ``quick``, which have their own rates.
        lr: peak learning rates, in place of the grid's.
        weight_decay: weight decays, in place of the grid's.
        seeds: repetitions with seeds 0, 1, ….
        seeds_of: ``all`` repeats every grid point; ``chosen`` trains the grid with seed 0, then repeats the chosen
            point.
        steps: optimizer steps, in place of epochs.
        epochs: passes over the training split, in place of steps.
        batch_size: sequences per step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: stacked layers.
        short_convolution: positions that a causal convolution before each layer spans; 0 for none.
        match: choose the width that gives the layer the Transformer's ``params``, ``state`` or ``flops``.
        difficulty: ``baseline``, or the name of a sweep's setting such as ``vocab-size-32``.
        mixer_options: settings of the layer, by the names of its ``Config``.
        task_options: settings of the task, by the names of its ``Config``.
        together: largest number of runs trained as one ensemble.
        device: ``auto`` takes the GPUs if there are any.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default ``studies.journal`` in ``out``.
        rebuild: first add finished runs that the storage lacks, from their folders.
        keep: which models are kept after the study has its result: ``all``; ``best``, those of the chosen point;
            ``none``.
        reference: reference rows beside the layer, as in the command: ``shipped``, ``none``, or a folder of them.
        quiet: show no progress and no ranking; ``Study.ranking`` returns the latter.

    Raises:
        ValueError: an argument is invalid; the message says what to do.
        ContractError: a layer from outside breaks a rule that the trainer relies on.
        StoppedError: Ctrl-C or SIGTERM; the same call resumes from the checkpoints.
    """
    for name, numbers in {"lr": lr, "weight_decay": weight_decay}.items():
        if isinstance(numbers, float | int):
            raise ValueError(f"{name} is a list: write {name}=[{numbers}]")
    if "all" in (mixer, task, difficulty):
        raise ValueError('study trains one layer on one task: call it once for each in place of "all"')

    defaults, _ = PRESETS[preset]
    if epochs is not None and steps is None:
        defaults = replace(defaults, steps=None)

    given: dict[str, Any] = {
        "grid": grid,
        "lr": None if lr is None else tuple(lr),
        "weight_decay": None if weight_decay is None else tuple(weight_decay),
        "seeds": seeds,
        "seeds_of": seeds_of,
        "steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "evaluations": evaluations,
        "width": width,
        "mlp_width": mlp_width,
    }
    values = {
        "mixer": (mixer,),
        "task": (task,),
        "difficulty": (difficulty,),
        "layers": layers,
        "short_convolution": short_convolution,
        "match": match,
        "together": together,
        "device": device,
        "out": Path(out),
        "storage": storage,
        "rebuild": rebuild,
        "keep": keep,
        "reference": str(reference),
        **{name: value for name, value in given.items() if value is not None},
    }
    find_mixer(mixer)  # its message on a class or a module is the better one
    options = replace(defaults, **converted(Options, values))
    check_options(options, grid_given=grid is not None)
    own = dict(mixer_options or {}), dict(task_options or {})
    experiments = plan_experiments(options, *own)
    rows_folder = reference_folder(options.reference)
    check_login(options.wandb)
    try_layers(experiments, find_devices(device)[0])

    console = Console(markup=False, quiet=quiet)
    ((experiment, summary),) = train_studies(experiments, options.runs, options.settings, console, options.more_seeds)
    delete_models(experiment, summary, options.out, keep)

    result = Study(experiment=experiment, summary=summary, out=Path(out).resolve(), reference=rows_folder)
    if not quiet:
        print_rankings(result.rankings, console)
    return result
