"""The rank of one's own layers among reference rows, and which rows are comparable."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from runners.mad.ranking import beside, mean_ranks, ordinal, print_rankings, ranking
from runners.mad.rows import load, load_rows
from runners.records import REFERENCE, Record, read_all, table_of
from tests.runners.mad.made_up import layer, record, study, table


def printed(own: Sequence[Record], reference: pd.DataFrame | None, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False)
    print_rankings(table(*own), reference, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def reference(**means: float | None) -> list[Record]:
    """Rows with two seeds a hundredth apart, by name: their 95% intervals reach 0.064 to both sides."""
    seeds = {name: (None, None) if mean is None else (mean - 0.005, mean + 0.005) for name, mean in means.items()}
    return [one for name, of in seeds.items() for one in layer(name, of, preset="full")]


def test_layers_are_told_apart_by_their_intervals() -> None:
    own = layer("mine", (0.795, 0.805))
    rows = table(*reference(gla=0.5, rt=0.9, retnet=0.7, lstm=0.95, lru=None))
    found = ranking(table(*own), rows).set_index("label")
    assert found["rank"].to_dict() == {"lstm": 1, "rt": 2, "mine": 3, "retnet": 4, "gla": 5, "lru": 6}
    assert found.loc["mine", ["better", "tied", "worse"]].tolist() == [1, 2, 2]
    assert found["own"].to_dict() == {name: name == "mine" for name in found.index}
    assert "mine on parity: 3rd of 6: 1 better, 2 tied, 2 worse\n" in printed(own, rows)


def test_equal_means_share_the_smaller_rank_and_what_diverged_is_last() -> None:
    """A sum of floats depends on its order, which would rank equal means apart."""
    own = layer("mine", (0.1, 0.2, 0.3))
    rows = table(*layer("rt", (0.3, 0.2, 0.1)), *layer("gla", (0.0, 0.0, 0.0)), *layer("lru", (None, 0.5, 0.5)))
    assert ranking(table(*own), rows)["rank"].tolist() == [1, 1, 3, 4]


def test_a_layer_of_which_everything_diverged_has_a_rank_though_no_seed_repeats_it() -> None:
    grid = {(1e-3, 0.0, 0): 0.5, (1e-2, 0.0, 0): 0.4}
    rows = study({**grid, (1e-3, 0.0, 1): 0.6}, layer="rt")
    own = study(dict.fromkeys(grid), layer="mine")
    assert "mine on parity: 2nd of 2: 1 better, 0 tied, 0 worse\n" in printed(own, table(*rows))


@pytest.mark.parametrize("width", [70, 200])
def test_the_table_has_ranks_costs_and_an_arrow_at_ones_own(width: int) -> None:
    text = printed(layer("mine", (0.5, 0.5), preset="quick"), table(*reference(rt=0.995)), width)
    costs = ["1.23k", "5", "5", "77"]
    first, second = (
        ["rt", "1", "0.4975 ± 0.0318", "0.9950 ± 0.0635"],
        ["→ mine", "2", "0.2500 ± 0.0000", "0.5000 ± 0.0000"],
    )
    narrow = [first, second, ["→ mine", *costs], ["rt", *costs]]
    assert cells_of(text) == ([first + costs, second + costs] if width == 200 else narrow)
    assert "quick: small settings, not the published protocol" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 600}, "steps 600, theirs 20,000: --preset full has theirs"),
        ({"width": 64, "mlp_width": 128}, "width 64, theirs 128: --preset full has theirs"),
        ({"task_config": {"length": 48, "eval_examples": 1280}}, "length 48, theirs 40: --preset full has theirs"),
        ({"optimizer": {"beta1": 0.9, "beta2": 0.95}}, "beta2 0.95, theirs 0.98: --preset full has theirs"),
        ({"lr": 2e-3}, "lr 0.002, theirs 0.001: --preset full has theirs"),
        ({"task": "mine:Task"}, "there are none on this task"),
        ({"seeds": 1}, "seeds 1, theirs 2: --preset full has theirs"),
    ],
)
def test_where_nothing_is_comparable_a_line_names_the_first_difference(changes: dict[str, Any], reason: str) -> None:
    seeds = changes.pop("seeds", 2)
    own = layer("mine", (0.5, 0.6)[:seeds], **changes)
    task = changes.get("task", "parity")
    assert printed(own, table(*reference(rt=0.5))) == f"no reference rows for mine on {task}: {reason}\n"
    assert printed(own, None) == ""


def test_results_of_another_precision_or_another_device_are_comparable() -> None:
    own = layer("mine", (0.5, 0.6), precision="bfloat16", device="NVIDIA H200")
    assert "2nd of 2" in printed(own, table(*reference(rt=0.995)))


def test_a_study_with_more_points_and_seeds_is_ranked_as_without_them() -> None:
    """The rows have a grid of two points and two seeds of the chosen one.

    The third point is the best, and by all of its seeds the second one is; by seed 0 alone the first one is chosen.
    """
    grid = {(1e-3, 0.0, 0): 0.5, (2e-3, 0.0, 0): 0.4}
    rows = table(*study({**grid, (1e-3, 0.0, 1): 0.5}, layer="rt", preset="full"))
    wide = {(1e-3, 0.0): (0.6, 0.7, 0.1), (2e-3, 0.0): (0.5, 0.9, 0.9), (5e-3, 0.0): (0.9, 0.9, 0.9)}
    own = study({(*at, seed): y for at, of in wide.items() for seed, y in enumerate(of)}, layer="mine")
    found = ranking(table(*own), rows).set_index("label").loc["mine"]
    assert (found["lr"], found["seeds"], found["rank"]) == (1e-3, [0, 1], 1)
    assert found["test.token_accuracy"] == pytest.approx(0.65)

    # A point of which a further seed diverged is not the one that was repeated.
    own = [replace(one, diverged_step=3, metrics={}) if (one.lr, one.seed) == (1e-3, 1) else one for one in own]
    found = ranking(table(*own), rows).set_index("label").loc["mine"]
    assert (found["lr"], found["test.token_accuracy"]) == (2e-3, pytest.approx(0.7))


def test_a_reference_row_has_a_label_of_its_own_and_the_setting_of_the_study() -> None:
    own = layer("rt", (0.5, 0.6), difficulty="custom")
    shown, reasons = beside(table(*own), table(*reference(rt=0.9, lstm=0.5)))
    assert reasons == []
    assert shown["label"].tolist() == ["rt", "rt (reference)", "lstm"]
    assert set(shown["setting"]) == {"parity (custom)"}


def test_over_several_tasks_layers_that_have_all_are_ranked_by_their_mean_rank() -> None:
    """``lru`` lacks a task, so that it counts in no rank; ``gla`` and ``rt`` share a rank on the second task."""
    means: dict[str, dict[str, float | None]] = {
        "parity": {"mine": 0.9, "rt": 0.8, "gla": 0.7, "lru": 1.0},
        "copying": {"mine": 0.1, "rt": 0.5, "gla": 0.5},
        "mqar": {"mine": 0.3, "rt": 0.2, "gla": None, "lru": 0.9},
    }
    found = [record(y, layer=name, task=task) for task, of in means.items() for name, y in of.items()]
    own, rows = ([one for one in found if (one.layer == "mine") == mine] for mine in (True, False))
    text = printed(own, table(*rows))
    assert text.endswith("mine over 3 settings: 1st of 3 by mean rank, 1.7\n")
    ranks = mean_ranks(ranking(table(*own), table(*rows)))
    assert ranks["parity"].to_dict() == {"rt": 2, "mine": 1, "gla": 3}
    assert ranks["mean"].to_dict() == pytest.approx({"rt": 5 / 3, "mine": 5 / 3, "gla": 7 / 3})
    two = [[one for one in part if one.task != "mqar"] for part in (own, rows)]
    assert "mean rank" not in printed(two[0], table(*two[1]))


def test_a_layer_is_ranked_among_the_shipped_rows_of_its_protocol_alone() -> None:
    """A block of 4, as if it was somebody's own, in both protocols; the variants of RT are not among the rows."""
    files = [REFERENCE / place / "rt-block-4" / "parity.jsonl" for place in ("", "quick")]
    own = [(file, replace(one, study=f"{one.study} mine", layer="mine")) for file, one in read_all(*files)]
    found = ranking(table_of(own), load("shipped", ["parity"]))
    groups = found.groupby("setting")
    assert groups.size().to_dict() == {"parity": 22, "parity (quick)": 22}
    assert not found["label"].str.contains("block").any()
    known = load_rows(REFERENCE, ["quick"], [], ["parity"])
    assert known.empty


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (13, "13th"), (22, "22nd")]
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text
