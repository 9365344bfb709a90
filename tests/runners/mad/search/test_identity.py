"""Studies outlive changes of code that leave behaviour as it is, and no others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.registry import find_mixer
from mixers.transformer import Transformer
from runners.mad.experiment import Experiment
from runners.mad.search import identity
from runners.mad.search.identity import TOLERANCE, Setting, agree, identify, rehearsal_length, sign_study, trajectory
from runners.mad.search.study import open_study
from runners.mad.search.watch import Watcher
from runners.mad.training.optimizer import AdamW
from runners.mad.training.protocol import Optimizer, Protocol, Run
from runners.storage import Store
from tasks.recall import InContextRecall
from tests.runners.mad.commands import search

CPU = torch.device("cpu")
GRID = [Run(lr=1e-3, weight_decay=0.0, seed=0)]
EXPERIMENT = Experiment(
    mixer="transformer",
    mixer_config=Transformer.Config(heads=2),
    task="in-context-recall",
    task_config=InContextRecall.Config(length=16, train_examples=40, eval_examples=30),
    difficulty="custom",
    shape=Shape(width=16, mlp_width=32),
    protocol=Protocol(batch_size=16, steps=2, evaluations=1),
    precision="float32",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path, str(tmp_path / "studies.journal"))
    yield opened
    opened.close()


@pytest.fixture
def with_other_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the hash of the code be another one."""
    return lambda: monkeypatch.setattr(Experiment, "code", property(lambda self: "another hash"))


def identified(store: Store) -> tuple[Experiment, list[str]]:
    said: list[str] = []
    return identify(EXPERIMENT, store.storage, said.append), said


def test_other_code_that_behaves_the_same_finds_the_study_again(
    store: Store, with_other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    search(EXPERIMENT, GRID, store, CPU, 1, Watcher())
    with_other_code()
    assert identified(store) == (EXPERIMENT, [])

    # The hash is remembered, so that nothing is rehearsed a second time.
    sign_study(EXPERIMENT, store)
    monkeypatch.setattr(identity, "trajectory", None)
    assert identified(store) == (EXPERIMENT, [])
    assert len(open_study(EXPERIMENT, store).user_attrs["codes"]) == 2


def test_code_that_trains_otherwise_gets_a_study_of_its_own_and_a_line_says_why(
    store: Store, with_other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    search(EXPERIMENT, GRID, store, CPU, 1, Watcher())
    with_other_code()
    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda self, x_BTD: forward(self, x_BTD) + 0.01 * x_BTD)

    found, (line,) = identified(store)
    assert found == replace(EXPERIMENT, revision=2)
    assert found.name == f"{EXPERIMENT.name} r2"
    assert line.startswith(f"{EXPERIMENT.name} was trained by code that trains differently (a few test steps gave ")
    assert found.run_id(GRID[0]) != EXPERIMENT.run_id(GRID[0])

    # The new study is found again, and the old one, too, when its code is back.
    search(found, GRID, store, CPU, 1, Watcher())
    assert identified(store)[0] == found
    monkeypatch.undo()
    assert identified(store) == (EXPERIMENT, [])


def test_a_layer_that_cannot_be_rehearsed_keeps_its_study_while_its_code_is_the_same(
    store: Store, with_other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "trajectory", lambda *_: None)
    search(EXPERIMENT, GRID, store, CPU, 1, Watcher())
    assert identified(store) == (EXPERIMENT, [])
    with_other_code()
    found, (line,) = identified(store)
    assert found.revision == 2
    assert "the layer cannot run on a CPU" in line


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": Optimizer(beta2=0.9)},
        {"optimizer": Optimizer(final_lr=1e-3)},
        {"optimizer": Optimizer(eps=1e-4)},
    ],
    ids=["beta2", "schedule", "eps"],
)
def test_a_rehearsal_notices_small_changes_of_training(change: dict[str, Optimizer]) -> None:
    before, after = (
        trajectory(replace(EXPERIMENT, protocol=replace(EXPERIMENT.protocol, **values))) for values in ({}, change)
    )
    assert before is not None
    assert after is not None
    assert not agree(before, after, TOLERANCE)


