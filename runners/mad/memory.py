"""How many runs a machine trains at once, and lower bounds of the memory that their data and models need."""

from dataclasses import replace

import torch

from mixers.base import Layer, Shape
from mixers.costs import count_parameters, parameters_of_one_and_two
from mixers.models import LanguageModel
from runners.mad.experiment import Experiment
from runners.memory import require_memory
from tasks.base import BLOCK

TOKEN_BYTES = 17
"""Bytes per position of a data set: token, target, and whether it is scored."""
COPIES = 5
"""Floats per parameter in training: itself, its gradient, two moments, and its value at the best evaluation."""

POSITIONS_ON_A_CPU = 2**15
"""Positions of a step beyond which more runs at once save little time on a CPU, but need more memory."""


def runs_at_once(experiment: Experiment, together: int, device: torch.device) -> int:
    """Return how many runs are trained as one ensemble: ``together``, or fewer on a CPU if a run's steps are long."""
    if device.type != "cpu":
        return together
    positions = experiment.protocol.batch_size * experiment.task_config.train_length
    return max(1, min(together, POSITIONS_ON_A_CPU // positions))


def check_memory(experiment: Experiment, together: int, device: torch.device) -> None:
    """Refuse an experiment that cannot fit into memory, before its data are drawn or its models are built.

    Args:
        experiment: the experiment.
        together: largest number of runs that are trained at the same time.
        device: device on which they are trained.

    Raises:
        ValueError: data, parameters or activations need more memory than there is, or the layer cannot be built.
    """
    # Data are in the machine's memory, too.
    task = experiment.task_config
    sequences, length = task.train_examples + 2 * task.eval_examples, task.train_length
    data = TOKEN_BYTES * max(sequences * length, BLOCK * task.longest_length)
    advice = "lower --task.train-examples, --task.eval-examples or the lengths of the task"
    require_memory(data, torch.device("cpu"), f"the data of {experiment.task}", advice)

    count = runs_at_once(experiment, together, device)
    runs = f"{count} run{'s' * (count > 1)} of {experiment.label}"
    models = count * COPIES * 4 * _parameters(experiment)
    fewer = ", --together" if count > 1 else ""
    advice = f"lower --width, --mlp-width, --layers{fewer} or the task's vocabulary"
    require_memory(models, device, runs, advice)

    # Each layer keeps at least its inputs for the backward pass, in 16 bits or more.
    shape = experiment.shape
    kept = 2 * count * experiment.protocol.batch_size * length * shape.width * shape.layers
    advice = f"lower --batch-size{fewer}, --layers or the lengths of the task"
    require_memory(kept, device, f"a step of {runs}", advice)


def _parameters(experiment: Experiment) -> int:
    """Return the number of parameters of a model's layers, embedding and readout."""
    shape = experiment.shape

    def of_layers(count: int) -> int:
        layers = replace(shape, layers=count)
        return count_parameters(LanguageModel(experiment.layer, experiment.mixer_config, layers, vocab_size=1))

    key = experiment.layer, repr(experiment.mixer_config), replace(shape, layers=1)
    if key not in _counted:
        _counted[key] = parameters_of_one_and_two(of_layers, experiment.mixer)
    one, two = _counted[key]
    return one + (shape.layers - 1) * (two - one) + 2 * (experiment.instance.vocab_size - 1) * shape.width


_counted: dict[tuple[type[Layer], str, Shape], tuple[int, int]] = {}
"""Number of parameters of models with one layer and with two, by layer, configuration and shape."""
