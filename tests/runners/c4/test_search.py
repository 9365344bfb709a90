"""The search over the grid: each point once, also after a kill; the best point."""

import io
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4 import search  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.curve import Row  # noqa: E402
from runners.c4.watchers import Watcher  # noqa: E402
from runners.storage import Store  # noqa: E402
from tests.runners.c4.runs import ALONE, At, Interruption, configured, corpus_of, interrupt  # noqa: E402


def test_the_search_trains_each_point_once_and_goes_on(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second of four points; one point diverges."""
    monkeypatch.setattr(search, "LRS", (1e-2, 1e30))
    config = configured(texts, tmp_path, search=True, warmup_fraction=0.9)
    trained: list[str] = []

    class Count(At):
        def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
            trained.append(name)
            self.step = 5 if len(trained) == 2 else 0

    def go(watcher: Watcher) -> list[tuple[Config, dict[str, Any] | None]]:
        store = Store(tmp_path, str(search.study_file(tmp_path)))
        try:
            return search.search(config, {}, corpus_of(config), ALONE, [watcher], store)
        finally:
            store.close()

    with pytest.raises(Interruption):
        go(Count(0, interrupt))
    results = go(At(0, interrupt))
    assert [(point.lr, point.beta2) for point, _ in results] == [(1e-2, 0.95), (1e-2, 0.99), (1e30, 0.95), (1e30, 0.99)]
    assert [result is None for _, result in results] == [False, False, True, True]
    chosen = search.best(results)
    assert chosen is not None
    assert chosen[1]["validation_loss"] == min(r["validation_loss"] for _, r in results if r is not None)
    assert go(At(0, interrupt)) == results
    store = Store(tmp_path, str(search.study_file(tmp_path)))
    (name,) = optuna.get_all_study_names(store.storage)
    trials = optuna.load_study(study_name=name, storage=store.storage).trials
    store.close()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert trials[1].value == results[1][1]["validation_loss"] if results[1][1] else False


def test_the_best_point_is_that_of_least_validation_loss() -> None:
    """Not of least loss on the last batch."""
    points = [Config(lr=lr) for lr in (1e-3, 3e-3, 1e-2)]
    low, high = {"validation_loss": 3.0, "loss": 3.5}, {"validation_loss": 3.1, "loss": 2.5}
    assert search.best([(points[0], high), (points[1], None), (points[2], low)]) == (points[2], low)
    assert search.best([(points[1], None)]) is None


@pytest.mark.parametrize(("lr", "end"), [(1e-3, "smallest"), (3e-3, None), (1e-2, "largest")])
def test_a_best_point_at_an_end_of_the_grid_is_said(lr: float, end: str | None) -> None:
    figures = {"validation_loss": 3.0, "loss": 3.5, "tokens_per_second": 9.0}
    console = Console(file=io.StringIO(), width=200)
    search.print_results([(Config(lr=lr), figures), (Config(lr=lr / 2), None)], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (f"lr {lr:g} is the {end} of the grid" in text) == (end is not None)
    assert ("of the grid" in text) == (end is not None)