def test_a_rehearsal_notices_weight_decay_of_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    before, init = trajectory(EXPERIMENT), AdamW.__init__

    def decaying_all(self: AdamW, settings: Optimizer, runs: Sequence[Run], decayed_P: Tensor, steps: int) -> None:
        init(self, settings, runs, torch.ones_like(decayed_P), steps)

    monkeypatch.setattr(AdamW, "__init__", decaying_all)
    after = trajectory(EXPERIMENT)
    assert before is not None
    assert after is not None
    assert not agree(before, after, TOLERANCE)


def test_trajectories_agree_within_the_tolerance_alone() -> None:
    assert agree([2.0, None], [2.0 * (1 + TOLERANCE / 2), None], TOLERANCE)
    assert not agree([2.0], [2.0 * (1 + 2 * TOLERANCE)], TOLERANCE)
    assert not agree([2.0], [None], TOLERANCE)
    assert not agree([2.0], [2.0, 2.0], TOLERANCE)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_layer_can_be_rehearsed_and_repeats_itself(mixer: str) -> None:
    small = replace(EXPERIMENT, mixer=mixer, mixer_config=MIXERS[mixer].Config(), shape=Shape(width=32, mlp_width=32))
    first, second = trajectory(small), trajectory(small)
    assert first is not None
    assert first == second
    assert trajectory(small, Setting(dtype=torch.float64)) not in (None, first)
    assert torch.get_default_dtype() == torch.float32


def test_a_change_that_float32_would_hide_gets_a_study_of_its_own(
    store: Store, with_other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    search(EXPERIMENT, GRID, store, CPU, 1, Watcher())
    before = trajectory(EXPERIMENT)
    with_other_code()
    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda self, x_BTD: forward(self, x_BTD) + 1e-3 * x_BTD)
    after = trajectory(EXPERIMENT)
    assert before is not None
    assert after is not None
    assert agree(before, after, TOLERANCE)
    found, (line,) = identified(store)
    assert found.revision == 2
    assert "trains differently" in line


def test_a_study_of_an_earlier_version_is_compared_as_it_was_rehearsed(
    store: Store, with_other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(EXPERIMENT, store)
    study.set_user_attr("trajectory", trajectory(EXPERIMENT))
    study.set_user_attr("codes", ["its hash"])
    assert identified(store) == (EXPERIMENT, [])

    settings = []
    monkeypatch.setattr(identity, "trajectory", lambda _, setting: settings.append(setting))
    assert identified(store)[0].revision == 2
    assert settings == [Setting(positions=20, dtype=torch.float32)]


LATE = """
from torch import nn

class Late(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        y = self.map(x)
        y[:, 30:] = FACTOR * y[:, 30:]
        return y
"""


def test_a_users_layer_is_rehearsed_on_sequences_as_long_as_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_layer.py").write_text(f"FACTOR = 0\n{LATE}")
    monkeypatch.syspath_prepend(tmp_path)
    mixer = "late_layer:Late"
    config = find_mixer(mixer).Config()
    task = InContextRecall.Config(length=40, train_examples=4, eval_examples=4)
    late = replace(EXPERIMENT, mixer=mixer, mixer_config=config, task_config=task)
    assert rehearsal_length(late) == late.length
    setting = Setting(rehearsal_length(late))
    before, short = trajectory(late, setting), trajectory(late)
    monkeypatch.setattr("late_layer.FACTOR", 1)
    after = trajectory(late, setting)
    assert before is not None
    assert after is not None
    assert short == trajectory(late)
    assert not agree(before, after, TOLERANCE)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_with_parts_is_rehearsed_on_sequences_longer_than_two_of_them(mixer: str) -> None:
    config = MIXERS[mixer].Config()
    part = max((getattr(config, name, 0) or 0) for name in ("window", "segment", "chunk"))
    task = InContextRecall.Config(length=256, train_examples=4, eval_examples=4)
    experiment = replace(EXPERIMENT, mixer=mixer, mixer_config=config, task_config=task)
    length = rehearsal_length(experiment)
    assert length > 2 * part
    assert length >= 20
    if MIXERS[mixer].remark(config, 1) is None:
        assert length == 20
    short = replace(experiment, task_config=InContextRecall.Config(length=8, train_examples=4, eval_examples=4))
    assert rehearsal_length(short) == 20
