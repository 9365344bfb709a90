"""Do scores predict the losses of language models: the correlations, and what the page says of them."""

import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from mixers import MIXERS
from mixers.registry import find_mixer
from runners.c4.reference.cells import NAME, ConvergedRun, write_cell
from runners.report import language, ranks, trained
from runners.report.__main__ import main
from runners.report.cells import reference_board
from runners.report.correlation import LEAST, Rho, _found, between_families, least_significant, within_families
from runners.report.language import (
    MEAN_RANK,
    answer,
    correlations,
    read_language_models,
    scores_of,
    what_goes_with_the_loss,
    what_orders_families,
)
from runners.report.trained import is_stale_model
from tests.runners.report import made_up

LAYERS = ("rt", "staircase", "transformer", "gla", "retnet", "gated-deltanet", "rwkv7", "lru", "mamba", "hyena")
"""Of all seven families; recurrent attention, linear attention and the delta rule have two members."""
FAMILIES = np.unique([layer.family for layer in MIXERS.values()], return_inverse=True)[1]
"""Family of each registered layer."""


def run(lr: float, seed: int, loss: float) -> ConvergedRun:
    parts = {"recall_loss": 2 * loss, "rest_loss": 5 - loss, "bits_per_byte": loss / 3}
    return replace(made_up.LANGUAGE_RUN, lr=lr, seed=seed, validation_loss=loss, **parts)


def write_model(results: Path, layer: str, loss: float, runs: int = 5, code: str = "", **changes: Any) -> None:
    """Write a language model whose seeds have this mean loss at the best of its learning rates."""
    best = [run(3e-3, 0, loss - 0.01), run(1e-2, 0, loss + 1), run(3e-3, 1, loss + 0.01)]
    found = [replace(one, code=code) for one in (run(1e-3, 0, loss + 1), run(3e-2, 0, loss + 1), *best)][:runs]
    described = {"layer": layer, "family": MIXERS[layer].family, "runs": found}
    write_cell(results / "reference" / NAME / f"{layer}.json", replace(made_up.LANGUAGE_MODEL, **described | changes))


def pooled(x_L: Any, *ys_L: Any) -> list[Rho | None]:
    """Return the correlations of one score over all layers."""
    return within_families(np.array([x_L]), np.array(ys_L), np.ones(len(x_L)), np.zeros(len(x_L), int))[0]


def related(rng: np.random.Generator, rows: int) -> Any:
    """Return figures of the registered layers that have an intraclass correlation of 0.5 within families."""
    of_families = rng.standard_normal((rows, FAMILIES.max() + 1))[:, FAMILIES]
    return (of_families + rng.standard_normal(of_families.shape)) / np.sqrt(2)


def board(results: Path) -> Any:
    return reference_board(results / "reference", "full", [])


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in which parity orders the losses, copying orders them the wrong way, and memorization is noise.

    These are all tasks that ranks are over.
    """
    noise = np.random.default_rng(0).permutation(len(LAYERS)) / 10
    for n, layer in enumerate(LAYERS):
        write_model(tmp_path, layer, 3 + n / 10)
        for task, value in {"parity": 0.9 - n / 20, "copying": 0.1 + n / 20, "memorization": noise[n]}.items():
            made_up.write_cell(tmp_path, layer, task, [value, value])
    monkeypatch.setattr(ranks, "TASKS", ("parity", "copying", "memorization"))
    made_up.use(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def complete(results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results in a project that has no other layers and tasks."""
    monkeypatch.setattr(language, "MIXERS", {name: MIXERS[name] for name in LAYERS})
    monkeypatch.setattr(language, "TASKS", ("parity", "copying", "memorization"))
    return results


def answer_of(results: Path) -> str:
    return answer(board(results), read_language_models(results / "reference" / NAME))


