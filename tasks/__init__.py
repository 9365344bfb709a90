"""The tasks by name."""

from tasks.base import Task
from tasks.compression import Compression
from tasks.copying import Copying
from tasks.fuzzy_recall import FuzzyInContextRecall
from tasks.memorization import Memorization
from tasks.mqar import MultiQueryRecall
from tasks.parity import Parity
from tasks.permutations import Permutations
from tasks.recall import InContextRecall, NoisyInContextRecall
from tasks.selective_copying import SelectiveCopying

TASKS: dict[str, type[Task]] = {
    "in-context-recall": InContextRecall,
    "noisy-in-context-recall": NoisyInContextRecall,
    "fuzzy-in-context-recall": FuzzyInContextRecall,
    "selective-copying": SelectiveCopying,
    "compression": Compression,
    "memorization": Memorization,
    "copying": Copying,
    "mqar": MultiQueryRecall,
    "parity": Parity,
    "s5-permutations": Permutations,
}
