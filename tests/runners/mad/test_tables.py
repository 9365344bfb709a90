"""The lines and grid points of made-up studies, and the names that tell studies apart."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from runners.mad.points import chosen, points
from runners.mad.tables import labelled, print_study
from runners.records import Record
from tests.runners.mad.made_up import as_shown, record, study, table


def printed(found: Sequence[Record], width: int = 200, verbose: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), markup=False)
    print_study(table(*found), console, verbose)
    return console.file.getvalue().splitlines()


def rows_of(*found: Record) -> list[tuple[str, str]]:
    """Label and setting of each study, in their order."""
    labels = labelled(chosen(points(table(*found))))
    return [*zip(labels["label"], labels["setting"], strict=True)]


GRID = [
    *study({(1e-4, 0.1, 0): 0.5, (1e-4, 0.1, 1): 0.7}, tested=False, steps_per_second=2.0),
    *study({(1e-3, 0.1, 0): 0.6, (1e-3, 0.1, 1): 0.8}, steps_per_second=2.0, metrics={"length 80": {
        "sequence_accuracy": 0.25, "token_accuracy": 0.75}}),
    *study({(5e-4, 0.0, 0): None, (5e-4, 0.0, 1): 0.9}),
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 160])
def test_a_study_has_its_points_the_choice_and_the_limits(width: int) -> None:
    lines = printed(GRID, width, verbose=True)
    rows = [line.split() for line in lines if line.startswith("→")]
    figures = [as_shown([0.6, 0.8]), as_shown([0.3, 0.4]), "1.000 (1.000–1.000)"]
    validation = [word for text in figures for word in f"{text}*".split()]
    test = [*validation[:4], "2"]
    name = ["→", "0.001", "0.1"]
    assert rows == [[*name, *validation], [*name, *test]]
    assert ["0.0005", "0", "1", "of", "2", "diverged"] in [line.split() for line in lines]
    assert lines[-3:-1] == [
        f"rt on parity: token accuracy {as_shown([0.6, 0.8])}* at lr 0.001, weight decay 0.1, chosen by validation "
        "token accuracy of seeds 0, 1; 1 of 3 points diverged",
        "token accuracy beyond training: length 80 0.750 (0.750–0.750)*",
    ]
    limits = "ceiling 1 / 1, chance 0.25 / 0.5; mean (95% interval) over 2 seeds; *: the chosen learning rate is the "
    limits += "largest of its grid, below the ceiling"
    assert f"sequence / token accuracy: {limits}" in lines
    assert printed(GRID, width) == lines[-3:]


def test_the_seeds_that_decided_are_said() -> None:
    """Seed 0 alone, which all points have, beside a mean that is below the other point."""
    runs = study({(1e-4, 0.0, 0): 0.9, (1e-4, 0.0, 1): 0.1, (5e-4, 0.0, 0): 0.8})
    assert printed(runs)[0].endswith("at lr 0.0001, weight decay 0, chosen by validation token accuracy of seed 0")


def test_a_study_that_diverged_names_rates_to_try() -> None:
    runs = study({(5e-3, 0.0, 0): None, (2e-3, 0.0, 0): None}, diverged_step=7)
    first = "no point converged, the first run diverged at step 7"
    assert printed(runs) == [f"rt on parity: {first}: try --lr 0.0002 0.0005"]


@pytest.mark.parametrize(("lr", "beyond"), [(1e-3, "0.0001 0.0005 0.001 0.002 0.004"), (1e-4, "2e-05 5e-05 0.0001")])
def test_a_choice_at_the_edge_names_rates_beyond_it(lr: float, beyond: str) -> None:
    scores: dict[tuple[float, float, int], float | None] = {
        (rate, 0.0, 0): 0.9 if rate == lr else 0.1 for rate in (1e-4, 5e-4, 1e-3)
    }
    lines = printed(study(scores))
    assert any(f"so a better one may lie beyond it: --lr {beyond}" in line for line in lines)


@pytest.mark.parametrize(("ceiling", "said"), [((1.0, 1.0), 0), ((0.05, 1.0), 1), ((1.0, 0.4), 1), ((0.249, 0.499), 0)])
def test_an_accuracy_above_the_ceiling_is_said(ceiling: tuple[float, float], said: int) -> None:
    """By more than the sampling of the test split: the layer may see the answers."""
    one = record(0.5, ceiling=dict(zip(("sequence", "token"), ceiling, strict=True)))
    lines = printed([one])
    assert sum("is above the ceiling" in line for line in lines) == said


def named(layer: str, n: int, **changes: Any) -> Record:
    return record(layer=layer, study=f"{layer} {n}", **changes)


def test_rows_name_the_settings_in_which_they_differ_and_no_others() -> None:
    task_config = record().task_config
    block = {"block": 4, "heads": 16}
    assert rows_of(
        named("rt", 1),
        named("rt-block-4", 2, mixer="rt", mixer_config=block),
        named("rt-block-4", 3, mixer="rt", mixer_config=block | {"heads": 8}),
        named("transformer", 4),
        named("rt", 5, task_config=task_config | {"length": 32}, difficulty="custom"),
        named("rt", 6, task_config=task_config | {"length": 48}, difficulty="custom"),
    ) == [
        ("transformer", "parity"),
        ("rt", "parity"),
        ("rt-block-4 (heads 8)", "parity"),
        ("rt-block-4 (heads 16)", "parity"),
        ("rt", "parity (custom, length 32)"),
        ("rt", "parity (custom, length 48)"),
    ]


def test_layers_that_are_compared_name_width_training_and_grid_in_which_they_differ() -> None:
    """Else they would seem to be compared at equal width, or with equal chances."""
    for changes, words in (({"width": 64}, ("width 128", "width 64")), ({"lr": 5e-3}, ("lr 0.001", "lr 0.005"))):
        found = named("rt", 1), named("transformer", 2, **changes)
        assert [label for label, _ in rows_of(*found)] == [f"transformer ({words[1]})", f"rt ({words[0]})"]
        elsewhere = named("rt", 1), named("transformer", 2, task="mqar", **changes)  # which is another comparison
        assert [label for label, _ in rows_of(*elsewhere)] == ["transformer", "rt"]


def test_studies_of_equal_settings_are_told_apart_by_their_code() -> None:
    found = named("Mine", 1, fingerprint="a" * 64), named("Mine", 2, fingerprint="b" * 64)
    assert [label for label, _ in rows_of(*found)] == ["Mine (code aaaaaaaa)", "Mine (code bbbbbbbb)"]


def test_studies_are_in_the_order_of_the_registries_and_then_of_their_labels() -> None:
    in_order = ["transformer", "rt", "rt-block-4", "rt-block-16", "lstm", "Mine"]
    found = [named(name, 1, mixer=name.partition("-")[0], family="recurrent net" if name == "lstm" else "attention")
             for name in in_order]  # fmt: skip
    found[-1] = named("Mine", 1)
    for order in (found, found[::-1]):
        labels = [label for label, _ in rows_of(*order, *(named("rt", 9, task="mqar") for _ in range(1)))]
        assert labels == ["rt", *in_order]
