"""Profiles: scores and capacities from made-up records, which rungs are trained, ranks and tiers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from runners.mad import study
from runners.mad.chosen import MODEL, runs_of
from runners.mad.profile import (
    abilities,
    average_ranks,
    beside,
    on_axis,
    place_of,
    profile_score,
    seed_scores,
    standings,
    tiers,
)
from runners.mad.profile_charts import draw_profiles
from runners.mad.reference.overview import DEPTHS
from runners.mad.reference.profiles import effective_depth
from runners.records import RECORD, Record, write
from runners.search import JOURNAL, open_storage
from tests.runners.mad.commands import HEADS, planned
from tests.runners.mad.made_up import interval_of, record, table

PARITY = (40, 64, 96, 128, 192, 256)
"""The axis of the ladder of parity, whose chance is one half."""


def ladder(rungs: Mapping[int, Sequence[float | None]], layer: str = "rt", **changes: object) -> list[Record]:
    """Records of a layer with a score for each seed on each rung, None for a run that diverged."""
    return [
        record(None if y is None else 0.5 + y / 2, layer=layer, difficulty=f"rung-{rung}", seed=seed, **changes)
        for rung, of_seeds in rungs.items()
        for seed, y in enumerate(of_seeds)
    ]


@pytest.mark.parametrize(
    ("trained", "expected", "score", "capacity"),
    [
        # Half between two rungs, on the logarithmic axis.
        ({3: [1.0], 4: [0.95], 5: [0.85], 6: [0.0]}, [1, 1, 1, 0.95, 0.85, 0], 4.8 / 6, math.sqrt(128 * 192)),
        ({1: [0.5], 2: [0.1], 3: [0.01]}, [0.5, 0.1, 0.01, 0, 0, 0], 0.61 / 6, -math.inf),
        ({3: [1.0], 4: [1.0], 5: [1.0], 6: [0.9]}, [1, 1, 1, 1, 1, 0.9], 5.9 / 6, 256),
        ({3: [1.0], 4: [0.5], 5: [0.95], 6: [0.0]}, [1, 1, 1, 0.5, 0.95, 0], 4.45 / 6, 96 * (128 / 96) ** 0.2),
        # A seed that diverged is 0; no rate converged; a rung is still missing.
        ({3: [1.0, 1.0], 4: [1.0, None], 5: [0.0, 0.0]}, [1, 1, 1, 0.5, 0, 0], 3.5 / 6, None),
        ({1: [None], 2: [None], 3: [None]}, [0, 0, 0, 0, 0, 0], 0, -math.inf),
        ({3: [None]}, [math.nan, math.nan, 0, 0, 0, 0], math.nan, math.nan),
        ({3: [1.0], 4: [0.5]}, [1, 1, 1, 0.5, math.nan, math.nan], math.nan, math.nan),
    ],
)
def test_rungs_that_are_not_trained_follow_from_those_that_are(
    trained: dict[int, list[float | None]], expected: list[float], score: float, capacity: float | None
) -> None:
    (row,) = abilities(seed_scores(table(*ladder(trained)))).to_dict("records")
    assert row["rungs"] == pytest.approx(expected, nan_ok=True)
    assert row["score"] == pytest.approx(score, nan_ok=True)
    assert capacity is None or row["capacity"] == pytest.approx(capacity, nan_ok=True)
    assert row["trained"] == [rung in trained for rung in range(1, 7)]


def test_the_rate_is_chosen_over_all_seeds_and_intervals_are_over_seeds() -> None:
    """Another rate is ahead with seed 0."""
    rungs = {1: [1.0] * 3, 2: [1.0] * 3, 3: [0.8, 0.7, 0.9], 4: [0.6, 0.5, 0.1], 5: [0.0] * 3}
    found = seed_scores(table(*ladder({3: [0.9, 0.1, 0.1]}, lr=2e-2), *ladder(rungs, lr=1e-3)))
    means = [sum(rungs[rung][seed] for rung in rungs) / 6 for seed in range(3)]
    (row,) = abilities(found).to_dict("records")
    assert (row["score"], row["score.low"], row["score.high"]) == pytest.approx(interval_of(means))
    assert vars(profile_score(found)) == pytest.approx(
        {"mean": row["score"], "low": row["score.low"], "high": row["score.high"]}
    )
    assert row["capacity.low"] < row["capacity"] < row["capacity.high"]
    assert not row["edge"]
    grid = [ladder({2: [y] * 2, 3: [0.0] * 2}, lr=lr) for lr, y in ((1e-3, 0.1), (7e-3, 0.4))]
    (row,) = abilities(seed_scores(table(*chain(*grid), *ladder({1: [0.5] * 2}, lr=7e-3)))).to_dict("records")
    assert row["rungs"] == pytest.approx([0.5, 0.4, 0, 0, 0, 0])  # the second chooses
    assert row["edge"]
    largest = table(*ladder({3: [0.9] * 2}, lr=2e-2), *ladder({3: [0.1] * 2}, lr=7e-3))
    assert abilities(seed_scores(largest))["edge"].item()


@pytest.mark.parametrize(
    ("values", "expected"), [(PARITY, math.sqrt(40 * 64)), ((0, 2, 4, 8, 16, 32), 1.0), ((1, 2, 3, 4, 5, 6), 1.5)]
)
def test_an_axis_is_logarithmic_where_its_rungs_are(values: tuple[float, ...], expected: float) -> None:
    assert on_axis(1.5, values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("finished", "rung", "lrs"),
    [
        ({}, 3, (1e-3, 2.5e-3, 7e-3)),  # the largest rate follows once its neighbour is the best, below the ceiling
        ({3: 0.5}, 3, (1e-3, 2.5e-3, 7e-3, 2e-2)),
        ({3: 1.0}, 3, (1e-3, 2.5e-3, 7e-3)),
        ({}, 4, None),
        ({3: 0.5}, 4, (7e-3,)),
        ({3: 0.5}, 5, None),
        ({3: 0.5}, 2, (7e-3,)),
        ({3: 0.5, 4: 0.01}, 5, None),
        ({3: 0.5, 4: 0.01}, 6, None),
        ({3: 1.0}, 1, None),
        ({3: 0.5, 2: 0.9}, 1, (7e-3,)),
        ({3: 1.0}, 4, (7e-3,)),
        ({3: 1.0, 4: 1.0}, 4, (7e-3,)),
        ({3: 1.0, 4: 0.5}, 4, (7e-3, 2e-2)),  # the first rung below the ceiling tells apart what reached it
        ({3: 1.0, 4: 1.0, 5: 0.5}, 5, (7e-3, 2e-2)),
        ({3: 1.0, 4: 0.5, 5: 0.3}, 5, (7e-3,)),
        ({3: 0.05}, 4, (7e-3,)),
        ({3: 0.05}, 2, (1e-3, 2.5e-3, 7e-3)),  # a rung that is hardly learned chooses no rate for easier ones
        ({3: 0.01}, 1, None),
        ({3: 0.01, 2: 0.5}, 1, (7e-3,)),
        ({3: 0.01, 2: 0.01}, 1, (1e-3, 2.5e-3, 7e-3)),
        ({3: 0.01, 2: 1.0}, 1, None),
    ],
)
def test_a_rung_is_trained_at_the_chosen_rate_once_those_before_it_do_not_decide_it(
    tmp_path: Path, finished: dict[int, float], rung: int, lrs: tuple[float, ...] | None
) -> None:
    few = ["--task.train-examples", "16", "--task.eval-examples", "16", "--batch-size", "16", *HEADS]
    command = ["--preset", "profile", "--mixer", "transformer", "--task", "parity", "--out", str(tmp_path), *few]
    options, experiments = planned(command)
    by_rung = {experiment.rung: experiment for experiment in experiments}
    for number, score in finished.items():
        for run in options.runs:
            accuracy = 0.5 + score / 2 - 0.01 * (run.lr != 7e-3)
            if rung == number and run.lr not in (1e-3, 2.5e-3, 7e-3):
                continue
            folder = by_rung[number].folder_of(run, tmp_path)
            folder.mkdir(parents=True)
            write(folder, record(accuracy, **vars(run), ceiling={"token": 1.0}, chance={"token": 0.5}))
    runs = runs_of(by_rung[rung], options)
    assert [(run.lr, run.seed) for run in runs] == [(lr, seed) for lr in lrs or () for seed in range(3)]


def test_rungs_of_one_number_are_trained_one_after_another() -> None:
    """They do not wait for each other, so that all processes have work to the end."""
    command = ["--preset", "profile", "--mixer", "transformer", "lstm", "--task", "parity", "copying", *HEADS]
    _, experiments = planned(command)
    found = [(experiment.rung, experiment.task, experiment.mixer) for experiment in experiments]
    assert found == [*product((3, 4, 5, 6, 2, 1), ("parity", "copying"), ("transformer", "lstm"))]


def test_a_profile_is_trained_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {
        "steps": 4,
        "evaluations": 2,
        "batch_size": 16,
        "width": 16,
        "mlp_width": 16,
        "seeds": 2,
        "lr": [1e-3, 1e-2],
    }
    examples = {"train_examples": 64, "eval_examples": 32}
    for _ in range(2):
        found = study(
            *("transformer", "s5-permutations"),
            preset="profile",
            task_options=examples,
            out=tmp_path,
            device="cpu",
            **small,
        )
        files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob(RECORD)}
        (row,) = found.abilities().to_dict("records")
        assert found.score.mean == pytest.approx(row["score"])
        lines = capsys.readouterr().out
        assert "transformer on s5-permutations, rung 3 (length 48): score 0.0" in lines
        assert re.search("a whole profile takes at most about .*there are no reference profiles yet", lines, re.DOTALL)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob(RECORD)} == files
    assert len(list(tmp_path.rglob(MODEL))) == 2 * sum(row["trained"])  # those of the chosen rate

    # Optuna is told of each run once.
    storage = open_storage(str(tmp_path / JOURNAL))
    names = optuna.get_all_study_names(storage)
    trials = [trial for name in names for trial in optuna.load_study(study_name=name, storage=storage).trials]
    assert sorted(trial.user_attrs["folder"] for trial in trials) == sorted(str(file.parent) for file in files)
    assert {(*trial.intermediate_values,) for trial in trials if trial.state == TrialState.COMPLETE} == {(2, 4)}


@pytest.mark.parametrize(
    ("scores", "ranks"),
    [([0.5, 0.9, 0.895], [3, 1.5, 1.5]), ([0.516, 0.508, 0.5], [1.5, 2, 2.5]), ([0.51, 0.5], [1, 2])],
)
def test_scores_that_differ_by_less_than_a_hundredth_share_a_rank(scores: list[float], ranks: list[float]) -> None:
    assert average_ranks(scores).tolist() == ranks


def test_tiers_part_layers_that_differ_and_no_others() -> None:
    """Layers of equal means are one tier in 95% of cases or more, however many they are."""
    rng = np.random.default_rng(0)
    base_A1 = rng.uniform(0.2, 0.8, size=(16, 1))
    equal = base_A1 + 0.1 * rng.standard_normal((20, 12, 16, 3))
    assert sum(max(tiers(scores_LAS)) > 1 for scores_LAS in equal) <= 2
    shifted = equal[0] + np.repeat([0.0, -0.15, -0.3], 4)[:, None, None]
    assert tiers(shifted) == [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("rt", "deeper", "words"),
    [
        ((50, 60), [(40, 45), (55, 70), (60, 80), (90, 96)], "more than 1, at most 3"),
        ((50, 60), [(40, 55), (40, 55), (40, 55), (40, 55)], "not told apart"),
        ((256, 256), [(40, 50), (90, 180), (50, 96), (70, 96)], "more than 4"),
        ((60, 256), [(40, 50), (90, 256), (256, 256), (256, 256)], "more than 1"),
        ((256, 256), [(40, 50), (256, 256), (50, 96), (256, 256)], "both are at the last rung from 2"),
        ((-math.inf, -math.inf), [(40, 50)] * 4, "RT is below the first rung"),
        ((math.nan, math.nan), [(40, 50)] * 4, "not run yet"),
    ],
)
def test_the_effective_depth_is_an_interval(
    rt: tuple[float, float], deeper: list[tuple[float, float]], words: str
) -> None:
    ends = zip(("rt", *DEPTHS), (rt, *deeper), strict=True)
    names = "capacity", "capacity.low", "capacity.high"
    cells = {(layer, "parity"): dict(zip(names, (low, low, high), strict=True)) for layer, (low, high) in ends}
    assert effective_depth(cells, "parity") == words


def test_the_picture_has_a_row_for_each_layer_tier_by_tier_and_marks_ones_own() -> None:
    rungs = {rung: [0.8, 0.82] for rung in range(1, 7)}
    own = seed_scores(table(*ladder({rung: [0.3, 0.31] for rung in rungs})))
    shown = beside(own, seed_scores(table(*ladder(rungs, layer="gla"), *ladder(rungs, layer="rt"))))
    figure = draw_profiles(abilities(shown), standings(shown, {*shown["layer"]} - {"rt"}), ["rt (yours)"])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [
        "gla  0.81",
        "→ rt (yours)  0.31",
        "rt  0.81",
    ]
    assert [text.get_text() for text in figure.axes[0].texts] == ["tier 1", "tier 2", "not ranked"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"transformer": 4, "lstm": None, "m2rnn": 4}),
        (("--mixer.heads", "16"), {"transformer-heads-16": 16, "lstm": None, "m2rnn-heads-16": 16}),
    ],
)
def test_layers_of_a_profile_have_four_heads_and_names_that_say_others(
    words: tuple[str, ...], expected: dict[str, int | None]
) -> None:
    asked = ["--preset", "profile", "--task", "parity", "--mixer", "transformer", "lstm", "m2rnn", *words]
    found = {one.label: getattr(one.mixer_config, "heads", None) for one in planned(asked)[1]}
    assert found == expected


def test_a_place_is_a_tier_among_layers_of_equal_size_that_have_all_abilities() -> None:
    rungs = {rung: [0.8, 0.82] for rung in range(1, 7)}
    poor = {rung: [0.3, 0.31] for rung in range(1, 7)}
    own = seed_scores(table(*ladder(rungs)))
    others = [*ladder(rungs, layer="lstm"), *ladder(poor, layer="gla"), *ladder(rungs, layer="mamba", width=256)]
    others += ladder(rungs, layer="hyena", task="flip-flop")
    assert place_of(own, seed_scores(table(*others))) == (
        "tier 1 of 2, with lstm; rank 1.5 of 3 (1st with ties below 0.01; other rules of ties change nothing)"
    )
    assert place_of(own, seed_scores(table(*(replace(other, steps=7) for other in others)))) is None
    longer = place_of(own, seed_scores(table(*(replace(other, steps=40_000) for other in others))))
    assert (longer or "").endswith("trained on 2,560,000 sequences, others on up to 5,120,000")
