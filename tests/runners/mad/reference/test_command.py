"""The command that trains missing reference results."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runners import records
from runners.mad import options, study
from runners.mad.options import PRESETS
from runners.mad.points import chosen, points
from runners.mad.reference import __main__ as command
from runners.mad.rows import ENTRIES, load_rows

SMALL = {"train_examples": 32, "eval_examples": 16}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset ``quick`` with few steps."""
    preset, tasks = PRESETS["quick"]
    few = replace(preset, steps=4, evaluations=2, width=16, mlp_width=16, device="cpu")
    monkeypatch.setitem(PRESETS, "quick", (few, {"parity": tasks["parity"] | SMALL, "mqar": tasks["mqar"] | SMALL}))


def run(folder: Path, *words: str) -> None:
    command.main(["--preset", "quick", "--folder", str(folder / "reference"), "--out", str(folder / "out"), *words])


@pytest.mark.usefixtures("tiny", "undrawn")
def test_a_missing_result_is_trained_once_and_stored_as_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "--layers", "rt-block-4", "--tasks", "parity")
    file = tmp_path / "reference" / "quick" / "rt-block-4" / "parity.jsonl"
    found = records.load(file)
    assert set(found["study"]) == {"rt-block-4 parity quick"}
    assert set(found["layer"]) == {"rt-block-4"}
    assert {config["block"] for config in found["mixer_config"]} == {4}
    assert found.groupby("lr").size().to_list() in ([1, 3], [3, 1])

    # Test figures and curves are those of the chosen point.
    best = found[found["test.token_accuracy"].notna()]
    assert best["seed"].tolist() == [0, 1, 2]
    assert [bool(curve) for curve in found["curve"]] == found["test.token_accuracy"].notna().to_list()
    assert best["curve"].iloc[0]["step"] == [2, 4]

    # What is there is not trained again.
    said = capsys.readouterr().out
    assert f"written: {file}" in said
    assert f"written: {file.parents[1] / 'overview.md'}" in said
    monkeypatch.setattr(command, "train_studies", None)
    run(tmp_path, "--layers", "rt-block-4", "--tasks", "parity")
    assert capsys.readouterr().out.startswith("1 of 1 results are in ")


@pytest.mark.usefixtures("undrawn")
def test_a_result_whose_largest_rate_is_chosen_gets_larger_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The points with all seeds are compared; the file has every run once."""
    few = replace(
        PRESETS["full"][0], lr=(1e-5, 5e-3), weight_decay=(0.0,), seeds=2, steps=24, evaluations=2, batch_size=16
    )
    few = replace(few, width=16, mlp_width=16, device="cpu")
    monkeypatch.setitem(PRESETS, "full", (few, {"memorization": {"train_examples": 64, "eval_examples": 64}}))
    places = ["--folder", str(tmp_path / "reference"), "--out", str(tmp_path / "out")]
    command.main(["--layers", "lstm", "--tasks", "memorization", *places])
    (row,) = chosen(points(load_rows(tmp_path / "reference", ["full"], [ENTRIES["lstm"]], ["memorization"]))).to_dict(
        "records"
    )
    found = records.load(tmp_path / "reference" / "lstm" / "memorization.jsonl")
    assert [lr for lr, _ in row["grid"]] == [1e-5, 5e-3, 1e-2, 2e-2]
    assert not found.duplicated(["lr", "seed"]).any()
    assert row["seeds"] == [0, 1]
    assert set(found["lr"][found["seed"] == 1]) >= {5e-3, row["lr"]}
    assert set(found["lr"][found["curve"].map(bool)]) == {row["lr"]}


@pytest.mark.usefixtures("undrawn")
def test_a_ladder_is_one_small_record_and_ones_own_layer_is_placed_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(PRESETS["profile"][0], lr=(1e-3, 1e-2), seeds=2, width=16, mlp_width=16, device="cpu")
    monkeypatch.setitem(PRESETS, "profile", (few, {"parity": SMALL}))
    monkeypatch.setattr(options, "ON_A_CPU", {"steps": 4, "batch_size": 16, "evaluations": 2})
    folder, out = tmp_path / "reference", tmp_path / "out"
    words = ["--layers", "lru", "gla", "--tasks", "parity", "--folder", str(folder), "--out", str(out)]
    command.main(["--preset", "profile", *words])

    # All runs of the ladder stand in one record.
    file = folder / "profile" / "lru" / "parity.jsonl"
    assert len(records.read_all(file)) == 1
    assert file.stat().st_size < 6_000
    columns = ["difficulty", "lr", "seed", "diverged_step", "validation.token_accuracy", "test.token_accuracy"]
    stored = load_rows(folder, ["profile"], [ENTRIES["lru"]], ["parity"])
    trained = records.load(out / "profile" / "studies")
    trained = trained[trained["mixer"] == "lru"]
    assert len(stored) == len(trained) >= 8
    found = [set(map(str, table[columns].to_dict("records"))) for table in (stored, trained)]
    assert found[0] == found[1]

    assert {path.stem for path in (folder / "profile").glob("*.png")} == {"overview", "ladders"}
    page = (folder / "profile" / "overview.md").read_text()
    assert re.search(r"\| `lru` \| 1 \| 1.5 \| 0.0\d\d \(.* \| 128 \|", page)
    assert re.search(r"## parity\n\n\| length \| 40 \| 64 ", page)
    capsys.readouterr()
    study("linear-attention", "parity", preset="profile", reference=str(folder), out=tmp_path / "own")
    assert "linear-attention: tier 1 of 1, with " in capsys.readouterr().out


@pytest.mark.usefixtures("tiny", "undrawn")
def test_an_error_in_a_result_is_one_line_and_the_others_are_trained(
    tmp_path: Path, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = command.train_studies

    def fail_on_parity(experiments: Any, *rest: Any) -> Any:
        if experiments[0].task == "parity":
            raise ValueError("broken")
        return train(experiments, *rest)

    monkeypatch.setattr(command, "train_studies", fail_on_parity)
    error = ended(run, tmp_path, "--layers", "lstm", "--tasks", "parity", "mqar", status=1)
    assert "lstm on parity stopped: broken" in error
    assert [file.name for file in tmp_path.rglob("*.jsonl")] == ["mqar.jsonl"]


@pytest.mark.usefixtures("tiny")
def test_the_dry_run_lists_what_is_missing_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--dry-run", "--layers", "lstm", "rt", "--tasks", "parity")
    said = capsys.readouterr().out
    assert said.startswith("0 of 2 results are in ")
    assert "lstm" in said
    assert "takes about" in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "rtt"), "rtt is no row of the reference results: choose from rt, transformer, "),
        (("--tasks", "mine:Task"), "mine:Task is no task of the reference results: choose from "),
    ],
)
def test_an_unknown_name_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *words)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
