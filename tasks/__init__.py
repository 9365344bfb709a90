"""The tasks by name."""

from tasks.base import Task
from tasks.compression import Compression
from tasks.copying import Copying
from tasks.fuzzy_recall import FuzzyInContextRecall
from tasks.memorization import Memorization
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
}
