"""Summaries of made-up trials: the chosen point, estimates, limits."""

import numpy as np
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from runners.mad.results.choice import choose_point
from runners.mad.results.held_out import Reading
from runners.mad.results.standings import Standing
from runners.mad.results.summary import METRICS, TEST_METRICS, summarise
from runners.mad.search.study import DISTRIBUTIONS, run_of
from scipy import stats

from runners.mad.training.protocol import Run
from tests.runners.mad.commands import planned

VALIDATION_SCORES = {
    (1e-4, 0.0): (0.50, 0.50, 0.53),  # the best lower end of an interval
    (1e-4, 0.1): (0.20, 0.30, 0.70),
    (1e-3, 0.0): (0.30, 0.90, 0.60),  # the best mean
    (1e-3, 0.1): (0.95, None, 0.97),  # better still, but one seed diverged
}


def made_up_trial(lr: float, weight_decay: float, seed: int, validation: float | None) -> FrozenTrial:
    """Every metric has values of its own."""
    attrs: dict[str, float] = {"steps_per_second": 10.0 + seed}
    if validation is None:
        attrs["diverged_step"] = 7
    else:
        for k, metric in enumerate(("score", "sequence_accuracy", "token_accuracy", "loss")):
            attrs[f"validation_{metric}"] = validation / (k + 1)
    return create_trial(
        state=TrialState.FAIL if validation is None else TrialState.COMPLETE,
        params={"lr": lr, "weight_decay": weight_decay},
        distributions=DISTRIBUTIONS,
        value=validation,
        user_attrs=attrs,
        system_attrs={"fixed_params": {"lr": lr, "weight_decay": weight_decay, "seed": seed}},
    )


def test_the_point_is_chosen_on_validation_whatever_the_test_split_says() -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization"])[1]
    trials = [
        made_up_trial(*point, seed, scores[seed]) for seed in range(3) for point, scores in VALIDATION_SCORES.items()
    ]
    readings = {}
    for run in map(run_of, trials):  # the order is opposed to that on validation
        value = 1 - (VALIDATION_SCORES[run.lr, run.weight_decay][run.seed] or 0)
        readings[run] = Reading(sequence_accuracy=value, token_accuracy=value / 2, loss=value / 3)

    chosen = choose_point(trials)
    assert chosen == (1e-3, 0.0)
    summary = summarise(experiment, trials, chosen, readings)
    assert [(point.lr, point.weight_decay) for point in summary.points] == list(VALIDATION_SCORES)
    assert [point.seeds for point in summary.points] == [[0, 1, 2]] * 4
    assert [point.diverged for point in summary.points] == [{}, {}, {}, {1: 7}]
    assert summary.points[3].estimates is None
    for i, point in enumerate(summary.points[:3]):
        assert point.estimates is not None
        for metric in METRICS:
            values, estimate = [trial.user_attrs[metric] for trial in trials[i::4]], point.estimates[metric]
            assert estimate.mean == pytest.approx(np.mean(values))
            _, upper = stats.t.interval(0.95, df=2, loc=np.mean(values), scale=stats.sem(values))
            assert estimate.half_width == pytest.approx(upper - np.mean(values))
    assert summary.chosen == 2
    assert summary.best_run == Run(lr=1e-3, weight_decay=0.0, seed=1)  # validation score 0.9
    sequence_accuracy = Standing.of(summary).accuracy("sequence")
    assert sequence_accuracy is not None
    assert sequence_accuracy.mean == pytest.approx(0.4)
    assert [point.estimates is not None and "test_loss" in point.estimates for point in summary.points] == [
        False, False, True, False,
    ]  # fmt: skip
    assert summarise(experiment, trials, choose_point(trials[1::4]), readings).chosen == 1


def test_a_seed_of_another_command_that_diverged_leaves_the_choice_without_a_mean() -> None:
    """A command with fewer seeds chooses the point; the study also holds the seed of a command with more."""
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization"])[1]
    grid = [made_up_trial(1e-4, 0.0, 0, 0.3), made_up_trial(1e-3, 0.0, 0, 0.5)]
    summary = summarise(experiment, [*grid, made_up_trial(1e-3, 0.0, 1, None)], choose_point(grid), {})
    assert summary.best_run == Run(lr=1e-3, weight_decay=0.0, seed=0)
    assert summary.chosen_point is not None
    assert summary.chosen_point.diverged == {1: 7}
    assert summary.edge is None
    assert not summary.is_tested


def test_a_point_whose_test_loss_is_not_finite_has_the_accuracies_alone() -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization"])[1]
    trials = [made_up_trial(1e-4, 0.0, seed, 0.5) for seed in range(2)]
    for losses, names in (((None, 1.0), TEST_METRICS[:2]), ((1.0, 2.0), TEST_METRICS), ((), ())):
        readings = [Reading(sequence_accuracy=0.0, token_accuracy=0.5, loss=loss) for loss in losses]
        by_run = dict(zip(map(run_of, trials), readings, strict=False))
        summary = summarise(experiment, trials, choose_point(trials), by_run)
        (point,) = summary.points
        assert point.estimates is not None
        assert {name for name in point.estimates if name not in METRICS} == set(names)


@pytest.mark.parametrize(("task", "limit"), [("memorization", "ceiling"), ("noisy-in-context-recall", "chance")])
def test_ceiling_and_chance_are_those_of_the_test_split(task: str, limit: str) -> None:
    """Of 8 sequences each, splits differ: in the keys that training does not show, and in the scored positions."""
    few = ["--task.train-examples", "8", "--task.eval-examples", "8", "--batch-size", "8"]
    (experiment,) = planned(["--mixer", "transformer", "--task", task, *few])[1]
    values = [getattr(experiment.instance, limit)(split) for split in ("train", "validation", "test")]
    assert len(set(values)) == 3
    assert getattr(summarise(experiment, [], None, {}), limit) == values[2]
