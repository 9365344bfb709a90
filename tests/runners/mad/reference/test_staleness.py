"""Which cells are stale, and the cache of these verdicts."""

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from runners.mad.reference.cells import FOLDER, Cell, cell_file, read_cell
from runners.mad.reference.entries import ENTRIES
from runners.mad.reference.staleness import check, find_stale
from runners.mad.search.identity import Setting, trajectory

from mixers.base import Shape
from runners import processes, verdicts
from runners.mad.experiment import Experiment
from runners.mad.reference import staleness
from tests.runners.mad.commands import planned

SMALL = ("--mixer", "lstm", "--task", "memorization", "--steps", "2", "--width", "16", "--mlp-width", "16")


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    (found,) = planned([*SMALL, "--device", "cpu"])[1]
    return found


@pytest.fixture
def cell(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A cell of an experiment, which is what today's command would train, and an empty cache."""
    monkeypatch.setattr(staleness, "experiment_of", lambda cell: experiment)
    monkeypatch.setattr(verdicts, "CACHE", tmp_path / "cache" / "verdicts.json")
    stored = read_cell(cell_file(FOLDER, ENTRIES["lstm"], "memorization"))
    own = {"fingerprint": experiment.fingerprint, "code": experiment.code}
    return replace(stored, **own, trajectory=[1.0], sharp_trajectory=None)


def test_a_cell_is_stale_when_its_data_or_its_training_are_others(
    cell: Cell, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = trajectory(experiment) or []
    assert first is not None
    elsewhere = replace(cell, code="of another day")
    cells = [
        cell,
        replace(cell, fingerprint="of other data"),
        replace(elsewhere, trajectory=[first, *others]),
        replace(elsewhere, trajectory=[1.001 * first, *others]),
        replace(elsewhere, trajectory=None),
    ]
    assert check(cells) == [False, True, False, True, True]

    # In float64 smaller changes are told.
    sharp = trajectory(experiment, Setting(dtype=torch.float64)) or []
    assert sharp[0] is not None
    assert sharp != [first, *others]
    moved = [[sharp[0] * (1 + change), *sharp[1:]] for change in (1e-7, 1e-4)]
    assert check([replace(elsewhere, sharp_trajectory=now) for now in moved]) == [False, True]
    monkeypatch.setattr(staleness, "experiment_of", lambda c: replace(experiment, shape=Shape(width=16, mlp_width=32)))
    assert check([cell]) == [True]


class Counted:
    """The trajectory of every experiment, and how often it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(staleness, "trajectory", self)

    def __call__(self, experiment: Experiment, setting: Setting) -> list[float]:
        self.calls += 1
        return [1.0]


def test_a_verdict_is_found_once_until_cell_code_or_libraries_change(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = Counted(monkeypatch)
    good, bad = replace(cell, code="earlier"), replace(cell, code="earlier", trajectory=[2.0])
    assert find_stale([good, bad, good]) == [False, True, False]
    assert rehearsed.calls == 1  # cells of one layer and vocabulary share a rehearsal
    assert find_stale([bad, good]) == [True, False]
    assert rehearsed.calls == 1

    # The cell, the libraries, the code.
    find_stale([replace(good, seconds=7.0)])
    assert rehearsed.calls == 2
    monkeypatch.setattr("torch.__version__", "another")
    find_stale([good])
    assert rehearsed.calls == 3
    monkeypatch.setattr(staleness, "code_version", lambda *roots, alone=(): f"changed {roots}")
    find_stale([good])
    assert rehearsed.calls == 4


@pytest.mark.parametrize("damage", ["{", '{"a": 1}', "[]", None])
def test_a_damaged_cache_costs_time_alone(cell: Cell, damage: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed, cells = Counted(monkeypatch), [replace(cell, code="earlier")]
    find_stale(cells)
    if damage is None:  # a folder that cannot be written
        rmtree(verdicts.CACHE.parent)
        verdicts.CACHE.parent.write_text("")
    else:
        verdicts.CACHE.write_text(damage)
    assert find_stale(cells) == [False]
    assert rehearsed.calls == 2
    assert find_stale(cells) == [False]
    assert rehearsed.calls == (3 if damage is None else 2)


class BrokenPool:
    """Processes that the system ends at once."""

    asked = 0

    def __init__(self, processes: int, *_: object) -> None:
        BrokenPool.asked = processes

    def map(self, work: object, *items: Sequence[object], chunksize: int) -> object:
        raise BrokenProcessPool

    def shutdown(self, cancel_futures: bool) -> None:
        assert cancel_futures


def test_many_rehearsals_are_shared_out_and_done_here_if_that_fails(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says so, once for each way of doing them."""
    rehearsed = Counted(monkeypatch)
    monkeypatch.setattr(processes, "ProcessPoolExecutor", BrokenPool)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    few = 2 * staleness.FEW - 1
    assert staleness._rehearse([(experiment, Setting())] * few) == [[1.0]] * few
    assert BrokenPool.asked == 0
    assert staleness._rehearse([(experiment, Setting())] * 3 * staleness.FEW) == [[1.0]] * 3 * staleness.FEW
    assert BrokenPool.asked == 3
    assert rehearsed.calls == 5 * staleness.FEW - 1
    assert capsys.readouterr().err.splitlines() == [
        f"retraining a few steps of reference cells: {2 * staleness.FEW - 1}, once for this code",
        f"retraining a few steps of reference cells: {3 * staleness.FEW}, once for this code",
    ]
