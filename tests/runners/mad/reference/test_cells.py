"""Cells of the reference results: what they hold, and when they are stale."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mixers import MIXERS
from runners.files import read_json
from runners.mad.plan import plan_experiments
from runners.mad.reference import __main__ as command
from runners.mad.reference.cells import cell_file, options_of, train_cell, write_cell
from runners.mad.reference.entries import ENTRIES, FIRST, Entry

ENTRY = Entry(name="rt-block-2", mixer="rt", options={"heads": 2, "block": 2})
TINY = {"steps": 2, "evaluations": 2, "width": 16, "mlp_width": 16, "device": "cpu"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cell trained for two steps, and its file."""
    folder = tmp_path_factory.mktemp("reference")
    options = options_of(ENTRY, "memorization", out=folder / "out", lr=(1e-3, 5e-3), weight_decay=(0.0,), **TINY)
    content = train_cell(ENTRY, "memorization", options, Console(file=io.StringIO()))
    return write_cell(folder, ENTRY, "memorization", content), content


def test_a_cell_holds_one_value_a_seed_of_the_chosen_point(cell: tuple[Path, dict[str, Any]]) -> None:
    path, content = cell
    assert read_json(path) == json.loads(json.dumps(content))
    assert path.parts[-2:] == ("rt-block-2", "memorization.json")
    assert content["seeds"] == [0, 1, 2, 3, 4]
    assert content["grid"] == [1e-3, 5e-3]
    assert content["steps"] == 2
    for values in content["test"].values():
        assert len(values) == 5
    points = content["points"]
    assert [len(point["seeds"]) for point in points] == [5 if i == content["chosen"] else 1 for i in range(2)]
    assert [len(curve) for curve in content["curves"]] == [2] * 5
    assert [row[0] for row in content["curves"][0]] == [1, 2]


def test_variants_are_planned_under_both_protocols() -> None:
    for protocol, steps, width in (("full", None, 128), ("quick", 1000, 64)):
        for name, layers, block in (("rt-block-4", 1, 4), ("transformer-3-layers", 3, None)):
            entry = ENTRIES[name]
            options = options_of(entry, "parity", protocol)  # type: ignore[arg-type]
            (experiment,) = plan_experiments(options, dict(entry.options), {})
            assert (experiment.shape.width, experiment.shape.layers) == (width, layers)
            assert getattr(experiment.mixer_config, "block", None) == block
            assert experiment.protocol.steps == steps
            assert experiment.difficulty == ("quick" if protocol == "quick" else "baseline")


def test_every_registered_layer_has_a_row_and_the_first_ones_come_first() -> None:
    names = list(ENTRIES)
    assert set(MIXERS) <= set(names)
    assert names[:2] == list(FIRST[:2])
    assert [name for name in names if name in FIRST] == list(FIRST)


def test_the_dry_run_lists_what_is_missing(
    cell: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, content = cell
    write_cell(tmp_path, ENTRIES["rt"], "parity", content)
    assert cell_file(tmp_path, ENTRIES["rt"], "parity").exists()
    command.main(["--layers", "rt", "--tasks", "parity", "mqar", "--folder", str(tmp_path), "--dry-run"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 of 2 cells are in ")
    assert said[1:] == ["missing: rt on mqar"]
    command.main(["--layers", "rt", "--tasks", "parity", "--preset", "quick", "--folder", str(tmp_path), "--dry-run"])
    assert capsys.readouterr().out.splitlines() == [
        f"0 of 1 cells are in {tmp_path / 'quick'}",
        "missing: rt on parity",
    ]


def test_unknown_names_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--layers", "nope"], "no row 'nope'"), (["--tasks", "nope"], "no task 'nope'")):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert message in capsys.readouterr().err
