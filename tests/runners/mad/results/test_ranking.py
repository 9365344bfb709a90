"""Ranks on a task, and the sentence on where a layer stands."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mixers.costs import Costs
from runners.mad.results.ranking import ordinal, print_ranks, ranked, sentence
from runners.mad.results.standings import Standing
from runners.mad.results.summary import Estimate
from tasks.base import Accuracy


def standing(name: str, mean: float | None, half_width: float | None = 0.0, preset: str | None = None) -> Standing:
    """Of a layer with a token accuracy; without one every grid point diverged."""
    estimate = None if mean is None else Estimate(mean=mean, half_width=half_width)
    return Standing(
        mixer=name,
        family="other",
        remark=None,
        task="parity",
        difficulty="baseline" if preset is None else preset,
        test=None if estimate is None else {"test_token_accuracy": estimate, "test_sequence_accuracy": estimate},
        seeds=5,
        ceiling=Accuracy(sequence=1.0, token=1.0),
        chance=Accuracy(sequence=0.0, token=0.5),
        costs=Costs(parameters=1234, state_floats={128: 5, 1024: 5}, flops_per_token={128: 77}),
        preset=preset,
    )


def test_the_sentence_tells_layers_apart_by_their_intervals() -> None:
    own = standing("mine", 0.8, 0.02)
    others = [
        standing("gla", 0.5, 0.1),
        standing("rt", 0.83, 0.01),
        standing("retnet", 0.77, 0.02),
        standing("lstm", 0.9, 0.05),
        standing("lru", None),
    ]
    assert sentence(own, [own, *others]) == (
        "mine is 3rd of 6 on parity: ahead of gla, lru outside the intervals; within the intervals of rt, retnet; "
        "behind lstm outside the intervals"
    )


def test_intervals_that_touch_do_not_tell_layers_apart() -> None:
    own, touching, disjoint = standing("mine", 0.75, 0.125), standing("rt", 0.5, 0.125), standing("gla", 0.4, 0.125)
    assert sentence(own, [own, touching, disjoint]) == (
        "mine is 1st of 3 on parity: ahead of gla outside the intervals; within the intervals of rt"
    )


def test_many_layers_are_a_number_and_the_nearest_in_rank() -> None:
    own = standing("mine", 0.5, 0.02)
    better = [standing(f"better-{i}", 0.6 + 0.01 * i) for i in range(5)]
    close = [standing(f"close-{i}", 0.485 + 0.01 * i) for i in range(4)]
    worse = [standing(f"worse-{i}", 0.4 - 0.01 * i) for i in range(6)]
    assert sentence(own, [*worse, *close, own, *better]) == (
        "mine is 8th of 16 on parity: ahead of 6 layers (nearest: worse-0, worse-1, worse-2) outside the intervals; "
        "within the intervals of close-3, close-2, close-1, close-0; "
        "behind 5 layers (nearest: better-2, better-1, better-0) outside the intervals"
    )
    close.append(standing("close-4", 0.52))
    assert "; within the intervals of 5 layers (nearest: close-3, close-2, close-1); " in sentence(
        own, [*worse, *close, own, *better]
    )


def test_of_many_layers_that_diverged_as_it_did_the_nearest_are_named_too() -> None:
    layers = [standing(name, None) for name in "abcdef"]
    assert sentence(layers[5], layers) == (
        "f is 1st of 6, level with 5 others, on parity: within the intervals of 5 layers (nearest: c, d, e)"
    )


def test_equal_means_share_the_smaller_rank() -> None:
    layers = [standing("a", 0.5), standing("b", 1.0), standing("c", 1.0), standing("d", None), standing("e", None)]
    assert [(rank, s.mixer) for rank, s in ranked(layers)] == [(1, "b"), (1, "c"), (3, "a"), (4, "d"), (4, "e")]
    assert sentence(layers[2], layers) == (
        "c is 1st of 5, level with 1 other, on parity: "
        "ahead of a, d, e outside the intervals; within the intervals of b"
    )
    assert sentence(layers[3], layers) == (
        "d is 4th of 5, level with 1 other, on parity: within the intervals of e; behind b, c, a outside the intervals"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (13, "13th"), (22, "22nd")]
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


@pytest.mark.parametrize("width", [60, 200])
def test_the_table_has_ranks_costs_and_an_arrow_at_one_s_own(width: int) -> None:
    own = standing("mine", 0.5, 0.1, preset="quick")
    console = Console(width=width, file=io.StringIO())
    print_ranks([([own, standing("rt", 1.0, preset="quick")], [own])], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    first = ["rt", "1", "1.0000 ± 0.0000", "1.0000 ± 0.0000"]
    second = ["→ mine", "2", "0.5000 ± 0.1000", "0.5000 ± 0.1000"]
    costs = ["1.23k", "5", "5", "77"]
    of_layers = {"rt": ["rt", *costs], "→ mine": ["→ mine", *costs]}
    assert rows[:2] == ([first + costs, second + costs] if width == 200 else [first, second])
    assert {row[0]: row for row in rows[2:]} == ({} if width == 200 else of_layers)
    assert "mine is 2nd of 2 on parity (quick): behind rt outside the intervals" in text
    assert "quick: small settings, not the published protocol" in text


def test_the_costs_begin_with_one_s_own_layers_wherever_they_stand_in_the_registry() -> None:
    own = replace(standing("mine", 0.5), place=((21, "mine"), 0))  # as runners.compare places layers from outside
    row = replace(standing("rt", 1.0), place=((3, "rt"), -1))
    console = Console(width=60, file=io.StringIO())
    print_ranks([([own, row], [own])], console)
    assert isinstance(console.file, io.StringIO)
    costs = console.file.getvalue().rpartition("\ncosts\n")[2]
    assert 0 < costs.index("→ mine") < costs.index("  rt")


def test_a_narrow_console_gets_the_costs_once_and_the_sentences_last() -> None:
    own = [replace(standing("mine", 0.5, 0.1), task=task) for task in ("parity", "copying")]
    console = Console(width=60, file=io.StringIO())
    print_ranks([([one, replace(one, mixer="rt")], [one]) for one in own], console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines.count("costs") == 1
    assert [line.partition(": yours")[0] for line in lines if ": yours" in line] == ["parity", "copying"]
    assert [line.partition(":")[0] for line in lines[-2:]] == [
        "mine is 1st of 2, level with 1 other, on parity",
        "mine is 1st of 2, level with 1 other, on copying",
    ]


def test_over_several_tasks_layers_that_have_all_are_ranked_by_their_mean_rank() -> None:
    """``alone`` lacks a task, so that it counts in no rank; ``two`` and ``rt`` share a rank on the second task."""
    means = {
        "parity": {"mine": 0.9, "rt": 0.8, "two": 0.7, "alone": 1.0},
        "copying": {"mine": 0.1, "rt": 0.5, "two": 0.5},
        "mqar": {"mine": 0.3, "rt": 0.2, "two": None, "alone": 0.9},
    }
    found = []
    for task, of_task in means.items():
        standings = [replace(standing(name, mean), task=task) for name, mean in of_task.items()]
        found.append((standings, standings[:1]))

    def printed(count: int) -> str:
        console = Console(width=100, file=io.StringIO())
        print_ranks(found[:count], console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    text = printed(3)
    assert text.endswith("\nmine is 1st of 3, with a mean rank of 1.7 over 3 settings: parity 1, copying 3, mqar 1\n")
    table = text.rpartition("all 3 settings together, by mean rank")[2]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if "│" in line]
    assert rows == [["→ mine", "1", "1.7"], ["rt", "1", "1.7"], ["two", "3", "2.3"]]
    assert "mean rank" not in printed(2)

    # A stale row is the same layer; where no other layer has all tasks, there is nothing to be ranked among.
    found = [([*standings[:1], replace(standings[1], mixer="rt (stale)" if n else "rt")], own)
             for n, (standings, own) in enumerate(found)]  # fmt: skip
    assert "mine is 1st of 2, with a mean rank of 1.3 over 3 settings" in printed(3)
    found = [
        ([*standings[:1], replace(standings[1], mixer=f"rt-{n}")], own) for n, (standings, own) in enumerate(found)
    ]
    assert "mean rank" not in printed(3)
