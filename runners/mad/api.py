"""The Python function behind ``runners.mad.study``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from runners.device import find_devices
from runners.mad.options import Grid, Options, check_options
from runners.mad.plan import plan_experiments
from runners.mad.result import Study
from runners.mad.studies import train_studies, try_layers
from runners.tracking import check_login


def study(
    mixer: str,
    task: str,
    *,
    grid: Grid = Options.grid,
    lr: Sequence[float] = Options.lr,
    weight_decay: Sequence[float] = Options.weight_decay,
    seeds: int = Options.seeds,
    seeds_of: Literal["all", "chosen"] = Options.seeds_of,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int = Options.batch_size,
    evaluations: int = Options.evaluations,
    width: int = Options.width,
    mlp_width: int = Options.mlp_width,
    layers: int = Options.layers,
    short_convolution: int = Options.short_convolution,
    difficulty: str = "baseline",
    mixer_options: Mapping[str, Any] | None = None,
    task_options: Mapping[str, Any] | None = None,
    together: int = Options.together,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: str | Path = Options.out,
    storage: str | None = None,
    quiet: bool = False,
) -> Study:
    """Train one layer on one task over a grid, or read what an earlier call or command has trained of it.

    >>> result = study("rt", "compression", lr=[1e-3], seeds=2, steps=2000, mixer_options={"heads": 8})

    Args:
        mixer: registered name, or ``package.module:Class``.
        task: registered name.
        grid: ``paper`` or ``wide``.
        lr: peak learning rates, in place of the grid's.
        weight_decay: weight decays, in place of the grid's.
        seeds: repetitions with seeds 0, 1, ….
        seeds_of: ``all`` repeats every grid point; ``chosen`` trains the grid with seed 0, then repeats the chosen
            point.
        steps: optimizer steps; by default those of ``epochs``, or of 200 epochs.
        epochs: passes over the training split, in place of steps.
        batch_size: sequences a step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: stacked layers.
        short_convolution: positions that a causal convolution spans before each layer, whichever it is; 0 is none.
        difficulty: ``baseline``, or the name of a sweep's setting such as ``vocab-size-32``.
        mixer_options: settings of the layer, by the names of its ``Config``.
        task_options: settings of the task, by the names of its ``Config``.
        together: runs trained as one ensemble, at most.
        device: ``auto`` takes the GPUs if there are any.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default ``studies.journal`` in ``out``.
        quiet: show no progress.

    Raises:
        ValueError: an argument does not fit; the message says what to do.
        ContractError: a layer from outside does not do what the trainer takes for granted.
        StoppedError: Ctrl-C or SIGTERM has come; the same call resumes from the checkpoints.
    """
    options = Options(
        mixer=(mixer,),
        task=(task,),
        difficulty=(difficulty,),
        lr=tuple(lr),
        weight_decay=tuple(weight_decay),
        seeds=seeds,
        seeds_of=seeds_of,
        grid=grid,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        evaluations=evaluations,
        width=width,
        mlp_width=mlp_width,
        layers=layers,
        short_convolution=short_convolution,
        together=together,
        device=device,
        out=Path(out),
        storage=storage,
    )
    check_options(options)
    own = dict(mixer_options or {}), dict(task_options or {})
    experiments = plan_experiments(options, *own)
    check_login(options.wandb)
    try_layers(experiments, find_devices(device)[0])

    console = Console(markup=False, quiet=quiet)
    ((experiment, summary),) = train_studies(experiments, options.runs, options.settings, console, options.more_seeds)
    return Study(experiment=experiment, summary=summary, out=Path(out).resolve())
