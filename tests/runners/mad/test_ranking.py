"""The rank of one's own layers among reference rows, and which rows are comparable."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from mixers import MIXERS
from runners.mad.ranking import beside, mean_ranks, print_results, ranking
from runners.mad.rows import load, load_rows
from runners.records import REFERENCE, Record, read_all, table_of
from tests.runners.mad.made_up import as_shown, layer, record, study, table


def printed(own: Sequence[Record], reference: pd.DataFrame | None, width: int = 200, verbose: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False)
    print_results(*beside(table(*own), reference), console, verbose)
    return console.file.getvalue()


def cells_of(text: str, first: str) -> list[list[str]]:
    """The cells of each line that begins with ``first``."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip().startswith(first)]


def reference(**means: float | None) -> list[Record]:
    """Rows with two seeds a hundredth apart, by name: their 95% intervals are 0.13 long near one half."""
    seeds = {name: (None, None) if mean is None else (mean - 0.005, mean + 0.005) for name, mean in means.items()}
    return [one for name, of in seeds.items() for one in layer(name, of, preset="full")]


def test_layers_are_told_apart_by_their_intervals() -> None:
    own = layer("mine", (0.495, 0.505))
    rows = table(*reference(gla=0.2, rt=0.6, retnet=0.4, lstm=0.75, lru=None))
    found = ranking(table(*own), rows).set_index("label")
    assert found["rank"].dropna().to_dict() == {"lstm": 1, "rt": 2, "mine": 3, "retnet": 4, "gla": 5}
    assert found.loc["mine", ["ahead", "tied", "behind"]].tolist() == [1, 2, 1]
    assert found["own"].to_dict() == {name: name == "mine" for name in found.index}
    assert "mine on parity: 3rd of 5: 1 ahead, 2 tied, 1 behind\n" in printed(own, rows)


def test_equal_means_share_the_smaller_rank() -> None:
    """A sum of floats depends on its order, which would rank equal means apart."""
    own = layer("mine", (0.1, 0.2, 0.3))
    rows = table(*layer("rt", (0.3, 0.2, 0.1)), *layer("gla", (0.0, 0.0, 0.0)))
    assert ranking(table(*own), rows)["rank"].tolist() == [1, 1, 3]


@pytest.mark.parametrize("diverged", ["mine", "gla"])
def test_what_diverged_has_no_rank_and_counts_in_none(diverged: str) -> None:
    """In no setting, and over all; though no seed repeats it."""
    tasks = ("parity", "mqar", "copying")
    accuracies = {"mine": 0.7, "rt": 0.9, "gla": 0.5}
    runs = [
        record(None if (name, task) == (diverged, "mqar") else accuracy, layer=name, task=task)
        for name, accuracy in accuracies.items()
        for task in tasks
    ]
    own, rows = (table(*(one for one in runs if (one.layer == "mine") == mine)) for mine in (True, False))
    found = ranking(own, rows).set_index(["setting", "label"])
    assert pd.isna(found.loc[("mqar", diverged), "rank"])
    assert found.loc[("mqar", "rt"), ["rank", "ahead", "tied", "behind"]].tolist() == [1, 0, 0, 1]
    assert found.loc[("parity", "rt"), "behind"] == 2
    mine = [one for one in runs if one.layer == "mine"]
    text, alone = printed(mine, rows), printed([one for one in mine if one.task == "mqar"], rows)
    if diverged == "mine":
        assert cells_of(text, "mqar") == [["mqar", "diverged"]]
        assert "mine over 3 tasks: no mean rank, because it has no rank on mqar\n" in text
        assert "mine on mqar: no rank: no point converged\n" in alone
    else:
        assert cells_of(text, "mqar") == [["mqar", "0.700", "0.350", "2 of 2", "1", "0", "0"]]
        assert "mine over 3 tasks: 2nd of 2 by mean rank, 2.0; beside it rt 1.0\n" in text
        assert "mine on mqar: 2nd of 2: 1 ahead, 0 tied, 0 behind\n" in alone


