"""The reference results in ``results/reference``: whole, of their protocols, and their overview."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from mixers import MIXERS, find_mixer
from mixers.base import Shape
from runners.files import DamagedFileError
from runners.mad.points import chosen, points
from runners.mad.reference.__main__ import ReferenceOptions
from runners.mad.reference.overview import DEPTHS, effective_depth, overview_page
from runners.mad.rows import ENTRIES, EQUAL_ALREADY, FIRST, LAYERS, PROFILED, ReferencePreset, load, load_rows
from runners.mad.tables import in_order
from runners.records import REFERENCE
from tasks import PUBLISHED

LRS = {"full": (1e-4, 5e-4, 1e-3, 2e-3, 5e-3), "quick": (2e-3, 5e-3)}
FURTHER = (1e-2, 2e-2)
"""Learning rates that a result also has if 5e-3 was chosen without them, below the ceiling."""
DECAYS = {"full": (0.0, 0.1), "quick": (0.0,)}
SEEDS = {"full": 5, "quick": 3}


@cache
def stored(preset: ReferencePreset) -> pd.DataFrame:
    return chosen(points(load_rows(REFERENCE, [preset], ENTRIES.values(), PUBLISHED)))


@pytest.mark.parametrize("preset", ["full", "quick"])
def test_every_result_is_of_the_whole_protocol(preset: ReferencePreset) -> None:
    """No result of fewer steps, points or seeds stands among the others."""
    found = stored(preset)
    assert not found.duplicated(["layer", "task"]).any()
    assert found["chosen"].all()
    for row in found.to_dict("records"):
        entry, config = ENTRIES[row["layer"]], PUBLISHED[row["task"]].Config()
        assert (row["mixer"], row["layers"], row["preset"]) == (entry.mixer, entry.layers, preset)
        defaults = vars(find_mixer(entry.mixer).Config())  # without a switch that is younger than the result
        assert json.dumps(defaults | row["mixer_config"]) == json.dumps(defaults | {**entry.options})
        rates = LRS[preset] + FURTHER * ((FURTHER[0], 0.0) in row["grid"])
        assert row["grid"] == tuple((lr, decay) for lr in rates for decay in DECAYS[preset])
        assert preset == "quick" or row["edge"] != "largest" or row["lr"] == FURTHER[-1]
        assert row["seeds"] == [*range(SEEDS[preset])]
        assert 0 <= row["test.sequence_accuracy"] <= row["test.token_accuracy"] <= 1
        if preset == "full":
            assert json.dumps(vars(config) | row["task_config"]) == json.dumps(vars(config))
            assert (row["steps"], row["width"]) == (200 * -(-config.train_examples // 128), 128)
        else:
            assert (row["steps"], row["width"], row["batch_size"]) == (1000, 64, 16)


@pytest.mark.parametrize("preset", ["full", "quick"])
def test_the_stored_overview_is_that_of_the_stored_results(preset: ReferencePreset) -> None:
    found = stored(preset)
    page = overview_page(in_order(found.assign(label=found["layer"], setting=found["task"])), preset)
    assert page == (REFERENCE / ("" if preset == "full" else preset) / "overview.md").read_text(encoding="utf-8")


def test_every_registered_layer_has_a_row() -> None:
    assert {entry.name for entry in LAYERS} == set(MIXERS)
    assert [*ENTRIES][:2] == ["rt", "transformer"]
    for entry in ENTRIES.values():
        assert {*entry.options} <= {*vars(find_mixer(entry.mixer).Config())}


def test_layers_at_equal_parameters_are_those_that_have_others_at_equal_width() -> None:
    given = ReferenceOptions(preset="profile")
    for name in FIRST[2:]:
        entry = PROFILED.get(f"{name}-equal-params", replace(PROFILED[name], sizes={"match": "params"}))
        (_, (first, *_)) = given.study(entry, "parity")
        assert (first.shape == Shape(width=64, mlp_width=256)) == (name in EQUAL_ALREADY), name
    assert {entry.mixer for entry in PROFILED.values() if "match" in entry.sizes} == {*FIRST} - {*EQUAL_ALREADY}


@pytest.mark.parametrize(
    ("accuracies", "sequence", "depth"),
    [
        ((0.9, 0.3, 0.5, 0.89, 0.3), 0.1, "3"),
        ((0.9, 0.3, 0.5, 0.87, 0.91), 0.1, "4"),
        ((0.9, 0.3, 0.5, 0.87, 0.95), 0.1, "between 3 and 4"),
        ((0.9, 0.95, 0.0, 0.0, 0.0), 0.1, "less than 1"),
        ((0.9, 0.3, 0.4, 0.5, 0.6), 0.1, "more than 4"),
        ((0.11, 0.05, 0.11, 0.0, 0.0), 0.0, "neither solves it"),  # layers that learn nothing are not worth each other
        ((0.9, 0.3, 0.5), 0.1, "not run yet"),
    ],
)
def test_effective_depth_is_the_first_depth_whose_interval_overlaps_that_of_rt(
    accuracies: tuple[float, ...], sequence: float, depth: str
) -> None:
    """Of RT and Transformers with 1, 2, … layers, whose intervals reach 0.01 to both sides."""
    means = dict(zip(("rt", *DEPTHS), accuracies, strict=False))
    cells = {
        (name, "parity"): {"low": y - 0.01, "high": y + 0.01, "test.sequence_accuracy": sequence}
        for name, y in means.items()
    }
    assert effective_depth(cells, "parity") == depth


def test_what_has_no_file_is_not_run_yet_and_ranked_nowhere() -> None:
    full = stored("full")
    complete = (full[full["layer"].isin(MIXERS)]["layer"].value_counts() == len(PUBLISHED)).sum()
    found = full.assign(label=full["layer"], setting=full["task"])
    page = overview_page(found[(found["layer"] != "gla") | (found["task"] == "parity")], "full")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    (gla,) = (row for row in rows if row[0] == "`gla`")
    assert gla == ["`gla`", "1 of 10 tasks", *("–" if task == "parity" else "not run yet" for task in PUBLISHED)]
    assert [row[0] for row in rows].index("`gla`") >= complete - 1


def test_stacks_stand_beside_layers_of_equal_depth() -> None:
    full = stored("full")
    deep = full[full["layer"] == "transformer-2-layers"].assign(layer="deltanet+transformer")
    found = pd.concat([full, deep])
    page = overview_page(found.assign(label=found["layer"], setting=found["task"]), "full")
    rows = [line.strip("| ").split(" | ")[:2] for line in page.partition("## Stacks")[2].splitlines()]
    assert [row for row in rows if row[0].startswith("`")] == [
        ["`transformer-2-layers`", "2"],
        ["`deltanet+transformer`", "2"],
        ["`transformer-4-layers`", "4"],
    ]


def test_reference_rows_are_shipped_none_or_of_a_folder(tmp_path: Path) -> None:
    assert load("none", ["parity"]) is None
    shipped, nothing = load("shipped", ["parity", "mine:Task"]), load(str(tmp_path), ["parity"])
    assert {"rt", "transformer"} <= {*shipped["layer"][shipped["layers"] == 1]} <= set(MIXERS)
    assert {f"transformer-{n}-layers" for n in (2, 3, 4)} <= {*shipped["layer"]}
    assert set(shipped["task"]) == {"parity"}
    assert nothing.empty
    with pytest.raises(ValueError, match="is no folder: give shipped, none, or a folder"):
        load(str(tmp_path / "gone"), ["parity"])

    (tmp_path / "rt").mkdir()
    (tmp_path / "rt" / "parity.jsonl").write_text('{"format": 1')
    with pytest.raises(DamagedFileError, match=r"parity\.jsonl is damaged \(line 1"):
        load(str(tmp_path), ["parity"])
