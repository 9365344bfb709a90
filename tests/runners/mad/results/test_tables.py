"""Tables of made-up results."""

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from runners.mad.results.choice import Edge
from runners.mad.results.standings import Standing, print_comparison
from runners.mad.results.summary import METRICS, TEST_METRICS, Estimate, Point, summarise
from runners.mad.results.tables import edge_advice, explain_divergence, print_summary
from runners.tables import Name
from tasks.base import Accuracy
from tests.runners.mad.commands import planned
from tests.runners.mad.results.made_up import MANY, SORTED, standings_of


def compared(standings: Sequence[Standing], width: int) -> list[list[list[str]]]:
    """Cells of each row of each table of a comparison, below the headings."""
    console = Console(width=width, file=io.StringIO())
    print_comparison(standings, console)
    assert isinstance(console.file, io.StringIO)
    tables = [table.splitlines() for table in console.file.getvalue().split("┏")[1:]]
    return [[[c.strip() for c in row.strip("│").split("│")] for row in rows if row.startswith("│")] for rows in tables]


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("  my_package.my_module:MyLayer", 30, ["  my_package.my_module:MyLayer"]),
        ("→ my_package.my_module:MyLayer", 24, ["→ my_package.my_module:", "    MyLayer"]),
        ("my_package.my_module:MyLayer-alpha-0.05", 20, ["my_package.", "  my_module:MyLayer-", "  alpha-0.05"]),
        ("rt (lr 0.0005, seeds 3)", 14, ["rt (lr 0.0005,", "  seeds 3)"]),
        ("m:ExtraordinarilyLongLayer", 12, ["m:", "Extraordinar", "ilyLongLayer"]),
    ],
)
def test_a_narrow_column_breaks_a_name_before_words_alone(name: str, width: int, lines: list[str]) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(Name(name), overflow="fold")
    assert isinstance(console.file, io.StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == lines


@pytest.mark.parametrize("mixers", [MANY, MANY[:4]])
def test_the_comparison_is_sorted_by_task_and_family(mixers: tuple[str, ...]) -> None:
    (table,) = compared(standings_of(mixers), 200)
    named = [pair for pair in SORTED if pair[1] in mixers]
    families = dict.fromkeys(family for family, _ in named)
    rows = [name for family in families for name in (family, *(mixer for f, mixer in named if f == family))]
    rows = [name for name in rows if mixers == MANY or name in mixers]
    assert [name for name, *_ in table] == [
        name for task in ("parity", "mqar") for name in (task, *rows, "ceiling", "chance")
    ]
    half = len(table) // 2
    parity, mqar = ({name: cells for name, *cells in part} for part in (table[:half], table[half:]))
    assert parity["s5"][:3] == ["0.0200", "0.5200", "1"]
    assert mqar["rt"][0] == f"0.{len(mixers) + 1:02d}00"
    assert [parity["ceiling"][:2], parity["chance"][:2]] == [["0.98", "0.9912"], ["0.2", "0.5"]]
    assert mqar["chance"][:2] == ["0.2", "0.3"]


def test_a_study_s_intervals_are_whole_at_80_columns() -> None:
    note = "±: half the 95% t-interval of the mean over 2 seeds, not clipped to [0, 1]"
    (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--width", "16"])[1]
    estimates = {name: Estimate(mean=0.1 + i / 10, half_width=0.25) for i, name in enumerate((*METRICS, *TEST_METRICS))}
    points = [
        Point(lr=5e-4, weight_decay=0.0, seeds=[0, 1], estimates=None, diverged={0: 7, 1: 8}),
        Point(lr=1e-3, weight_decay=0.1, seeds=[0, 1], estimates=estimates, diverged={}),
        Point(
            lr=1e-4, weight_decay=0.1, seeds=[0, 1], estimates={name: estimates[name] for name in METRICS}, diverged={}
        ),
    ]
    rows = {}
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO())
        limit = Accuracy(sequence=1.0, token=1.0)
        empty = summarise(experiment, [], None, {})
        summary = replace(empty, points=points, chosen=1, ceiling=limit, chance=limit)
        print_summary(summary, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert note in lines
        rows[width] = [[c.strip() for c in line.strip("│").split("│")] for line in lines if line.startswith("│ ")]
    validation = ["0.1000 ± 0.2500", "0.2000 ± 0.2500", "0.3000 ± 0.2500"]
    test = ["0.6000 ± 0.2500", "0.7000 ± 0.2500", "0.5"]
    chosen, other = ["→", "0.001", "0.1"], ["", "0.0001", "0.1"]
    assert rows[120][-2:] == [[*chosen, *validation, *test], [*other, *validation, "", "", "0.5"]]
    at = rows[80].index([*chosen, *validation])
    assert rows[80][at + 1 :] == [[*other, *validation], [*chosen, *test], [*other, "", "", "0.5"]]


@pytest.mark.parametrize(
    ("words", "chosen", "advice"),
    [
        ([], 2, "try --grid wide, or --lr 0.0001 0.0005 0.001 0.002 0.005"),
        ([], 0, "try --lr 2e-05 5e-05 0.0001 0.0005 0.001"),
        (["--preset", "quick"], 0, "try --lr 0.0004 0.001 0.002 0.005"),
        (["--grid", "wide"], 4, "try --lr 0.0001 0.0005 0.001 0.002 0.005 0.01 0.025"),
    ],
)
def test_the_advice_on_a_choice_at_the_edge_names_a_grid_only_if_the_command_takes_it(
    words: list[str], chosen: int, advice: str
) -> None:
    options, (experiment,) = planned([*words, "--mixer", "rt", "--task", "parity"])
    points = [
        Point(lr=lr, weight_decay=0.0, seeds=[0], estimates={}, diverged={})
        for lr in dict.fromkeys(run.lr for run in options.runs)
    ]
    edge: Edge = "smallest" if chosen == 0 else "largest"
    summary = replace(summarise(experiment, [], None, {}), points=points, chosen=chosen, edge=edge)
    assert edge_advice(summary).endswith(
        f"so a better one may lie beyond it: {advice}, which trains the new ones alone"
    )


def test_a_study_that_diverged_names_learning_rates_to_try() -> None:
    (experiment,) = planned(["--preset", "quick", "--mixer", "rt", "--task", "parity"])[1]
    points = [
        Point(lr=lr, weight_decay=0.0, seeds=[0], estimates=None, diverged={0: step})
        for lr, step in ((5e-3, 7), (2e-3, 9))
    ]
    said = explain_divergence(replace(summarise(experiment, [], None, {}), points=points))
    assert said.endswith(
        "every run diverged, the first after 7 steps: try learning rates 10 times smaller (--lr 0.0002 0.0005), or "
        "correct the layer"
    )


def test_the_comparison_is_whole_at_80_columns() -> None:
    standings = standings_of(["feedback-transformer", *MANY], half_width=0.01)
    (whole,) = compared(standings, 200)
    accuracies, costs = compared(standings, 80)
    assert accuracies == [row[:3] for row in whole]
    assert costs == [[name, *cells[2:]] for name, *cells in whole[: len(whole) // 2] if cells[2]]


def test_a_comparison_says_over_how_many_seeds_its_intervals_are(capsys: pytest.CaptureFixture[str]) -> None:
    for half_width, said in ((None, False), (1.3, True)):
        print_comparison(standings_of(["rt", "s5"], half_width=half_width), Console())
        assert ("±: half the 95% t-interval of the mean over 3 seeds" in capsys.readouterr().out) == said