def test_a_correlation_is_that_of_scipy_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(1)
    for size in (6, 9, 21):
        x_L, y_L = rng.integers(5, size=size).astype(float), rng.standard_normal(size)
        rho, opposite = pooled(x_L, y_L, -y_L)
        assert rho is not None
        assert opposite is not None
        assert opposite.value == pytest.approx(-rho.value)
        assert rho.value == pytest.approx(spearmanr(x_L, y_L).statistic)
        assert rho.low <= rho.value <= rho.high


def test_within_families_the_difference_between_families_does_not_count() -> None:
    """Two families apart in both figures, each ordered the other way inside."""
    x_L, y_L = np.array([1.0, 2, 3, 4, 11, 12, 13, 14]), np.array([4.0, 3, 2, 1, 14, 13, 12, 11])
    families_L = np.repeat([0, 1], 4)
    (among_all,), ((within,),) = pooled(x_L, y_L), within_families(x_L[None], y_L[None], np.ones(8), families_L)
    assert among_all is not None
    assert within is not None
    assert among_all.value > 0.5
    assert within.value == pytest.approx(-1)
    assert within.p == pytest.approx(2 / 24**2, abs=0.003)  # of all orders within families, two are as strong

    # A family of one layer orders nothing, and a layer without the score does not count.
    more = np.append(x_L, [99, np.nan]), np.append(y_L, [99, 0]), np.append(families_L, [2, 0])
    ((alone,),) = within_families(more[0][None], more[1][None], np.ones(10), more[2])
    assert alone is not None
    assert alone.value == pytest.approx(-1)


def test_between_families_a_family_counts_once_with_the_mean_rank_of_its_members() -> None:
    x_L, y_L = related(np.random.default_rng(5), 2)
    x_L[3], y_L[4] = np.nan, -np.inf
    ((rho,),) = between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES)
    ranks = rankdata(x_L, nan_policy="omit"), np.where(np.isnan(x_L), np.nan, rankdata(y_L))
    means = [[np.nanmean(of_layers[n == FAMILIES]) for n in range(7)] for of_layers in ranks]
    assert rho is not None
    assert rho.value == pytest.approx(spearmanr(*means).statistic)

    # Members without the score do not count in the losses either.
    alone_L, losses_L = np.full(len(FAMILIES), np.nan), np.arange(len(FAMILIES), dtype=float)
    firsts = [int(np.flatnonzero(n == FAMILIES)[0]) for n in range(7)]
    alone_L[firsts] = losses_L[firsts]
    ((ordered,),) = between_families(alone_L[None], losses_L[None], np.ones(len(FAMILIES)), FAMILIES)
    assert ordered is not None
    assert ordered.value == pytest.approx(1)

    # A family without the score is left out, and six families are the fewest.
    x_L[FAMILIES == 0] = np.nan
    assert between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES) != [[None]]
    x_L[FAMILIES == 1] = np.nan
    assert between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES) == [[None]]


def test_without_a_relation_relatives_are_no_evidence() -> None:
    """Tests at 0.05 of scores and losses that families have in common, but that are independent of each other.

    Of 100,000 such tests between families, 0.048 are significant; the standard error of the share of 2,000 is 0.005.
    """
    rng = np.random.default_rng(6)
    counts = {"families": 0, "layers": 0, "yes": 0}
    for _ in range(100):
        x_1L, y_KL = related(rng, 1), related(rng, 20)
        between = [rho for rho in between_families(x_1L, y_KL, np.ones(len(FAMILIES)), FAMILIES)[0] if rho]
        assert len(between) == 20
        counts["families"] += sum(rho.significant for rho in between)
        counts["yes"] += sum(rho.significant and rho.value > 0 for rho in between)
        counts["layers"] += sum(rho.significant for rho in pooled(x_1L[0], *y_KL) if rho)
    assert counts["yes"] <= 0.05 * 2000
    assert counts["families"] <= 0.06 * 2000
    assert counts["layers"] >= 0.08 * 2000  # what the families' test avoids