@pytest.mark.parametrize("width", [60, 200])
def test_one_setting_has_the_neighbours_and_verbose_all_rows_with_costs(width: int) -> None:
    rows = table(*reference(rt=0.99, gla=0.9, lstm=0.7, lru=0.6, transformer=0.3))
    own, costs = layer("mine", (0.5, 0.5), parameters=617, state=None), ["1.23k", "5", "5", "77"]
    text = printed(own, rows, width)
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["lru", "→", "transformer"]
    cells = ["0.500 (0.500–0.500)", "0.250 (0.250–0.250)"] if width == 200 else ["0.50 (0.50–0.50)"]
    assert cells_of(text, "→ mine") == [["→ mine", *cells, "5 of 6", "3", "1", "1"]]
    cost = "parameters 617 (0.5×), FLOPs a token 77 (1×), state unknown, time of a run 10 s"
    assert f"cost of mine (× the Transformer's): {cost} (train transformer beside it to compare)\n" in text

    whole = printed(own, rows, width, verbose=True)
    assert whole.endswith(text)
    of_rt = cells_of(whole.removesuffix(text), "rt")
    tokens, sequences = (0.985, 0.995), (0.4925, 0.4975)
    shown = [as_shown(tokens), as_shown(sequences)] if width == 200 else [as_shown(tokens, digits=2)]
    assert of_rt == [["rt", *shown, "1 of 6"], ["rt", *costs]]


def test_times_are_compared_where_both_were_trained_on_one_device() -> None:
    """Of reference rows that is known of a GPU alone."""
    for device, run in (("NVIDIA H200", "time of a run 20 s (2×)"), ("x86_64 CPU", "time of a run 20 s (train")):
        rows = table(*layer("transformer", (0.5, 0.5), device=device))
        assert run in printed(layer("mine", (0.5, 0.5), device=device, seconds=120.0), rows)
        own = [
            *layer("transformer", (0.5, 0.5), device=device),
            *layer("mine", (0.5, 0.5), device=device, seconds=120.0),
        ]
        assert "time of a run 20 s (2×)\n" in printed(own, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 600}, "steps 600 (theirs 20000)"),
        ({"width": 64, "mlp_width": 128}, "width 64 (theirs 128), mlp-width 128 (theirs 512)"),
        ({"task_config": {"length": 48, "eval_examples": 1280}}, "length 48 (theirs 40)"),
        ({"optimizer": {"beta1": 0.9, "beta2": 0.95}}, "beta2 0.95 (theirs 0.98)"),
        ({"lr": 2e-3}, "lr 0.002 (theirs 0.001)"),
        ({"seeds": 1}, "seeds 1 (theirs 2)"),
    ],
)
def test_where_nothing_is_comparable_a_line_names_the_differences(changes: dict[str, Any], reason: str) -> None:
    seeds = changes.pop("seeds", 2)
    own = layer("mine", (0.5, 0.6)[:seeds], **changes)
    line = f"\nno reference rows for mine on parity: {reason}: --preset full without these options has theirs\n"
    assert line in printed(own, table(*reference(rt=0.5)))
    assert "no reference rows" not in printed(own, None)


def test_tasks_without_reference_rows_share_a_line() -> None:
    own = [y for name in "abcdefgh" for y in layer("mine", (0.5, 0.6), task=f"mine:{name}")]
    text = printed(own, table(*reference(rt=0.5)))
    assert text.count("no reference rows for mine on mine:a, mine on mine:b") == text.count("there are none") == 1


def test_results_of_another_precision_or_another_device_are_comparable() -> None:
    own = layer("mine", (0.5, 0.6), precision="bfloat16", device="NVIDIA H200")
    assert "2nd of 2" in printed(own, table(*reference(rt=0.995)))


