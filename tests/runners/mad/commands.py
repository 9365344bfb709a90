"""What command lines of ``runners.mad`` ask for."""

from collections.abc import Callable, Sequence

from runners.mad.experiment import Experiment
from runners.mad.options import Options, read_options
from runners.mad.plan import plan_experiments


def planned(
    arguments: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> tuple[Options, list[Experiment]]:
    """Options and experiments of a command line."""
    options, mixer_values, task_values = read_options(arguments)
    return options, plan_experiments(options, mixer_values, task_values, say)
