"""What is checked before the first training, which may take hours: memory, a user's task, and layers as trained."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixers.base import ContractError, Layer, settled
from mixers.contract import POSITIONS, check_foreign, differ, warn_unused
from mixers.costs import count_model
from mixers.named import is_path
from mixers.origin import where
from mixers.registry import building
from runners.device import require_memory
from runners.mad.experiment import Experiment, Say
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Run
from tasks.base import BLOCK
from tasks.contract import check_task

TOKEN_BYTES = 17
"""Bytes per position of a data set: token, target, and whether it is scored."""
COPIES = 5
"""Floats per parameter in training: itself, its gradient, two moments, and its value at the best evaluation."""


def check(
    experiments: Sequence[Experiment], together: int, device: torch.device, say: Say = lambda line: None
) -> list[Experiment]:
    """Check experiments in the order in which faults cost least: memory, then tasks, then layers.

    Args:
        experiments: what will be trained.
        together: largest number of runs that are trained at the same time.
        device: where they will be trained.
        say: prints a line for each layer that ``torch.func.vmap`` cannot compute.

    Returns:
        The experiments; those whose layer vmap cannot compute have ``one_by_one`` set.

    Raises:
        ValueError: an experiment does not fit into memory, a user's task breaks a rule, or a layer cannot be built.
        ContractError: a user's layer does not do what the trainer takes for granted.
        SplitOverlapError: two splits of a task share a sequence.
    """
    for experiment in experiments:
        check_memory(experiment, together, device)
    for experiment in {e.task: e for e in experiments if is_path(e.task)}.values():
        try:
            check_task(experiment.instance)
        except Exception as error:  # a user's task may raise anything
            said = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"task {experiment.task!r}: {where(error)}{said}") from error

    ready = []
    for experiment in experiments:  # one after another, as only the data of one is in memory
        experiment.instance.split("train")
        warn_unused(experiment.mixer, check_layer(experiment, device))
        ready.append(as_in_training(experiment, device, say))
    return ready


def check_ladders(experiments: Sequence[Experiment], together: int, device: torch.device, say: Say) -> list[Experiment]:
    """Check the experiments of a profile: memory of all; task and layer at the longest rung, on few data.

    The data of all rungs would take minutes to draw.
    """
    for experiment in experiments:
        check_memory(experiment, together, device)
    longest: dict[tuple[str, str], Experiment] = {}
    for experiment in sorted(experiments, key=lambda e: e.task_config.longest_length):
        config = replace(experiment.task_config, train_examples=BLOCK)
        longest[experiment.label, experiment.task] = replace(experiment, task_config=config)
    lines: dict[str, None] = {}  # each once
    checked = check([*longest.values()], together, device, lines.setdefault)
    for line in lines:
        say(line)
    in_turn = {experiment.label for experiment in checked if experiment.one_by_one}
    return [replace(experiment, one_by_one=experiment.label in in_turn) for experiment in experiments]


def check_memory(experiment: Experiment, together: int, device: torch.device) -> None:
    """Refuse an experiment that cannot fit into memory, before its data are drawn or its models are built.

    Raises:
        ValueError: data, parameters or activations need more memory than there is, or the layer cannot be built.
    """
    # Data are in the machine's memory, too.
    task, shape = experiment.task_config, experiment.shape
    sequences, length = task.train_examples + 2 * task.eval_examples, task.train_length
    data = TOKEN_BYTES * max(sequences * length, BLOCK * task.longest_length)
    advice = "lower --task.train-examples, --task.eval-examples or the lengths of the task"
    require_memory(data, torch.device("cpu"), f"the data of {experiment.task}", advice)

    count = experiment.runs_at_once(together, device)
    runs = f"{count} run{'s' * (count > 1)} of {experiment.label}"
    vocab_size = experiment.instance.vocab_size
    parameters = count_model(experiment.layer, experiment.mixer_config, shape, vocab_size, experiment.mixer)
    fewer = ", --together" if count > 1 else ""
    require_memory(
        count * COPIES * 4 * parameters,
        device,
        runs,
        f"lower --width, --mlp-width, --layers{fewer} or the task's vocabulary",
    )

    # Each layer keeps at least its inputs for the backward pass, in 16 bits or more.
    kept = 2 * count * experiment.protocol.batch_size * length * shape.width * shape.layers
    require_memory(kept, device, f"a step of {runs}", f"lower --batch-size{fewer}, --layers or the lengths of the task")


def check_layer(experiment: Experiment, device: torch.device) -> list[str]:
    """Build a layer, check one from outside, and call the model as training will.

    Returns:
        Names of parameters that no gradient reaches.

    Raises:
        ValueError: the layer cannot be built.
        ContractError: a layer from outside does not do what the trainer takes for granted.
    """
    mixer, foreign = experiment.mixer, is_path(experiment.mixer)

    def build() -> Layer:
        with building(mixer):
            return settled(experiment.layer(experiment.mixer_config, experiment.shape))

    with torch.random.fork_rng(devices=[]):
        build()
    length = experiment.instance.split("validation").inputs_ST.shape[1]
    longest = experiment.task_config.longest_length
    unused = check_foreign(mixer, build, device, lambda: length)

    # Extrapolation sets have longer sequences, on which some layers fail; one that does not must be right there, too.
    if foreign and longest > length:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                build().to(device)(torch.randn(1, longest, experiment.shape.width, device=device))
        except Exception:  # a user's layer may raise anything
            pass
        else:
            check_foreign(mixer, build, device, lambda: longest)
    return unused


def as_in_training(experiment: Experiment, device: torch.device, say: Say) -> Experiment:
    """Call a model as training does, and return the experiment, one by one if its layer cannot be computed otherwise.

    Args:
        experiment: what will be trained.
        device: where it will be trained.
        say: prints a line if the runs are computed one after another.

    Raises:
        ContractError: the layer keeps something from run to run.
        Exception: errors of the layer's own code, with a note that names the mixer.
    """
    mixer, foreign, reason = experiment.mixer, is_path(experiment.mixer), None
    try:
        if not experiment.one_by_one:
            call_two_runs(experiment, device)
            return experiment
    except Exception as error:  # vmap may fail in any way, and so may a user's layer
        if not foreign or isinstance(error, torch.OutOfMemoryError):
            error.add_note(f"while mixer {mixer!r} was called for all runs at once, as in training")
            raise
        said = re.split(r"\. |; | \(see |,? [Pp]lease ", " ".join(str(error).split()))[0].rstrip(".")
        reason = f"{where(error)}{said}"

    # One after another, run 1 must be what it is alone.
    experiment = replace(experiment, one_by_one=True)
    try:
        together_BTV, alone_BTV = call_two_runs(experiment, device)[-1], call_two_runs(experiment, device, first=1)[-1]
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was called for one run after another, as in training")
        raise
    if foreign and differ(together_BTV, alone_BTV, times=10):
        raise ContractError(
            f"mixer {mixer!r}: outputs of a run change when another run is computed before it: keep no tensor that "
            "depends on inputs or parameters from call to call"
        )
    if reason is not None:
        say(
            f"{mixer}: runs are trained one after another, which is slower; torch.func.vmap cannot compute it: {reason}"
        )
    return experiment


def call_two_runs(experiment: Experiment, device: torch.device, first: int = 0) -> Tensor:
    """Call a model on one sequence for the runs with seeds ``first`` to 1, and return their logits (R, B, T, V).

    For a layer from outside this includes the backward pass, which may fail for several runs even if it works for one,
    and the length of the training sequences.
    """
    foreign, length = is_path(experiment.mixer), experiment.instance.split("validation").inputs_ST.shape[1]
    runs = [Run(lr=1.0, weight_decay=0.0, seed=seed) for seed in range(first, 2)]
    ensemble = Ensemble(experiment.build, runs, experiment.protocol.optimizer, 1, device)
    positions = length if foreign else min(POSITIONS, length)
    tokens_RBT = torch.zeros(len(runs), 1, positions, dtype=torch.int64, device=device)
    if foreign:
        ensemble.gradient(ensemble.params_RP, tokens_RBT, tokens_RBT)
    with torch.no_grad():
        return ensemble.logits(ensemble.params_RP, tokens_RBT)
