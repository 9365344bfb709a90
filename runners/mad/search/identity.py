"""Whether the code of today still trains as the code that made a study did.

A study is identified by its configuration and its data. Its code may change as long as it behaves the same, which is
checked by a *rehearsal*: a few training steps on random sequences, on the CPU, evaluation included.

1. A new study stores the losses and accuracies of its rehearsal, its *trajectory*, and the hash of its code.
2. While the hash stays the same, nothing is checked.
3. When the hash is another one, the rehearsal runs again. If the trajectory agrees, the new hash is stored beside the
   old one; if not, the experiment gets a new study, named ``… r2``, ``… r3``, and a line says why.

A rehearsal runs in float64, where small changes show. A user's layer that cannot compute in it is rehearsed in float32.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from optuna.storages import BaseStorage

from mixers.named import is_path
from runners.interrupt import StoppedError
from runners.mad.experiment import Experiment
from runners.mad.search.study import load_study, open_study, stored_name, study_names
from runners.mad.training.loop import train
from runners.mad.training.protocol import Protocol, Run
from runners.storage import Store
from tasks.base import IGNORE, Batch, Split

TOLERANCE = 3e-4
"""Relative difference of a loss by which a trajectory in float32 may differ, on another processor say.

Rounding alone moves it by up to 1.3e-4: a norm that sums in another order does so to DeltaNet, because the first steps
of AdamW divide small gradients by themselves.
"""
SHARP_TOLERANCE = 1e-5
"""The same in float64, where rounding is left in the loss, which is computed in float32, and in constants of layers.

The norm's other order of sums moves DeltaNet's trajectory by 1.8e-4 in float32, and not at all in float64. On another
processor, with another version of PyTorch, the largest difference of 50 cells was 2.0e-6.
"""
SHORTEST = 20
"""Length of the sequences, unless parts of the layer need longer ones."""
SEQUENCES = 4
STEPS = 4
CLIP = 0.1
"""Largest gradient norm, small enough that clipping happens."""
RUNS = (Run(lr=1e-2, weight_decay=0.0, seed=0), Run(lr=5e-3, weight_decay=1.0, seed=1))

Trajectory = list[float | None]
"""Figures in order; None after a run has diverged."""


class Setting(NamedTuple):
    """The setting of a rehearsal; unless given, that of studies and cells of earlier versions.

    Attributes:
        positions: length of the sequences.
        dtype: dtype of everything but the loss.
    """

    positions: int = SHORTEST
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        """Relative difference of a loss by which two trajectories may differ."""
        return SHARP_TOLERANCE if self.dtype == torch.float64 else TOLERANCE


FIRST = Setting()
"""The setting of earlier versions."""


class Rehearsal:
    """Random sequences in place of a task's: every second position has a target, every fourth is scored."""

    def __init__(self, vocab_size: int, positions: int) -> None:
        self.vocab_size = vocab_size
        self.positions = positions

    def split(self, name: Split) -> Batch:
        """Sequences of a split, of which all have the same."""
        random = np.random.default_rng(0)
        inputs_ST, targets_ST = random.integers(0, self.vocab_size, (2, SEQUENCES, self.positions))
        position_T = np.arange(self.positions)
        targets_ST[:, position_T % 2 == 0] = IGNORE
        scored_ST = np.broadcast_to(position_T % 4 == 1, inputs_ST.shape).copy()
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)


def rehearsal_of(experiment: Experiment) -> tuple[Any, ...]:
    """Return what a rehearsal depends on: experiments of equal values have one trajectory."""
    task = experiment.instance
    return *experiment.layer_choice.key, task.backbone, task.vocab_size, experiment.protocol.optimizer


