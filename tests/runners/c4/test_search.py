"""The search over the grid: each point once, also after a kill; the best point."""

import io
from pathlib import Path

import optuna
import pytest
from rich.console import Console

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4 import search  # noqa: E402
from runners.c4.checkpoints import StepRow  # noqa: E402
from runners.c4.progress import Progress  # noqa: E402
from runners.search import JOURNAL, open_storage  # noqa: E402
from tests.runners.c4.runs import ALONE, Interruption, configured, corpus_of, interrupt  # noqa: E402


def test_the_search_trains_each_point_once_and_goes_on(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second of four points; two points diverge."""
    monkeypatch.setattr(search, "LRS", (1e-2, 1e30))
    monkeypatch.setattr("runners.c4.config._RANGES", {})
    config = configured(texts, tmp_path, search=True, warmup_fraction=0.9)
    steps: list[int] = []
    kill_at = [13]

    class Watched(Progress):
        def stepped(self, row: StepRow) -> None:
            super().stepped(row)
            steps.append(row.step)
            if len(steps) in kill_at:
                interrupt()

    def go() -> search.Results:
        return search.search(config, {}, corpus_of(config), ALONE, Watched(Console(quiet=True), config))

    with pytest.raises(Interruption):
        go()
    kill_at.clear()
    results = go()
    assert [(point.lr, point.beta2) for point, _ in results] == [(1e-2, 0.95), (1e-2, 0.99), (1e30, 0.95), (1e30, 0.99)]
    assert [record.diverged_step is None for _, record in results] == [True, True, False, False]
    assert steps[:18] == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]  # the second goes on from step 3
    losses = [record.metrics["validation"]["loss"] for _, record in results[:2]]
    assert search.best(results)[1].metrics["validation"]["loss"] == min(y for y in losses if y is not None)

    # All is trained; the study says what the folders say.
    del steps[:]
    assert go() == results
    assert not steps
    storage = open_storage(str(tmp_path / JOURNAL))
    (name,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=name, storage=storage).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert [trial.value for trial in trials[:2]] == losses
    assert [len(trial.intermediate_values) for trial in trials[:2]] == [3, 3]

    # A table with the best point, which is at an end of the grid.
    console = Console(file=io.StringIO(), width=200)
    search.print_results(results, console)
    text = console.file.getvalue()
    assert text.count("diverged") == 2
    assert text.count("→") == 1
    assert "lr 0.01 is the smallest of the grid" in text
