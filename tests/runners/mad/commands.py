"""What command lines of ``runners.mad`` ask for, and searches of their experiments."""

from collections.abc import Callable, Sequence

import torch
from optuna.trial import FrozenTrial

from runners.mad.experiment import Experiment
from runners.mad.options import Options, read_options
from runners.mad.plan import plan_experiments
from runners.mad.search.search import Searcher
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.storage import Store

TINY = [
    *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--evaluations", "3", "--steps", "6"),
]
"""A small task and a small layer on a CPU."""
HEADS = ["--mixer.heads", "2"]


def planned(
    arguments: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> tuple[Options, list[Experiment]]:
    """Options and experiments of a command line."""
    options, mixer_values, task_values = read_options(arguments)
    return options, plan_experiments(options, mixer_values, task_values, say)


def search(
    experiment: Experiment, grid: Sequence[Run], store: Store, device: torch.device, together: int, watcher: Watcher
) -> list[FrozenTrial]:
    """Train what is missing of a grid."""
    return Searcher(store=store, device=device, together=together, watcher=watcher).search(experiment, grid)