def test_families_that_agree_are_found() -> None:
    x_L, noise_KL = related(np.random.default_rng(7), 1)[0], related(np.random.default_rng(8), 20)
    found = between_families(x_L[None], x_L + 0.2 * noise_KL, np.ones(len(x_L)), FAMILIES)[0]
    assert sum(rho.significant and rho.value > 0 for rho in found if rho) >= 16


def test_a_partial_correlation_is_that_of_the_residuals() -> None:
    """Score and loss both follow the size, and have nothing else in common."""
    rng = np.random.default_rng(9)
    size_L = np.exp(rng.standard_normal(21))
    x_L, y_L = (np.log(size_L) + 0.3 * rng.standard_normal(21) for _ in range(2))
    ((rho,),) = within_families(x_L[None], y_L[None], size_L, np.zeros(21, int))
    assert rho is not None
    assert rho.partial is not None
    assert rho.value > 0.7
    line = np.stack([np.ones(21), rankdata(np.log(size_L))], axis=1)
    rests = [rankdata(v) - line @ np.linalg.lstsq(line, rankdata(v))[0] for v in (x_L, y_L)]
    assert rho.partial == pytest.approx(np.corrcoef(*rests)[0, 1])
    assert abs(rho.partial) < 0.5

    # Layers of equal size, and scores that the size determines, have none.
    for size, score in ((np.ones(21), x_L), (size_L, size_L)):
        ((rho,),) = within_families(score[None], y_L[None], size, np.zeros(21, int))
        assert rho is not None
        assert rho.partial is None


@pytest.mark.parametrize("x_L", [np.arange(LEAST - 1.0), np.ones(9)], ids=["too few layers", "all the same"])
def test_where_there_is_no_correlation_there_is_none(x_L: Any) -> None:
    assert pooled(x_L, np.arange(float(len(x_L)))) == [None]


@pytest.mark.parametrize("ties", [0, 11, 18, 19])
def test_the_interval_covers_what_it_should(ties: int) -> None:
    """Of samples of 20 layers without a relation, one in twenty has an interval without zero, also with ties."""
    rng = np.random.default_rng(2)
    x_L = np.append(np.zeros(ties), rng.random(20 - ties))
    found = [rho for rho in pooled(x_L, *rng.standard_normal((100, 20))) if rho is not None]
    assert len(found) == 100
    assert sum(rho.low > 0 or rho.high < 0 for rho in found) <= 10


def test_the_interval_holds_95_percent_of_the_samples() -> None:
    """The cosines of 101 directions with one of them are 0, 0.01, ..., 1."""
    cosines = np.linspace(0, 1, 101)
    x_BL = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)[[50, *range(101)]]
    found = _found(x_BL, np.repeat([[1.0, 0.0]], 102, axis=0), np.array([[0.0, 1.0]]))
    assert found is not None
    assert found[:3] == pytest.approx((0.5, 0.025, 0.975))


def test_a_family_without_the_score_takes_part_in_permutations() -> None:
    """Of all orders of seven families, in which six have the score, the share that is as strong."""
    x_F, y_F = np.array([np.nan, 1.0, 2, 3, 4, 5, 6]), np.array([3.0, 1, 2, 4, 7, 5, 6])
    ((rho,),) = between_families(x_F[None], y_F[None], np.ones(7), np.arange(7))
    strengths = [abs(spearmanr(x_F[1:], order[1:]).statistic) for order in permutations(y_F)]
    assert rho is not None
    assert rho.value == pytest.approx(spearmanr(x_F[1:], y_F[1:]).statistic)
    assert rho.p == pytest.approx(np.mean(np.array(strengths) >= abs(rho.value) - 1e-9))


def test_the_p_value_is_the_share_of_all_orders_that_are_as_strong() -> None:
    x_L, y_L = np.array([1.0, 2, 3, 4, 5, 6]), np.array([2.0, 1, 3, 6, 4, 5])
    (rho,) = pooled(x_L, y_L)
    assert rho is not None
    strengths = [abs(spearmanr(x_L, order).statistic) for order in permutations(y_L)]
    assert rho.p == pytest.approx(np.mean(np.array(strengths) > rho.value - 1e-9), abs=0.02)


