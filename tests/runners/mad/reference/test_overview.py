"""The overview of the reference results: ranking, effective depth, blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from runners.mad.reference import __main__ as command
from runners.mad.reference import rows
from runners.mad.reference.cells import (
    FOLDER,
    ProtocolName,
    cell_file,
    protocol_folder,
    read_cell,
    read_cells,
    write_cell,
)
from runners.mad.reference.entries import ENTRIES
from runners.mad.reference.overview import block_table, depth_table, effective_depth, overview_page, ranking_table
from runners.mad.results.standings import Standing
from runners.mad.results.summary import Estimate
from tasks import TASKS
from tests.runners.mad.results.test_ranking import standing

DEPTHS = {1: "transformer", 2: "transformer-2-layers", 3: "transformer-3-layers", 4: "transformer-4-layers"}


def cells_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table below its headings."""
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def of_depths(task: str, rt: float, *transformers: float) -> dict[tuple[str, str], Standing]:
    """Made-up standings of RT and of Transformers with 1, 2, … layers."""
    found = {(DEPTHS[n], task): standing(DEPTHS[n], mean, 0.01) for n, mean in enumerate(transformers, 1)}
    return {("rt", task): standing("rt", rt, 0.02), **found}


def with_sequences(standing: Standing, mean: float) -> Standing:
    """The standing with another accuracy by whole sequences."""
    assert standing.test is not None
    return replace(standing, test={**standing.test, "test_sequence_accuracy": Estimate(mean=mean, half_width=0.0)})


@pytest.mark.parametrize(
    ("accuracies", "depth"),
    [
        ((0.9, 0.3, 0.5, 0.89), "3"),
        ((0.9, 0.3, 0.5, 0.86, 0.95), "4"),
        ((0.9, 0.95), "1"),
        ((0.9, 0.3, 0.4, 0.5, 0.6), "more than 4"),
        ((0.9, 0.3, 0.5), "not run yet"),
    ],
)
def test_effective_depth_is_the_first_depth_whose_interval_reaches_that_of_rt(
    accuracies: tuple[float, ...], depth: str
) -> None:
    assert effective_depth(of_depths("parity", *accuracies), "parity") == depth


def test_a_task_of_which_neither_answers_a_sequence_has_no_effective_depth() -> None:
    """Equal accuracies of layers that learn nothing do not make them worth each other."""
    place = (DEPTHS[2], "parity")
    some = of_depths("parity", 0.11, 0.05, 0.11)
    assert effective_depth(some, "parity") == "2"

    nothing = {place: with_sequences(found, 0.0) for place, found in some.items()}
    assert effective_depth(nothing, "parity") == "neither solves it"
    assert effective_depth(nothing | {place: with_sequences(some[place], 1e-4)}, "parity") == "2"

    ahead = of_depths("parity", 0.5, 0.1, 0.1, 0.1, 0.1)
    assert effective_depth(ahead, "parity") == "more than 4"
    nothing = {place: with_sequences(found, 0.0) for place, found in ahead.items()}
    assert effective_depth(nothing, "parity") == "neither solves it"
    assert effective_depth(nothing | {("rt", "parity"): ahead["rt", "parity"]}, "parity") == "more than 4"

    diverged = {place: replace(found, test=None) for place, found in ahead.items()}
    assert effective_depth(diverged, "parity") == "neither solves it"
    assert effective_depth(diverged | {(DEPTHS[1], "parity"): ahead[DEPTHS[1], "parity"]}, "parity") == "1"


def test_what_has_no_file_is_not_run_yet() -> None:
    found = of_depths("parity", 0.9, 0.95)
    assert effective_depth(found, "mqar") == "not run yet"
    depths = {row[0]: row[1:] for row in cells_of(depth_table(found))}
    assert list(depths) == list(TASKS)
    assert depths["parity"] == ["0.9000 ± 0.0200", "0.9500 ± 0.0100", *["not run yet"] * 3, "1"]
    assert depths["mqar"] == ["not run yet"] * 6

    found["rt-block-4", "parity"] = standing("rt-block-4 (stale)", 0.7, 0.1)
    blocks = {row[0]: row[1:] for row in cells_of(block_table(found))}
    assert blocks["parity"] == ["0.9000 ± 0.0200", "0.7000 ± 0.1000 (stale)", "not run yet"]
    assert blocks["mqar"] == ["not run yet"] * 3


