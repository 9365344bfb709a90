"""The Optuna study of a search: what the folders of runs show is told, once."""

import re
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from runners.search import Outcome, ask, catch_up, naming_storage, open_storage, open_study, report, shown, tell

GRID = {"lr": FloatDistribution(1e-8, 10.0, log=True)}
GOOD = Outcome(run="good", params={"lr": 1e-3}, value=0.5, curve={1: 0.25, 2: 0.5}, attributes={"seed": 0})
DIVERGED = Outcome(run="diverged", params={"lr": 1.0}, value=None)


@pytest.fixture(params=["optuna.journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db" if request.param == "sqlite" else str(tmp_path / "new" / request.param)


def test_a_run_is_asked_for_reported_and_told(storage: str) -> None:
    study = open_study(open_storage(storage), "rt", "maximize", {"test": "not yet"})
    trial = ask(study, GRID, "good", GOOD.params)
    report(study, trial, 0.25, 1)

    # Its process is killed; the next one takes the trial over, reports what is new, and tells.
    study = open_study(open_storage(storage), "rt", "maximize", {"test": "0.9"})
    again = ask(study, GRID, "good", GOOD.params)
    assert again.number == trial.number
    report(study, again, 0.25, 1)
    report(study, again, 0.5, 2)
    tell(study, again, GOOD)
    catch_up(study, GRID, [GOOD, DIVERGED])
    catch_up(study, GRID, [GOOD, DIVERGED])

    good, diverged = study.get_trials()
    assert (good.params, good.value, good.intermediate_values) == (GOOD.params, 0.5, GOOD.curve)
    assert good.user_attrs == {"run": "good", "seed": 0}
    assert (diverged.params, diverged.state) == (DIVERGED.params, TrialState.FAIL)
    assert study.user_attrs == {"test": "0.9"}


def test_a_run_that_ended_untold_is_told(storage: str) -> None:
    study = open_study(open_storage(storage), "rt", "maximize", {})
    ask(study, GRID, "good", GOOD.params)
    catch_up(study, GRID, [GOOD])
    assert [(trial.state, trial.value) for trial in study.get_trials()] == [(TrialState.COMPLETE, 0.5)]


def test_a_damaged_journal_is_moved_aside_and_told_again(tmp_path: Path) -> None:
    file = tmp_path / "optuna.journal"
    catch_up(open_study(open_storage(str(file)), "rt", "maximize", {}), GRID, [GOOD])
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + whole)
    study = open_study(open_storage(str(file)), "rt", "maximize", {})
    assert study.get_trials() == []
    catch_up(study, GRID, [GOOD])
    assert study.best_value == 0.5
    assert (tmp_path / "optuna.journal.damaged").read_bytes() == whole[:-20] + whole


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("what://me:secret@host:1/db?x=1", "what://me:***@host:1/db?x=1"),
        ("what://me:se/cr@et@host/db", "what://me:***@host/db"),
        ("what://host/db?password=secret&user=me", "what://host/db?password=***&user=me"),
        ("sqlite:////no/such:folder/me@here.db", "sqlite:////no/such:folder/me@here.db"),
    ],
)
def test_an_error_shows_no_password(url: str, said: str) -> None:
    assert shown(url) == said
    with pytest.raises(ValueError, match=re.escape(f"cannot open storage {said}: ")):
        open_storage(url)
    with pytest.raises(ValueError, match=re.escape(f"storage {said}: no {said}")), naming_storage(url):
        raise StorageInternalError(f"no {url}")


@pytest.mark.parametrize("content", [b"SQLite format 3\x00", b'{"my": "notes"}\n{"half', b"mine"])
@pytest.mark.parametrize("name", ["notes.txt", "folder", "sqlite:////no/such/folder/studies.db", "what://else"])
def test_other_files_and_unknown_databases_are_refused_and_left_alone(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="storage"):
        open_storage(name if ":" in name else str(tmp_path / name))
    assert (tmp_path / "notes.txt").read_bytes() == content
