"""Who trains a run: one process at a time, and another one once it is gone."""

import os
import time
from pathlib import Path

from runners.records import RECORD
from runners.runs import LOCK, claimed, is_finished
from tests.runners.processes import forks, wait_for


def hold(folder: Path) -> None:
    """Claim a run and leave a temporary file, until this process is killed."""
    with claimed([folder]):
        (folder / ".unfinished-abcd1234.safetensors").touch()
        (folder / "process").write_text(str(os.getpid()))
        time.sleep(600)


def test_a_run_is_claimed_once_and_a_finished_one_never(tmp_path: Path) -> None:
    a, b, c, done = (tmp_path / name for name in ("a", "b", "c", "done"))
    done.mkdir()
    (done / RECORD).touch()
    with claimed([done, a, b, c], most=2) as mine, claimed([a, b, c, done], most=3) as others:
        assert (mine, others) == ([a, b], [c])
        assert is_finished(done)
        assert not is_finished(a)
    with claimed([a, b, c], most=3) as mine:
        assert mine == [a, b, c]


def test_a_run_is_finished_between_the_look_and_the_lock(tmp_path: Path) -> None:
    with claimed([tmp_path]) as mine:
        assert mine == [tmp_path]
        (tmp_path / RECORD).touch()
    with claimed([tmp_path]) as mine:
        assert mine == []


def test_the_run_of_a_killed_process_is_free_and_cleared(tmp_path: Path) -> None:
    process = forks().Process(target=hold, args=(tmp_path,), daemon=True)
    process.start()
    wait_for((tmp_path / "process").exists)
    with claimed([tmp_path]) as mine:
        assert mine == []
    process.kill()
    process.join()
    with claimed([tmp_path]) as mine:
        assert mine == [tmp_path]
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "process"]