def test_complete_layers_are_ranked_among_themselves_and_the_others_stand_below() -> None:
    found = {("gla", task): standing("gla", 0.5) for task in TASKS}
    found |= {("lstm", task): standing("lstm", 0.75 if task == "mqar" else 0.5) for task in TASKS}
    found |= {("rt", task): standing("rt", 0.6) for task in ("parity", "mqar")}
    found |= {("lru", task): standing("lru", 0.55) for task in ("parity", "mqar", "copying")}
    found |= {("rt-block-4", task): standing("rt-block-4", 1.0) for task in TASKS}
    table, absent = ranking_table(found).split("\n\n")
    assert table.startswith("| layer | mean rank | ")
    rows = {row[0]: row[1:] for row in cells_of(table)}
    assert list(rows) == ["lstm", "gla", "lru", "rt"]
    assert [row[0] for row in rows.values()] == ["1.0", "1.1", "3 of 10 tasks", "2 of 10 tasks"]
    of_tasks = {task: [row[1 + n] for row in rows.values()] for n, task in enumerate(TASKS)}
    assert of_tasks["mqar"] == ["1", "2", "2", "2"]  # below the LSTM, above GLA
    assert of_tasks["parity"] == ["1", "1", "1", "1"]
    assert of_tasks["copying"] == ["1", "1", "1", "not run yet"]
    assert "`mamba`" in absent
    assert "`gla`" not in absent


def test_without_a_complete_layer_there_are_no_ranks() -> None:
    found = {("rt", "parity"): standing("rt", 0.6), ("gla", "parity"): standing("gla (stale)", 0.5)}
    rows = {row[0]: row[1:] for row in cells_of(ranking_table(found).partition("\n\n")[0])}
    parity = 1 + list(TASKS).index("parity")
    assert {name: (row[0], row[parity]) for name, row in rows.items()} == {
        "rt": ("1 of 10 tasks", "–"),
        "gla": ("1 of 10 tasks", "– (stale)"),
    }


def test_a_single_complete_layer_is_not_ranked() -> None:
    """The report needs two, too."""
    found = {("rt", task): standing("rt", 0.6) for task in TASKS} | {("gla", "parity"): standing("gla", 0.5)}
    rows = {row[0]: row[1:] for row in cells_of(ranking_table(found).partition("\n\n")[0])}
    assert rows["rt"] == ["10 of 10 tasks", *["–"] * len(TASKS)]
    assert rows["gla"][0] == "1 of 10 tasks"
    assert set(rows["gla"][1:]) == {"–", "not run yet"}


@pytest.mark.parametrize("preset", ["full", "quick"])
def test_the_stored_overview_is_that_of_the_stored_cells(preset: ProtocolName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False for _ in cells])
    folder = protocol_folder(FOLDER, preset)
    cells = [cell for task in TASKS for cell in read_cells(folder, ENTRIES.values(), task)]
    found = {(cell.layer, cell.task): s for cell, s in zip(cells, rows.to_standings(cells), strict=True)}
    words = "" if preset == "full" else " --preset quick"
    assert (folder / "overview.md").read_text() == overview_page(found, f"python -m runners.mad.reference{words}")


def test_the_command_writes_the_overview_of_the_files_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [cell.task == "parity" for cell in cells])
    command.main(["--overview", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())
    for name in ("rt", "transformer"):
        for task in ("parity", "mqar"):
            write_cell(tmp_path, ENTRIES[name], task, read_cell(cell_file(FOLDER, ENTRIES[name], task)))
    capsys.readouterr()
    nowhere = cell_file(tmp_path, ENTRIES["rt"], "parity") / "studies"  # below a file, where nothing can be written
    command.main(["--overview", "--folder", str(tmp_path), "--out", str(nowhere)])
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [f"written: {tmp_path / name}" for name in ("overview.png", "overview.md")]
    text = (tmp_path / "overview.md").read_text()
    assert "– (stale) |" in text
    assert "Stale: trained on other data" in text
    assert "`python -m runners.mad.reference`" in text
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")
