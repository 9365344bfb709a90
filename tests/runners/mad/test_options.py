"""From options to experiments: grids, sweeps, presets, and what the help says of them."""

from itertools import product

import pytest

from mixers import MIXERS
from mixers.base import Shape
from runners.mad.training.protocol import Protocol
from tasks import PUBLISHED, TASKS
from tests.runners.mad.commands import planned

pytestmark = pytest.mark.usefixtures("wide_terminal")


def test_defaults_are_the_published_grid_at_the_baseline() -> None:
    options, experiments = planned(["--mixer", "rt", "--task", "compression"])
    (experiment,) = experiments
    assert [(run.lr, run.weight_decay) for run in options.runs] == list(product((1e-4, 5e-4, 1e-3), (0.0, 0.1)))
    assert {run.seed for run in options.runs} == {0}
    assert experiment.difficulty == "baseline"
    assert experiment.task_config == TASKS["compression"].Config()
    assert experiment.mixer_config == MIXERS["rt"].Config(heads=16)
    assert (experiment.shape.width, experiment.shape.mlp_width, experiment.shape.layers) == (128, 512, 1)
    assert experiment.protocol.total_steps(12_800) == 20_000
    optimizer = experiment.protocol.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.final_lr) == (0.9, 0.98, 1e-8, 1e-6)


def test_the_wide_grid_holds_both_readings_of_the_papers_fourth_learning_rate() -> None:
    options, _ = planned(["--mixer", "rt", "--task", "compression", "--preset", "full", "--seeds", "3"])
    points = list(product((1e-4, 5e-4, 1e-3, 2e-3, 5e-3), (0.0, 0.1)))
    assert len(options.runs) == len(points)
    assert {(run.lr, run.weight_decay) for run in options.runs} == set(points)


def test_all_and_sweeps_expand_to_every_setting_of_the_published_table() -> None:
    _, experiments = planned(["--mixer", "all", "--task", "selective-copying", "--difficulty", "all"])
    names = [e.difficulty for e in experiments if e.mixer == "rt"]
    assert len(experiments) == len(MIXERS) * len(names)
    # SPEC of the suite: vocab 3, length 2, examples 4, tokens to copy 3, and the baseline
    assert len(names) == 13
    assert {"baseline", "vocab-size-32", "length-1024", "train-examples-800", "tokens-to-copy-96"} <= set(names)


def test_nested_options_reach_the_layer_and_the_task() -> None:
    (experiment,) = planned(
        ["--mixer", "rt", "--mixer.block", "4", "--task", "compression", "--task.vocab-size", "32"]
    )[1]
    assert experiment.mixer_config.block == 4
    assert experiment.task_config.vocab_size == 32
    assert experiment.difficulty == "custom"


def test_options_apply_to_the_layers_and_tasks_that_have_them_and_a_line_names_the_others() -> None:
    command = ["--mixer", "rt", "lstm", "--task", "compression", "copying"]
    given = ["--mixer.block", "4", "--mixer.heads", "8", "--task.vocab-size", "32"]
    lines: list[str] = []
    plain, changed = planned(command)[1], planned([*command, *given], lines.append)[1]
    assert lines == [
        "--mixer.heads does not apply to mixer lstm",
        "--mixer.block does not apply to mixer lstm",
        "--task.vocab-size does not apply to task copying",
    ]
    assert [(e.mixer_config.block, e.mixer_config.heads) for e in changed if e.mixer == "rt"] == [(4, 8)] * 2
    assert [e.task_config.vocab_size for e in changed if e.task == "compression"] == [32] * 2
    same = [(e.mixer, e.task) for e, before in zip(changed, plain, strict=True) if e.name == before.name]
    assert same == [("lstm", "copying")]


def test_a_preset_sets_its_own_task_and_leaves_the_settings_of_others_alone() -> None:
    command = ["--preset", "demo", "--task", "in-context-recall", "copying", "--task.train-examples", "900"]
    own, other = planned([*command, "--mixer", "rt"])[1]
    recall, copying = TASKS["in-context-recall"].Config, TASKS["copying"].Config
    assert own.task_config == recall(length=48, eval_examples=320, train_examples=900)
    assert other.task_config == copying(train_examples=900)
    assert (own.difficulty, other.difficulty) == ("custom", "custom")
    assert own.protocol == other.protocol == Protocol(batch_size=64, steps=250, evaluations=5)
    (as_it_is, _) = planned(["--preset", "demo"])[1]
    assert as_it_is.difficulty == "demo"


def test_the_preset_quick_has_small_settings_of_every_task_and_its_name_in_every_record() -> None:
    options, experiments = planned(["--preset", "quick", "--mixer", "rt"])
    assert [experiment.task for experiment in experiments] == list(PUBLISHED)
    experiments += planned(["--preset", "quick", "--mixer", "rt", "--task", *TASKS])[1][len(PUBLISHED) :]
    assert len(options.runs) == 2
    assert list(options.more_seeds) == [1, 2]
    for experiment in experiments:
        assert (experiment.difficulty, experiment.preset) == ("quick", "quick")
        assert experiment.protocol == Protocol(batch_size=16, steps=1000, evaluations=10)
        assert experiment.shape == Shape(width=64, mlp_width=128)
        small, whole = experiment.task_config, TASKS[experiment.task].Config()
        assert small.train_examples <= 3200
        assert small != whole
        assert len(experiment.instance.split("validation")) == 320


def test_the_name_of_a_preset_is_no_part_of_an_experiments_identity() -> None:
    settings = ["--task", "parity", "--task.length", "24", "--steps", "9", "--width", "16"]
    settings += ["--task.train-examples", "3200", "--task.eval-examples", "320"]
    (named,), (plain,) = (
        planned([*preset, "--mixer", "lstm", *settings, "--batch-size", "16", "--mlp-width", "16"])[1]
        for preset in (["--preset", "quick", "--evaluations", "40"], [])
    )
    assert named.fingerprint == plain.fingerprint


def test_epochs_take_the_place_of_a_presets_steps() -> None:
    (experiment, _) = planned(["--preset", "demo", "--epochs", "2"])[1]
    assert experiment.protocol == Protocol(batch_size=64, epochs=2, evaluations=5)