def test_between_seven_families_the_p_value_is_exact() -> None:
    """ρ = 0.786 has p = 0.048, so a random sample of the orders would decide whether it counts."""
    x_F, critical = np.arange(7.0), 1 - 6 * 12 / (7 * 48)
    orders = [np.array(order, float) for order in permutations(range(7))]
    strengths = np.array([abs(1 - 6 * ((y_F - x_F) ** 2).sum() / (7 * 48)) for y_F in orders])
    exact = (strengths > critical - 1e-9).mean()
    assert exact == pytest.approx(0.048, abs=1e-4)
    for y_F in (orders[at] for at in np.flatnonzero(np.isclose(strengths, critical))[::9]):
        ((rho,),) = between_families(x_F[None], y_F[None], np.ones(7), np.arange(7))
        assert rho is not None
        assert rho.p == pytest.approx(exact)


def test_the_least_significant_correlation_is_that_of_published_tables() -> None:
    """Critical values of Spearman's ρ, two-sided, 0.05 (Zar 1972, table 1)."""
    assert [round(least_significant(n), 3) for n in (5, 6, 7)] == [1.0, 0.886, 0.786]
    assert least_significant(10) == pytest.approx(0.648, abs=0.03)  # by random orders
    assert least_significant(4) == 1.0  # even the best order has p = 1/12


def test_a_score_has_the_same_interval_alone_and_among_others() -> None:
    rng = np.random.default_rng(5)
    x_SL, y_KL = rng.standard_normal((3, 12)), rng.standard_normal((1, 12))
    together, alone = (within_families(x, y_KL, np.ones(12), np.zeros(12, int))[-1][0] for x in (x_SL, x_SL[-1:]))
    assert together is not None
    assert alone is not None
    assert (together.low, together.high) == (alone.low, alone.high)


def test_the_best_of_many_scores_is_seldom_found_by_chance() -> None:
    """Random losses: in about one of twenty tables is some score significant. One by one, each score would be."""
    rng = np.random.default_rng(3)
    x_SL, y_KL = rng.standard_normal((8, 12)), rng.standard_normal((40, 12))
    found = within_families(x_SL, y_KL, np.ones(12), np.zeros(12, int))
    least = [min(rho.p for rho in of_loss if rho is not None) for of_loss in zip(*found, strict=True)]
    assert sum(p < 0.05 for p in least) <= 5
    assert 0.3 < np.mean(least) < 0.7  # p of the best is uniform


def test_scores_of_few_layers_do_not_hide_a_relation_of_many() -> None:
    """With six layers, chance reaches correlations that twenty layers with a relation do not."""
    rng = np.random.default_rng(4)
    x_L = rng.standard_normal(20)
    gains_KL = x_L + 0.8 * rng.standard_normal((20, 20))
    few_SL = np.where(np.arange(20) < 6, rng.standard_normal((4, 20)), np.nan)
    found = within_families(np.array([x_L, *few_SL]), gains_KL, np.ones(20), np.zeros(20, int))
    assert all(rho is not None for of_score in found for rho in of_score)
    assert sum(rho.significant for rho in found[0] if rho is not None) >= 16
    assert sum(rho.significant for of_score in found[1:] for rho in of_score if rho is not None) <= 8