def rehearsal_length(experiment: Experiment) -> int:
    """Return the length of a rehearsal's sequences: longer than two parts of the layer.

    Parts are the segments, windows, chunks or blocks of some layers. ``Layer.remark`` tells sequences that are no
    longer than one part. The parts of a user's layer are not known, so it takes sequences as long as the task's
    longest.
    """
    if is_path(experiment.mixer):
        return max(SHORTEST, experiment.task_config.longest_length)
    longest = max(SHORTEST, experiment.length)
    layer, config, lengths = experiment.layer, experiment.mixer_config, range(SHORTEST, longest + 1)
    return next((n for n in lengths if layer.remark(config, (n - 1) // 2) is None), longest)


def trajectory(experiment: Experiment, setting: Setting = FIRST) -> Trajectory | None:
    """Losses and accuracies of the rehearsal's runs, in order; None if the CPU cannot run a user's own layer.

    Parameters drawn in float64 are others than those in float32, so that trajectories of different dtypes differ.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        return _trajectory(experiment, setting.positions)
    finally:
        torch.set_default_dtype(before)


def _trajectory(experiment: Experiment, positions: int) -> Trajectory | None:
    optimizer = replace(experiment.protocol.optimizer, clip=CLIP)
    protocol = Protocol(batch_size=SEQUENCES, steps=STEPS, evaluations=STEPS, optimizer=optimizer)
    task = Rehearsal(experiment.instance.vocab_size, positions)
    try:
        results = train(experiment.build, task, protocol, RUNS, torch.device("cpu"), ())
    except StoppedError:
        raise
    except Exception:
        if not is_path(experiment.mixer):
            raise
        return None  # it may need a GPU, or another dtype

    found: Trajectory = []
    for result in results:
        for point in result.curve:
            found.append(point.train_loss)
            found += (
                [None, None] if point.validation is None else [point.validation.loss, point.validation.token_accuracy]
            )
    return found


def agree(one: Trajectory, other: Trajectory, tolerance: float) -> bool:
    """Return whether two trajectories are those of code that behaves the same."""
    return len(one) == len(other) and all(_close(a, b, tolerance) for a, b in zip(one, other, strict=True))


def _close(one: float | None, other: float | None, tolerance: float) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=tolerance)


def identify(experiment: Experiment, storage: BaseStorage, say: Callable[[str], None]) -> Experiment:
    """The experiment with the revision whose study was trained by code that behaves as today's; nothing is written."""
    studies, known = study_names(storage), dict[Setting, Trajectory | None]()
    while (attributes := studies.get(stored_name(experiment, storage))) is not None and "codes" in attributes:
        if experiment.code in attributes["codes"]:
            return experiment

        # Other code: the same behaviour makes it the same study.
        then, setting = attributes["trajectory"], _setting(attributes)
        if setting not in known:
            known[setting] = trajectory(experiment, setting)
        now = known[setting]
        if then is not None and now is not None and agree(then, now, setting.tolerance):
            return experiment

        following = replace(experiment, revision=experiment.revision + 1)
        why = _difference(then, now, setting.tolerance)
        say(f"{experiment.name} was trained by code that {why}; this is study {following.name}")
        experiment = following
    return experiment


def sign_study(experiment: Experiment, store: Store) -> None:
    """Store the hash of today's code with the experiment's study, and with a new study its trajectory."""
    study = open_study(experiment, store)
    if experiment.code in study.user_attrs.get("codes", []):
        return
    found, setting = (None, FIRST) if "codes" in study.user_attrs else _rehearsed(experiment)
    with store.exclusive():
        attributes = load_study(experiment, store.storage).user_attrs
        codes = attributes.get("codes", [])
        if not codes:
            study.set_user_attr("trajectory", found)
            study.set_user_attr("rehearsal", {"positions": setting.positions, "dtype": _name(setting.dtype)})
        if experiment.code not in codes:
            study.set_user_attr("codes", [*codes, experiment.code])


def sign_rebuilt(experiment: Experiment, codes: Iterable[str], store: Store) -> None:
    """Store with a study, rebuilt from its runs, the hashes of the code that trained them.

    A study without any trajectory gets one only if today's code is among them.
    """
    codes = dict.fromkeys(codes)
    if experiment.code in codes:
        sign_study(experiment, store)
    with store.exclusive():
        study = load_study(experiment, store.storage)
        if "trajectory" not in study.user_attrs:
            study.set_user_attr("trajectory", None)
        stored = study.user_attrs.get("codes", [])
        study.set_user_attr("codes", [*stored, *(code for code in codes if code not in stored)])


def _rehearsed(experiment: Experiment) -> tuple[Trajectory | None, Setting]:
    """Return the trajectory of a new study, and the setting of its rehearsal."""
    setting = sharp = Setting(rehearsal_length(experiment), torch.float64)
    found = trajectory(experiment, sharp)
    if found is None:
        setting = sharp._replace(dtype=torch.float32)
        found = trajectory(experiment, setting)
    return found, setting


def _setting(attributes: Mapping[str, Any]) -> Setting:
    """Return the setting of the rehearsal of a study, given its attributes, which in earlier versions lack it."""
    stored = attributes.get("rehearsal")
    return FIRST if stored is None else Setting(stored["positions"], getattr(torch, stored["dtype"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(then: Trajectory | None, now: Trajectory | None, tolerance: float) -> str:
    """In what two trajectories differ, in words."""
    if now is None:
        return "has changed, and the layer cannot run on a CPU, where the change is checked"
    if then is None:
        return "has changed, and stored nothing to compare today's code with"
    pairs = zip_longest(then, now)
    differing = next(pair for pair in pairs if not _close(*pair, tolerance))
    before, after = ("nothing" if y is None else f"{y:.8g}" for y in differing)
    return f"trains differently (a few test steps gave {before}, and give {after} now)"
