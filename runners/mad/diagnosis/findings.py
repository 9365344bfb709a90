"""Findings of a diagnosis, as ``diagnosis.json`` holds them."""

from dataclasses import dataclass

from runners.mad.diagnosis.confusions import ConfusionMatrix
from runners.mad.diagnosis.linear_probes import ProbeReport
from runners.mad.diagnosis.profile import Profile
from tasks.base import Accuracy


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Content of ``diagnosis.json``; accuracies are shares in [0, 1].

    Attributes:
        title: names the model.
        task: name of the task.
        sequences: sequences of the test split.
        scored_positions: scored positions of the test split.
        accuracy: accuracy on the test split.
        macro_accuracy: token accuracy averaged over classes, only for comparison with other suites.
        chance: accuracy of a solver that draws each answer uniformly.
        by_position: accuracy of every position that is scored in any sequence.
        by_answer: accuracy of the 1st, 2nd, ... scored position of a sequence.
        confusion: targets against predictions.
        probe: linear probes of the hidden state.
        extrapolation_sets: accuracy on each extrapolation set.
        extrapolation_chances: chance on each of these sets.
        unreadable_sets: by name of each other set, the reason why it has no accuracy.
        trained_length: length N of the longest sequences in training, as in the names of sets called "length N".
    """

    title: str
    task: str
    sequences: int
    scored_positions: int
    accuracy: Accuracy
    macro_accuracy: float
    chance: Accuracy
    by_position: Profile
    by_answer: Profile
    confusion: ConfusionMatrix
    probe: ProbeReport
    extrapolation_sets: dict[str, Accuracy]
    extrapolation_chances: dict[str, Accuracy]
    unreadable_sets: dict[str, str]
    trained_length: int | None