def test_scores_that_order_the_losses_are_found(results: Path) -> None:
    models = read_language_models(results / "reference" / NAME)
    assert [model.layer for model in models] == list(LAYERS)
    assert models[0].loss("total") == pytest.approx(3.0)
    found = {row.score: row for row in correlations(board(results), models, "token")}
    assert set(found) == {"parity", "copying", "memorization", MEAN_RANK}

    values = {score: {name: rho and rho.value for name, rho in row.between.items()} for score, row in found.items()}
    assert values["parity"] == pytest.approx({"total": 1, "recall": 1, "rest": -1})
    assert values["copying"] == pytest.approx({"total": -1, "recall": -1, "rest": 1})
    assert abs(values["memorization"]["total"] or 0) < 0.9
    pooled_parity, pooled_noise = (found[score].pooled["total"] for score in ("parity", "memorization"))
    assert pooled_parity is not None
    assert pooled_noise is not None
    assert pooled_parity.value == pytest.approx(1)
    noise = [scores_of(board(results), "memorization", "token")[layer] for layer in LAYERS]
    assert pooled_noise.value == pytest.approx(-spearmanr(noise, range(len(LAYERS))).statistic)
    within = found["parity"].within["total"]
    assert within is not None
    assert (within.value, within.high) == (pytest.approx(1), pytest.approx(1))
    assert within.low >= 0  # with families this small, many samples show no order within families
    assert (found["parity"].layers, found["parity"].layers_within, found["parity"].families) == (10, 6, 7)
    assert found[MEAN_RANK].layers == 10


def test_the_task_that_goes_most_with_the_loss_is_named(results: Path) -> None:
    found = correlations(board(results), read_language_models(results / "reference" / NAME), "token")
    text = what_goes_with_the_loss(found)
    assert text.startswith(
        "These scores go with the validation loss more clearly than by chance, with all scores tested together: "
        "between families copying (-1.00), parity (1.00); within families none. Of the tasks, whether clear or not, "
        "parity goes most with it within families (ρ = 1.00), and copying least (ρ = -1.00)."
    )
    assert what_goes_with_the_loss(found[:1]).endswith("between families none; within families none.")
    assert what_goes_with_the_loss([]) == ""

    # Within families, the mean rank counts, too.
    clear = Rho(value=0.82, low=0.2, high=0.99, p=0.01, partial=None)
    *others, mean_rank = found
    assert mean_rank.score == MEAN_RANK
    text = what_goes_with_the_loss([*others, replace(mean_rank, within={**mean_rank.within, "total": clear})])
    assert "parity (1.00); within families mean rank (0.82). Of the tasks" in text
    assert what_orders_families(found) == ""
    pooled = mean_rank.pooled["total"]
    assert pooled is not None
    assert what_orders_families([*others, replace(mean_rank, within={**mean_rank.within, "total": clear})]) == (
        "Exploratory: within families, these scores go with the loss: mean rank (0.82); over all layers the mean rank "
        f"has ρ = {pooled.value:.2f}."
    )


def test_stale_scores_and_own_studies_do_not_count(results: Path) -> None:
    write_model(results, "deltanet", 5.0)
    models = read_language_models(results / "reference" / NAME)
    before = {score: scores_of(board(results), score, "token") for score in ("parity", MEAN_RANK)}
    for task in ("parity", "copying", "memorization"):
        made_up.write_cell(results, "deltanet", task, [1.0])
    with_stale = board(results)
    assert with_stale.cells["deltanet", "parity"].stale
    own = replace(with_stale.cells["rt", "parity"], row="rt (yours)", kind="own")
    with_stale.cells[own.row, "parity"] = own
    assert {score: scores_of(with_stale, score, "token") for score in before} == before
    assert {row.layers for row in correlations(with_stale, models, "token")} == {10}


def test_the_answer_is_that_of_the_mean_rank_between_families(complete: Path) -> None:
    text = answer_of(complete)
    assert text.startswith(
        "It is not shown that the mean rank predicts the validation loss across families of layers (ρ = "
    )
    assert text.endswith("; only a ρ of 0.79 or more would show it.")
    assert "over 7 families" in text
    for n, layer in enumerate(LAYERS):
        for task in ("copying", "memorization"):
            made_up.write_cell(complete, layer, task, [0.9 - n / 20])
    text = answer_of(complete)
    assert text.startswith(
        "Yes: families with better mean ranks have lower validation losses (ρ = 1.00 over 7 families"
    )
    assert "given the number of parameters" not in text
    for n, layer in enumerate(LAYERS):
        write_model(complete, layer, 4 - n / 10, parameters_without_embeddings=3_000_000 + n % 3)
    text = answer_of(complete)
    assert text.startswith("No: families with better mean ranks have higher validation losses (ρ = -1.00")
    assert text.endswith("; given the number of parameters, ρ = -1.00).")