def test_a_study_with_more_points_and_seeds_is_ranked_as_without_them() -> None:
    """The rows have a grid of two points and two seeds; the third point and the third seeds are the best."""
    grid = {(1e-3, 0.0, 0): 0.5, (2e-3, 0.0, 0): 0.4}
    rows = table(*study({**grid, (1e-3, 0.0, 1): 0.5}, layer="rt", preset="full"))
    wide = {(1e-3, 0.0): (0.6, 0.7, 1.0), (2e-3, 0.0): (0.5, 0.9, 0.0), (5e-3, 0.0): (0.9, 0.9, 0.9)}
    own = study({(*at, seed): y for at, of in wide.items() for seed, y in enumerate(of)}, layer="mine")
    found = ranking(table(*own), rows).set_index("label").loc["mine"]
    assert (found["lr"], found["seeds"], found["rank"]) == (2e-3, [0, 1], 1)
    assert found["test.token_accuracy"] == pytest.approx(0.7)


def test_a_reference_row_has_a_label_of_its_own_and_the_setting_of_the_study() -> None:
    own = layer("rt", (0.5, 0.6), difficulty="custom")
    shown, reasons = beside(table(*own), table(*reference(rt=0.9, lstm=0.5)))
    assert reasons == []
    assert shown["label"].tolist() == ["rt", "rt (reference)", "lstm"]
    assert set(shown["setting"]) == {"parity (custom)"}


def test_over_several_tasks_layers_that_have_all_are_ranked_by_their_mean_rank() -> None:
    """``lru`` lacks a task, and ``gla`` diverged on one, so that they count in no mean rank."""
    means: dict[str, dict[str, float | None]] = {
        "parity": {"mine": 0.9, "rt": 0.8, "retnet": 0.7, "gla": 0.7, "lru": 1.0},
        "copying": {"mine": 0.1, "rt": 0.5, "retnet": 0.5, "gla": 0.5},
        "mqar": {"mine": 0.3, "rt": 0.2, "retnet": 0.1, "gla": None, "lru": 0.9},
    }
    found = [record(y, layer=name, task=task) for task, of in means.items() for name, y in of.items()]
    own, rows = ([one for one in found if (one.layer == "mine") == mine] for mine in (True, False))
    text = printed(own, table(*rows))
    assert "mine over 3 tasks: 1st of 3 by mean rank, 1.7; beside it " in text
    ranks = mean_ranks(ranking(table(*own), table(*rows)))
    assert ranks["parity"].to_dict() == {"rt": 2, "mine": 1, "retnet": 3}
    assert ranks["mean"].to_dict() == pytest.approx({"rt": 5.5 / 3, "mine": 5 / 3, "retnet": 7.5 / 3})
    assert ranks["place"].to_dict() == {"rt": 2, "mine": 1, "retnet": 3}
    two = [[one for one in part if one.task != "mqar"] for part in (own, rows)]
    assert "mean rank" not in printed(two[0], table(*two[1]))


def test_a_layer_is_ranked_among_the_shipped_rows_of_its_protocol_alone() -> None:
    """A block of 4, as if it was somebody's own, in both protocols; the variants of RT are not among the rows."""
    files = [REFERENCE / place / "rt-block-4" / "parity.jsonl" for place in ("", "quick")]
    own = [(file, replace(one, study=f"{one.study} mine", layer="mine")) for file, one in read_all(*files)]
    found = ranking(table_of(own), load("shipped", ["parity"]))
    groups = found.groupby("setting")
    rows = {"parity": REFERENCE, "parity (quick)": REFERENCE / "quick"}
    trained = {setting: [(of / name / "parity.jsonl").exists() for name in MIXERS] for setting, of in rows.items()}
    assert groups.size().to_dict() == {setting: 1 + sum(those) for setting, those in trained.items()}
    assert not found["label"].str.contains("block").any()
    assert load_rows(REFERENCE, ["quick"], [], ["parity"]).empty
