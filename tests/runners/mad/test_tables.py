"""Tables of made-up studies, and the names that tell studies apart."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from runners.mad.points import chosen, points
from runners.mad.tables import labelled, print_comparison, print_study
from runners.records import Record
from tests.runners.mad.made_up import layer, record, study, table

MANY = ("lstm", "rt", "s5", "lru", "staircase")


def printed(print_to: Callable[[Console], None], width: int = 200) -> tuple[list[str], list[list[list[str]]]]:
    """The lines outside of tables, and the cells of each row of each table, below the headings."""
    console = Console(width=width, file=io.StringIO(), markup=False)
    print_to(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    tables: list[list[list[str]]] = []
    for line in lines:
        if line.startswith("┏"):
            tables.append([])
        elif line.startswith("│"):
            tables[-1].append([cell.strip() for cell in line.strip("│").split("│")])
    return [line.rstrip() for line in lines if line[:1] not in tuple("┏┃┡│├└")], tables


def compared(*found: Record, width: int = 200) -> tuple[list[str], list[list[list[str]]]]:
    return printed(lambda console: print_comparison(chosen(points(table(*found))), console), width)


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
    lines, tables = printed(lambda console: print_study(table(*GRID), console), width)
    validation = ["0.3500 ± 0.6353", "0.7000 ± 1.2706", "1.0000 ± 0.0000"]
    test = ["0.3500 ± 0.6353", "0.7000 ± 1.2706", "2.0"]
    name, narrow = ["→", "0.001", "0.1"], width == 80
    assert [*name, *validation] + ([] if narrow else test) in tables[0]
    assert len(tables) == 1 + narrow
    assert [*name, *test] in tables[1] if narrow else True
    assert [row[3] for row in tables[0] if row[1] == "0.0005"] == ["1 of 2 diverged"]
    assert "±: half the 95% t-interval of the mean over 2 seeds, not clipped to [0, 1]" in lines
    assert "chosen on validation: lr 0.001, weight decay 0.1" in lines
    assert "sequence / token accuracy on 'length 80': 0.2500 ± 0.0000 / 0.7500 ± 0.0000" in lines
    assert "sequence / token accuracy: ceiling 1.0000 / 1.0000, chance 0.25 / 0.5000" in lines
    assert max(map(len, lines)) <= max(width, 140)


@pytest.mark.parametrize(("lr", "beyond"), [(1e-3, "0.0001 0.0005 0.001 0.002 0.005"), (1e-4, "2e-05 5e-05 0.0001")])
def test_a_choice_at_the_edge_names_rates_beyond_it(lr: float, beyond: str) -> None:
    scores: dict[tuple[float, float, int], float | None] = {
        (rate, 0.0, 0): 0.9 if rate == lr else 0.1 for rate in (1e-4, 5e-4, 1e-3)
    }
    lines, _ = printed(lambda console: print_study(table(*study(scores)), console))
    assert any(f"so a better one may lie beyond it: --lr {beyond}" in line for line in lines)


def test_a_study_that_diverged_names_rates_to_try() -> None:
    runs = study({(5e-3, 0.0, 0): None, (2e-3, 0.0, 0): None}, diverged_step=7)
    lines, _ = printed(lambda console: print_study(table(*runs), console))
    assert lines[-1] == "every point diverged, the first run at step 7: try --lr 0.0002 0.0005"


@pytest.mark.parametrize(("ceiling", "said"), [((1.0, 1.0), 0), ((0.05, 1.0), 1), ((1.0, 0.4), 1), ((0.249, 0.499), 0)])
def test_an_accuracy_above_the_ceiling_is_said(ceiling: tuple[float, float], said: int) -> None:
    """By more than the sampling of the test split: the layer may see the answers."""
    one = record(0.5, ceiling=dict(zip(("sequence", "token"), ceiling, strict=True)))
    lines, _ = printed(lambda console: print_study(table(one), console))
    assert sum("is above the ceiling" in line for line in lines) == said


@pytest.mark.parametrize("mixers", [MANY, MANY[:4]])
def test_the_comparison_is_sorted_by_task_and_family(mixers: tuple[str, ...]) -> None:
    """Families are named where there are many layers."""
    found = [record(0.5, layer=mixer, task=task, remark="slow" if mixer == "s5" else None)
             for mixer in mixers for task in ("parity", "mqar")]  # fmt: skip
    lines, tables = compared(*found)
    families = {
        "recurrent attention": ["rt", "staircase"],
        "state space": ["s5", "slow"],
        "recurrent net": ["lstm", "lru"],
    }
    rows = []
    for family, members in families.items():
        rows += [family] * (mixers == MANY) + [name for name in members if name in (*mixers, "slow")]
    assert [row[0] for row in tables[0]] == [
        name for task in ("mqar", "parity") for name in (task, *rows, "ceiling", "chance")
    ]
    assert next(row for row in tables[0] if row[0] == "rt") == ["rt", "0.2500", "0.5000", "1.23k", "5", "5", "77"]
    assert not any(line.startswith("±") for line in lines)


def test_the_comparison_is_whole_at_80_columns() -> None:
    found = [one for mixer in ("feedback-transformer", *MANY) for one in layer(mixer, (0.5, 0.6), preset="quick")]
    lines, (whole,) = compared(*found)
    narrow, (accuracies, costs) = compared(*found, width=80)
    assert accuracies == [row[:3] for row in whole]
    assert costs == [[name, *cells[2:]] for name, *cells in whole if cells[2]]
    for said in (lines, narrow):
        assert "quick: small settings, not the published protocol" in said


def test_accuracies_beyond_training_stand_side_by_side() -> None:
    def beyond(name: str, **sets: float) -> Record:
        metrics = {key: {"sequence_accuracy": y / 2, "token_accuracy": y} for key, y in sets.items()}
        return record(0.5, layer=name, metrics=metrics)

    _, (_, further) = compared(beyond("lstm", long=0.5, longer=0.25), beyond("rt", long=1.0))
    assert further == [
        ["parity", "", ""],
        ["long", "0.5000 / 1.0000", "0.2500 / 0.5000"],
        ["longer", "", "0.1250 / 0.2500"],
    ]
    assert len(compared(beyond("lstm", long=0.5))[1]) == 1  # the study's own lines have said it


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
