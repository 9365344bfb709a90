"""What command lines of ``runners.mad`` ask for."""

from collections.abc import Callable, Sequence

from runners.mad.experiment import Experiment
from runners.mad.options import Options, read_options
from runners.mad.plan import plan_experiments

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
