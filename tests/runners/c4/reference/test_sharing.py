"""What several processes share: the runs of a model, its file, and the time that is left."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from filelock import FileLock

from runners.c4.reference import __main__ as reference
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference.cells import Place, free_place, runs_in, write_cell
from runners.c4.reference.forecast import Work, seconds_on
from tests.runners.report.made_up import LANGUAGE_MODEL, LANGUAGE_RUN

FIRST = [(rate, 0) for rate in cells_of_layers.FIRST]


def run(place: Place) -> dict[str, Any]:
    return {**LANGUAGE_RUN, "lr": place[0], "seed": place[1]}


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
            write_cell(file, {**LANGUAGE_MODEL, "runs": [run(place)]})
        with lock(file, place) as is_free:
            yield is_free

    monkeypatch.setattr(cells_of_layers, "locked", finish_first)
    with free_place(file, every) as place:
        assert place == FIRST[1]


def test_one_process_at_a_time_adds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gla.json"
    write_cell(file, {**LANGUAGE_MODEL, "runs": [run(FIRST[0])]})
    monkeypatch.setattr(reference, "check_terms", lambda *_: None)
    model = reference.Model(name="gla", config=Any, options={}, file=file)  # type: ignore[arg-type]
    adding = threading.Thread(target=reference.add_run, args=(run(FIRST[1]), model, _Corpus(), None))
    with FileLock(tmp_path / ".gla.lock"):
        adding.start()
        adding.join(0.3)
        assert adding.is_alive()
        write_cell(file, {**LANGUAGE_MODEL, "runs": [run(FIRST[0]), run(FIRST[2])]})
    adding.join(10)
    assert [(done["lr"], done["seed"]) for done in runs_in(file)] == [FIRST[0], FIRST[2], FIRST[1]]
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
