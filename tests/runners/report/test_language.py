"""Do scores predict the losses of language models: the correlations, and what the page says of them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from mixers.registry import find_mixer
from runners.c4.reference.cells import NAME, write_cell
from runners.report.__main__ import main
from runners.report.cells import reference_board
from runners.report.language import LEAST, MEAN_RANK, Rho, answer, answers, correlations, read_language_models, spearman
from tests.runners.report import made_up

LAYERS = ("rt", "transformer", "staircase", "gla", "retnet", "deltanet", "rwkv7", "lru")
"""Four families have two members or more: three recurrent or plain attentions, linear attention, the delta rule."""


def run(lr: float, seed: int, loss: float) -> dict[str, Any]:
    parts = {"recall_loss": 2 * loss, "rest_loss": 5 - loss, "bits_per_byte": loss / 3}
    return {**made_up.LANGUAGE_RUN, "lr": lr, "seed": seed, "validation_loss": loss, **parts}


def write_model(results: Path, layer: str, loss: float, runs: int = 4) -> None:
    """Write a language model whose seeds have this mean loss at the best of three learning rates."""
    best = [run(3e-3, 0, loss - 0.01), run(1e-2, 0, loss + 1), run(3e-3, 1, loss + 0.01)]
    described = {**made_up.LANGUAGE_MODEL, "layer": layer, "family": find_mixer(layer).family}
    cell = {**described, "parameters_without_embeddings": 3_000_000, "runs": [run(1e-3, 0, loss + 1), *best][:runs]}
    write_cell(results / "reference" / NAME / f"{layer}.json", cell)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in which parity orders the losses, copying orders them the wrong way, and memorization is noise."""
    noise = np.random.default_rng(0).permutation(len(LAYERS)) / 10
    for n, layer in enumerate(LAYERS):
        write_model(tmp_path, layer, 3 + n / 10)
        for task, value in {"parity": 0.9 - n / 20, "copying": 0.1 + n / 20, "memorization": noise[n]}.items():
            made_up.write_cell(tmp_path, layer, task, [value, value])
    made_up.use(tmp_path, monkeypatch)
    return tmp_path


def test_a_correlation_is_that_of_scipy_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(1)
    for size in (6, 9, 21):
        x_L, y_L = rng.integers(5, size=size).astype(float), rng.standard_normal(size)
        rho, opposite = spearman(x_L, np.array([y_L, -y_L]))
        assert rho is not None
        assert opposite is not None
        assert opposite.value == pytest.approx(-rho.value)
        assert rho.value == pytest.approx(spearmanr(x_L, y_L).statistic)
        assert rho.low <= rho.value <= rho.high


def test_within_families_the_difference_between_families_does_not_count() -> None:
    """Two families apart in both figures, each ordered the other way inside."""
    x_L, y_L = np.array([1.0, 2, 3, 4, 11, 12, 13, 14]), np.array([4.0, 3, 2, 1, 14, 13, 12, 11])
    families = ["a"] * 4 + ["b"] * 4
    (pooled,), (within,) = spearman(x_L, y_L[None]), spearman(x_L, y_L[None], families)
    assert pooled is not None
    assert within is not None
    assert pooled.value > 0.5
    assert within.value == pytest.approx(-1)

    # A family of one layer orders nothing.
    (alone,) = spearman(np.append(x_L, 99), np.append(y_L, 99)[None], [*families, "c"])
    assert alone is not None
    assert alone.value == pytest.approx(-1)


@pytest.mark.parametrize("x_L", [np.arange(LEAST - 1.0), np.ones(9)], ids=["too few layers", "all the same"])
def test_where_there_is_no_correlation_there_is_none(x_L: Any) -> None:
    assert spearman(x_L, np.arange(float(len(x_L)))[None]) == [None]


def test_the_interval_covers_what_it_should() -> None:
    """Of samples of 20 layers without a relation, about one in twenty has an interval that leaves zero out."""
    rng = np.random.default_rng(2)
    found = spearman(rng.standard_normal(20), rng.standard_normal((60, 20)))
    assert sum(rho.excludes_zero for rho in found if rho is not None) <= 10


def test_scores_that_order_the_losses_are_found(results: Path) -> None:
    models = read_language_models(results / "reference" / NAME)
    assert [model.layer for model in models] == list(LAYERS)
    assert models[0].loss("total") == pytest.approx(3.0)
    found = {
        row.score: row for row in correlations(reference_board(results / "reference", "full", []), models, "token")
    }
    assert set(found) == {"parity", "copying", "memorization", MEAN_RANK}

    values = {score: {name: rho and rho.value for name, rho in row.pooled.items()} for score, row in found.items()}
    assert values["parity"] == pytest.approx({"total": 1, "recall": 1, "rest": -1})
    assert values["copying"] == pytest.approx({"total": -1, "recall": -1, "rest": 1})
    assert abs(values["memorization"]["total"] or 0) < 0.9
    assert found["parity"].within["total"] == Rho(value=pytest.approx(1), low=pytest.approx(1), high=pytest.approx(1))

    text = answer(list(found.values()), "total")
    assert text.startswith("Yes: the best predictor of the validation loss is parity (ρ = 1.00, 95% interval 1.00 to")
    assert text.endswith("Correlated the other way: copying.")


def test_an_unfinished_language_model_stands_in_the_table_alone(results: Path) -> None:
    for layer in LAYERS[:3]:
        write_model(results, layer, 3.0, runs=3)
    models = read_language_models(results / "reference" / NAME)
    assert {model.layer for model in models if not model.finished} == set(LAYERS[:3])
    (row, *_) = correlations(reference_board(results / "reference", "full", []), models, "token")
    assert (row.layers, row.pooled["total"]) == (5, None)
    assert answers([row]) == ["Too few layers to tell: 5 of 6 have a finished language model and a score on one task."]


def test_the_page_says_what_the_scores_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, layer in enumerate(LAYERS):
        write_model(tmp_path, layer, 3 + n / 10)
        made_up.write_cell(tmp_path, layer, "parity", [0.9 - n / 20])
    write_model(tmp_path, "lru", 9.0, runs=3)
    made_up.use(tmp_path, monkeypatch)
    main(["--out", str(tmp_path)])
    page = (tmp_path / "report" / "index.html").read_text()
    section = page.partition('<section id="language">')[2].partition("</section>")[0]
    table = section.partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r"<tr><td>([\w-]+)", table) == list(LAYERS)
    assert table.count("not finished") == 1
    assert "<td>3.000</td><td>1.000</td><td>6.000</td><td>2.000</td>" in table
    assert "the best predictor of the validation loss is parity" in section
    assert section.count("<svg") == 2 * 2 * 2  # two losses, two metrics, a task and the mean rank
    assert "parity: loss of recall tokens against token accuracy, 7 layers" in section


def test_a_page_without_language_models_names_the_command(page: Path) -> None:
    section = page.read_text().partition('<section id="language">')[2].partition("</section>")[0]
    assert "No language model is trained yet" in section
    assert "<svg" not in section
