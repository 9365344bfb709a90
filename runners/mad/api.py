"""The Python function behind ``runners.mad.study``."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec

from torch import nn

from mixers import MIXERS
from mixers.costs import costs
from mixers.matching import Figure
from mixers.named import name_of
from mixers.options import converted
from mixers.registry import find_mixer
from runners.cli import defaults_of
from runners.device import find_devices
from runners.guidance import closest, flag_of, naming_arguments, texts_of
from runners.mad.options import PRESETS, GridName, Options, check_options
from runners.mad.plan import plan_experiments
from runners.mad.reference.rows import check_rows, print_rankings, reference_folder
from runners.mad.result import Study
from runners.mad.results.kept import Keep, delete_models
from runners.mad.results.tables import explain_divergence
from runners.mad.studies import train_studies, try_layers
from runners.progress import console_of_call
from runners.storage import explaining_database
from runners.task_names import find_task
from runners.tracking import Mode, check_login
from tasks import TASKS
from tasks.base import Task

P = ParamSpec("P")


def _advising(function: Callable[P, Study]) -> Callable[P, Study]:
    """Make errors name the arguments of ``function`` and say how to write one that it lacks; its signature stays."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Study:
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        if unknown := [name for name in kwargs if name not in known]:
            name, given = unknown[0], signature.bind_partial(*args, **known).arguments
            advice = _advice(name, kwargs[name], given, list(signature.parameters))
            raise TypeError(f"{function.__name__} has no argument {name!r}: {advice}")
        with naming_arguments(signature.parameters):
            return function(*args, **kwargs)

    return call


def _advice(name: str, value: object, given: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """Return how to write an argument that ``study`` lacks: as an option of layer or task, or by its right name.

    Args:
        name: the argument.
        value: its value.
        given: the other arguments of the call.
        arguments: names of all arguments that there are.

    Raises:
        ValueError: there is no such layer or task.
    """
    for group, find, registry in (("mixer", find_mixer, MIXERS), ("task", find_task, TASKS)):
        if group in given and name in defaults_of(find(member := name_of(given[group], registry)).Config):
            return f"it is an option of {member}: write {group}_options={{{name!r}: {value!r}}}"

    texts = texts_of(Options)
    flags = {flag_of(argument): argument for argument in arguments}
    found = closest(flag_of(name), {flag: texts.get(argument, "") for flag, argument in flags.items()})
    return f"did you mean {flags[found]!r}?" if found else "help(study) lists the arguments"


@_advising
def study(
    mixer: str | type[nn.Module],
    task: str | type[Task],
    *,
    preset: Literal["grid", "full", "quick", "demo"] = "grid",
    grid: GridName | None = None,
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
    wandb: Mode = Options.wandb,
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
    wandb_tags: Sequence[str] = (),
    reference: str | Path = Options.reference,
    quiet: bool = False,
) -> Study:
    """Train one layer on one task over a grid; reuse runs that earlier calls or commands have trained.

    >>> result = study("rt", "compression", lr=[1e-3], seeds=2, steps=2000, mixer_options={"heads": 8})

    Arguments that are not given have the values of the preset.

    Args:
        mixer: registered name, ``package.module:Class``, or a class, also one that a notebook defines.
        task: registered name, ``package.module:Class``, or a class derived from ``tasks.base.Task``.
        preset: ``grid`` is the published grid; ``full`` is that of the reference results, the wide grid with five seeds
            of the chosen point; ``quick`` is a small setting of each task; ``demo`` is that of ``make demo``.
        grid: ``paper`` or ``wide``, in place of the preset's; excludes ``lr`` and the preset ``quick``, which have
            their own rates.
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
        together: largest number of runs trained as one ensemble; on a CPU it is fewer if their steps are long.
        device: ``auto`` takes the GPUs if there are any.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default ``studies.journal`` in ``out``.
        rebuild: first add finished runs that the storage lacks, from their folders.
        keep: which models are kept after the study has its result: ``all``; ``best``, those of the chosen point;
            ``none``.
        wandb: Weights & Biases mode: ``disabled``, ``offline`` or ``online``.
        wandb_project: W&B project, as in the command.
        wandb_entity: W&B user or team, the default of your login unless given.
        wandb_tags: W&B tags of each run.
        reference: reference rows beside the layer, as in the command: ``shipped``, ``none``, or a folder of them.
        quiet: show no progress, no ranking, and no line on a cost that cannot be counted or a grid that diverged;
            ``Study.ranking`` returns the ranking. Warnings remain.

    Raises:
        TypeError: there is no such argument; the message says how to write it.
        ValueError: an argument is invalid, or the storage fails; the message says what to do.
        ContractError: a layer from outside breaks a rule that the trainer relies on.
        StoppedError: Ctrl-C or SIGTERM; the same call resumes from the checkpoints.
    """
    lrs, decays = _listed("lr", lr), _listed("weight_decay", weight_decay)
    if isinstance(wandb_tags, str):
        raise ValueError(f"wandb_tags is a list: write wandb_tags=[{wandb_tags!r}]")
    if "all" in (mixer, task, difficulty):
        raise ValueError('study trains one layer on one task: call it once for each in place of "all"')
    if isinstance(task, tuple | list):
        raise ValueError("study trains one layer on one task: call it once for each in place of a list")
    if not isinstance(out, str | PathLike):
        raise ValueError(f"out is a folder, such as {str(Options.out)!r}, not {out!r}")

    mixer, task = name_of(mixer, MIXERS), name_of(task, TASKS)
    defaults, _ = PRESETS[converted(Options, {"preset": preset})["preset"]]
    if epochs is not None and steps is None:
        defaults = replace(defaults, steps=None)

    given: dict[str, Any] = {
        "grid": grid,
        "lr": lrs,
        "weight_decay": decays,
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
        "wandb": wandb,
        "wandb_project": wandb_project,
        "wandb_entity": wandb_entity,
        "wandb_tags": tuple(wandb_tags or ()),
        "reference": str(reference),
        **{name: value for name, value in given.items() if value is not None},
    }
    find_mixer(mixer)  # its message on a class or a module is the better one
    options = replace(defaults, **converted(Options, values))
    check_options(options, grid_given=grid is not None)
    own = dict(mixer_options or {}), dict(task_options or {})
    experiments = plan_experiments(options, *own)
    rows_folder = reference_folder(options.reference)
    if rows_folder is not None:
        check_rows(rows_folder, [task])
    check_login(options.wandb)
    try_layers(experiments, find_devices(device)[0])
    if quiet:  # counted here without a word, and not again later
        for planned in experiments:
            costs(planned.layer, planned.mixer_config, planned.shape, say=lambda line: None)

    console = console_of_call(inspect.signature(study).parameters, quiet)
    with explaining_database(options.settings.storage):
        found = train_studies(experiments, options.runs, options.settings, console, options.more_seeds)
        ((experiment, summary),) = found
    delete_models(experiment, summary, options.out, keep)

    result = Study(experiment=experiment, summary=summary, out=Path(out).resolve(), reference=rows_folder)
    if not quiet:
        if summary.chosen is None:
            console.print(explain_divergence(summary), soft_wrap=True)
        print_rankings(result.rankings, console)
    return result


def _listed(name: str, numbers: Iterable[float] | None) -> tuple[float, ...] | None:
    """Return the values of an argument that takes several; None if it is not given.

    Raises:
        ValueError: it is no list, or an empty one.
    """
    if numbers is None:
        return None
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ValueError(f"{name} is a list: write {name}=[{numbers}]")
    if not (values := tuple(numbers)):
        raise ValueError(f"{name} is empty: give at least one value, or leave it out")
    return values