def test_there_is_no_answer_before_all_layers_are_complete(complete: Path) -> None:
    write_model(complete, "rt", 3.0, runs=3)
    start = "No answer yet: 9 of 10 layers have a finished language model"
    assert answer_of(complete) == f"{start}, 10 have all 3 tasks, and 9 have both."
    (complete / "reference" / "lru" / "parity.json").unlink()
    assert answer_of(complete) == f"{start}, 9 have all 3 tasks, and 8 have both."


def test_layers_beyond_those_of_a_few_families_are_awaited(results: Path) -> None:
    assert answer_of(results) == (
        "No answer yet: 10 of 21 layers have a finished language model, 0 have all 10 tasks, and 0 have both."
    )


def test_an_unfinished_language_model_stands_in_the_table_alone(results: Path) -> None:
    for layer in LAYERS[:3]:
        write_model(results, layer, 3.0, runs=3)
    models = read_language_models(results / "reference" / NAME)
    assert [model.layer for model in models if not model.finished] == [model.layer for model in models[-3:]]
    assert {model.layer for model in models[-3:]} == set(LAYERS[:3])
    (row, *_) = correlations(board(results), models, "token")
    assert (row.layers, row.families, row.between["total"]) == (7, 5, None)


def test_a_layer_that_diverged_at_every_rate_comes_last(results: Path) -> None:
    rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    runs = [replace(made_up.DIVERGED_RUN, lr=lr) for lr in rates]
    write_cell(results / "reference" / NAME / "rt.json", replace(made_up.LANGUAGE_MODEL, runs=runs))
    models = read_language_models(results / "reference" / NAME)
    assert (models[-1].layer, models[-1].lr, models[-1].finished) == ("rt", None, True)
    rho = {row.score: row for row in correlations(board(results), models, "token")}["parity"].between["total"]
    assert rho is not None
    families_of_losses = [(9 + 0) / 2, 1, (2 + 3) / 2, (4 + 5) / 2, 6, 7, 8]  # places of the families' members
    assert rho.value == pytest.approx(spearmanr(range(7), families_of_losses).statistic)


def test_equal_losses_tell_nothing(complete: Path) -> None:
    for layer in LAYERS:
        write_model(complete, layer, 3.0)
    assert answer_of(complete) == "Nothing to tell: all families are alike."


def test_a_stale_language_model_is_not_correlated(results: Path) -> None:
    write_model(results, "rt", 3.0, code="stale")
    models = read_language_models(results / "reference" / NAME)
    assert [model.layer for model in models if model.stale] == ["rt"]
    (row, *_) = correlations(board(results), models, "token")
    assert row.layers == 9


