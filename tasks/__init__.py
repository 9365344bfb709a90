"""The tasks by name."""

from tasks.base import Task
from tasks.compression import Compression
from tasks.copying import Copying
from tasks.flip_flop import FlipFlop
from tasks.forgetting_mqar import ForgettingRecall
from tasks.fuzzy_recall import FuzzyInContextRecall
from tasks.group_words import GroupWords
from tasks.joint_keys import JointKeys
from tasks.memorization import Memorization
from tasks.modular_arithmetic import ModularArithmetic
from tasks.mqar import MultiQueryRecall
from tasks.multi_hop import MultiHop
from tasks.parity import Parity
from tasks.permutations import Permutations
from tasks.recall import InContextRecall, NoisyInContextRecall
from tasks.selective_copying import SelectiveCopying

PUBLISHED: dict[str, type[Task]] = {
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
"""The ten tasks of the published table, which ``--task all`` trains and on all of which layers are ranked."""

TASKS: dict[str, type[Task]] = {
    **PUBLISHED,
    "modular-arithmetic": ModularArithmetic,
    "group-words": GroupWords,
    "forgetting-mqar": ForgettingRecall,
    "joint-keys": JointKeys,
    "flip-flop": FlipFlop,
    "multi-hop": MultiHop,
}
