"""What several processes share: the runs of a model, its file, and the time that is left."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from filelock import FileLock

from runners.c4.loop import Loop
from runners.c4.presets import PRESETS
from runners.c4.reference import __main__ as reference
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference import order, training
from runners.c4.reference.__main__ import RUNS
from runners.c4.reference.cells import ConvergedRun, free_place, runs_in, write_cell
from runners.c4.reference.forecast import Work, seconds_on
from runners.c4.reference.order import Place
from runners.files import read_json
from tests.runners.c4.reference.tiny import TINY, begun_runs, cell_of, store
from tests.runners.processes import forks, start
from tests.runners.report.made_up import LANGUAGE_MODEL, LANGUAGE_RUN

FIRST = [(rate, 0) for rate in order.FIRST]


def run(place: Place) -> ConvergedRun:
    return replace(LANGUAGE_RUN, lr=place[0], seed=place[1])


def every(place: Place) -> bool:
    return True


def test_the_first_run_that_fits_and_is_free_is_given(tmp_path: Path) -> None:
    file = tmp_path / "gla.json"
    with free_place(file, every) as place:
        assert place == FIRST[0]
        with free_place(file, every) as other:
            assert other == FIRST[1]
        with free_place(file, lambda place: place[0] > 1e-2) as other:
            assert other == FIRST[2]
    with free_place(file, every) as place:
        assert place == FIRST[0]
    with free_place(file, lambda place: place in FIRST[:1]) as place, free_place(file, lambda p: p == place) as other:
        assert other is None


def test_a_run_that_does_not_fit_is_not_locked(tmp_path: Path) -> None:
    """Else another process would see it as taken while this one asks."""

    def fits(place: Place) -> bool:
        with free_place(tmp_path / "gla.json", every) as other:
            assert other == FIRST[0]
        return False

    with free_place(tmp_path / "gla.json", fits) as place:
        assert place is None


def test_a_run_that_ended_before_it_was_locked_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gla.json"
    lock = cells_of_layers.locked

    @contextmanager
    def finish_first(file: Path, place: Place) -> Iterator[bool]:
        if place == FIRST[0]:
            write_cell(file, replace(LANGUAGE_MODEL, runs=[run(place)]))
        with lock(file, place) as is_free:
            yield is_free

    monkeypatch.setattr(cells_of_layers, "locked", finish_first)
    with free_place(file, every) as place:
        assert place == FIRST[1]


def test_one_process_at_a_time_adds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gla.json"
    write_cell(file, replace(LANGUAGE_MODEL, runs=[run(FIRST[0])]))
    monkeypatch.setattr(reference, "check_terms", lambda *_: None)
    model = reference.Model(name="gla", config=Any, options={}, file=file)  # type: ignore[arg-type]
    adding = threading.Thread(target=reference.add_run, args=(run(FIRST[1]), model, _Corpus(), None))
    with FileLock(tmp_path / ".gla.lock"):
        adding.start()
        adding.join(0.3)
        assert adding.is_alive()
        write_cell(file, replace(LANGUAGE_MODEL, runs=[run(FIRST[0]), run(FIRST[2])]))
    adding.join(10)
    assert [(done.lr, done.seed) for done in runs_in(file)] == [FIRST[0], FIRST[2], FIRST[1]]
    assert json.loads(file.read_text())["complete"] is False


class _Corpus:
    folder = Path("corpus")


@pytest.mark.parametrize(
    ("devices", "works", "end"),
    [
        (1, [Work([1, 3], 5), Work([2], 0)], 11),
        (2, [Work([1, 3], 5)], 8),  # the device that ends the last open run goes on
        (2, [Work([1, 3], 5), Work([2], 0)], 8),
        (3, [Work([2, 2, 2], 2), Work([1], 1)], 4),
        (2, [Work([], 0)], 0),
    ],
)
def test_later_runs_follow_the_last_open_one(devices: int, works: list[Work], end: float) -> None:
    assert seconds_on(devices, works) == end


def test_a_run_that_another_process_trains_is_left_to_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by one with another --out: the lock lies beside the file. No run that depends on it begins."""
    (tmp_path / "cells").mkdir()
    with FileLock(tmp_path / "cells" / ".gla-lr0.01-seed0.lock"):
        reference.main(command)
    assert [(done["lr"], done["seed"]) for done in cell_of(tmp_path, "gla")["runs"]] == [FIRST[0], FIRST[2]]
    assert not cell_of(tmp_path, "gla")["complete"]
    assert cell_of(tmp_path, "transformer")["complete"]
    assert "not finished: gla (failed, or trained by other processes)" in capsys.readouterr().err

    begun = begun_runs(monkeypatch)
    reference.main(command)
    cell = cell_of(tmp_path, "gla")
    assert begun == [FIRST[1], (cell["chosen"], 1)]
    assert cell["complete"]


def share(command: list[str], meeting: Any) -> None:
    """Body of a process that trains in the tiny setting, and begins its first run together with another process."""
    first = iter([meeting])

    def begin(*arguments: Any) -> Loop:
        for together in first:
            together.wait(60)
        return Loop(*arguments)

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "RATES", order.FIRST)
        patch.setitem(PRESETS, "ranking", replace(PRESETS["ranking"], **TINY))
        patch.setattr("runners.c4.train.Loop", begin)
        reference.main(command)


def test_two_processes_share_the_runs_of_one_layer(command: list[str], tmp_path: Path) -> None:
    command, meeting = [*command[:3], "transformer", *command[5:]], forks().Barrier(2)
    processes = [start(share, command, meeting) for _ in range(2)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]

    cell = cell_of(tmp_path, "transformer")
    assert cell["complete"]
    assert sorted((done["lr"], done["seed"]) for done in cell["runs"]) == sorted([*FIRST, (cell["chosen"], 1)])
    assert list((tmp_path / "out" / RUNS / "c4").iterdir()) == []


def test_a_run_that_another_process_trains_for_another_folder_keeps_its_checkpoints(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands have the same --out; this one has the run's figures already."""
    command = [*command[:3], "transformer", *command[5:]]
    discard = training.discard
    monkeypatch.setattr(training, "discard", lambda folder: None)
    reference.main(command)
    monkeypatch.setattr(training, "discard", discard)
    file = tmp_path / "cells" / "transformer.json"
    store(tmp_path, read_json(file) | {"runs": read_json(file)["runs"][:-1]})
    trained, *others = sorted((tmp_path / "out" / RUNS / "c4").iterdir())
    assert others
    with FileLock(trained / ".lock"):
        reference.main(command)
    assert list((tmp_path / "out" / RUNS / "c4").iterdir()) == [trained]
    assert (trained / "result.json").exists()


def test_what_a_killed_command_left_of_a_finished_model_is_deleted(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*command[:3], "transformer", *command[5:]]
    with monkeypatch.context() as patch:
        patch.setattr(reference, "discard_run", lambda folder: None)  # as if killed before it
        reference.main(command)
    cell, folders = cell_of(tmp_path, "transformer"), tmp_path / "out" / RUNS / "c4"
    assert cell["complete"]
    assert len(list(folders.iterdir())) == len(cell["runs"])
    reference.main([*command, "--dry-run"])
    assert len(list(folders.iterdir())) == len(cell["runs"])

    # Another process may still use one of them.
    with FileLock(tmp_path / "cells" / ".transformer-lr0.003-seed0.lock"):
        reference.main(command)
        (kept,) = folders.iterdir()
    assert "-lr0.003-" in kept.name
    reference.main(command)
    assert list(folders.iterdir()) == []