def test_staleness_is_that_of_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(trained, "is_stale", lambda cell, config, options: asked.append((config, options)) or True)
    assert is_stale_model("rt-6-block-4-authors", made_up.LANGUAGE_MODEL)
    ((config, options),) = asked
    assert (config.mixer, config.width, config.parametrisation, options) == ("rt", 640, "authors", {"block": 4})
    assert not is_stale_model("a user's own", made_up.LANGUAGE_MODEL)

    # A layer of a user's own.
    own = replace(made_up.LANGUAGE_MODEL, layer="somewhere:Own")
    assert is_stale_model("somewhere.Own", own)
    assert asked[-1][0].mixer == "somewhere:Own"
    monkeypatch.setattr(trained, "is_stale", lambda *_: find_mixer("somewhere:Own"))
    assert not is_stale_model("somewhere.Own", own)  # it cannot be imported here


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"corpus": replace(made_up.LANGUAGE_MODEL.corpus, name="b")}, "are of different texts"),
        ({"config": {"steps": 9}}, "have different settings"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(results: Path, changes: dict[str, Any], error: str) -> None:
    write_model(results, "lru", 3.0, **changes)
    with pytest.raises(ValueError, match=rf"hyena.json and lru.json {error}: move one"):
        read_language_models(results / "reference" / NAME)


def test_the_page_says_what_the_scores_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, layer in enumerate(LAYERS):
        write_model(tmp_path, layer, 3 + n / 10, parameters_without_embeddings=3_000_000 + n % 4)
        made_up.write_cell(tmp_path, layer, "parity", [0.9 - n / 20])
    write_model(tmp_path, "hyena", 9.0, runs=3)
    made_up.use(tmp_path, monkeypatch)
    main(["--out", str(tmp_path)])
    page = (tmp_path / "report" / "index.html").read_text()
    section = page.partition('<section id="language">')[2].partition("</section>")[0]
    table = section.partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r"<tr><td>([\w-]+)", table) == list(LAYERS)
    assert table.count("not finished") == 1
    assert "<td>3.000<br><small>2.990, 3.010</small></td><td>6.000<br>" in table
    assert "<td>1.000</td>\n  <td>–</td></tr>" in table  # bits per byte; no mean rank without all tasks
    assert "a vocabulary of 8,000, and 1.00k tokens of training, 400 of them different" in section
    assert page.count("by place among 9: 1. rt 3.000; 2. staircase 3.100; 3. transformer 3.200.") == 1
    assert "No answer yet: 9 of 21 layers have a finished language model, 0 have all 10 tasks" in section
    assert "Exploratory: scores of the published protocol" in section
    assert "Yes:" not in section
    assert section.count(">all layers<small>") == 2 * len(language.LOSSES)
    assert re.search(r"<b>1.00</b><br><small>-?\d\.\d\d to 1.00<br>given size 1.00</small>", section)
    families = {MIXERS[layer].family for layer in LAYERS if layer != "hyena"} - {"attention"}  # panels of loss curves
    scores = 2 * 2  # two losses, two metrics; no layer has the tasks of a mean rank
    forests = 2  # two metrics
    assert section.count('role="img"') == len(families) + scores + forests
    assert "<title>parity: 1.00 (" in section
    assert "parity: loss of recall tokens against token accuracy, 9 layers" in section


def test_a_page_with_few_language_models_has_no_table_of_correlations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, layer in enumerate(LAYERS[: LEAST - 1]):
        write_model(tmp_path, layer, 3 + n / 10)
        made_up.write_cell(tmp_path, layer, "parity", [0.9 - n / 20])
    made_up.use(tmp_path, monkeypatch)
    main(["--out", str(tmp_path)])
    section = (tmp_path / "report" / "index.html").read_text().partition('<section id="language">')[2]
    assert section.count("A correlation needs 6 layers with a finished language model, whose losses differ.") == 2
    assert ">all layers<small>" not in section


def test_language_models_of_a_text_of_ones_own_are_read_from_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.use(tmp_path / "project", monkeypatch)
    write_model(tmp_path / "project", "rt", 3.0)
    write_model(tmp_path / "own", "gla", 4.0)
    own = tmp_path / "own" / "reference" / NAME
    main(["--out", str(tmp_path), "--language-models", str(own)])
    page = (tmp_path / "report" / "index.html").read_text()
    section = page.partition('<section id="language">')[2]
    assert re.findall(r"<tr><td>([\w-]+)", section.partition("</table>")[0]) == ["gla"]
    assert "python -m runners.report --language-models FOLDER" in page

    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--language-models", str(own / "none")])
    assert capsys.readouterr().err.endswith(": give --language-models the --folder of runners.c4.reference\n")
    (tmp_path / "runs" / "a-run").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--language-models", str(tmp_path / "runs")])
    assert "holds no language models of runners.c4.reference: give --language-models its" in capsys.readouterr().err


def test_a_page_without_language_models_names_the_command(page: Path) -> None:
    assert "No answer yet: 0 of 21 layers have a finished language model" in page.read_text()
    section = page.read_text().partition('<section id="language">')[2].partition("</section>")[0]
    assert "No language model is trained yet" in section
    assert "<svg" not in section
