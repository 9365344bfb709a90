"""The record of a training: what is written is read back, as one table, and damage is found."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from runners import records
from runners.files import DamagedFileError
from runners.records import RECORD, Record

RT = Record(
    study="rt parity grid",
    layer="rt-block-4",
    mixer="rt",
    family="recurrent attention",
    mixer_config={"block": 4},
    width=128,
    mlp_width=512,
    layers=1,
    task="parity",
    task_config={"length": 40, "extrapolation_lengths": [80, 160]},
    preset="grid",
    fingerprint="c0ffee",
    batch_size=128,
    steps=20000,
    evaluations=40,
    optimizer={"beta1": 0.9},
    precision="bfloat16",
    lr=1e-3,
    weight_decay=0.1,
    seed=0,
    metrics={"validation": {"token_accuracy": 0.75, "loss": None}, "length-80": {"token_accuracy": 0.5}},
    curve={"step": [500, 1000], "train_loss": [0.7, None]},
    parameters=197120,
    state={"128": 32768},
    seconds=48.5,
    device="NVIDIA H200",
    versions={"triton": None},
)
"""A run on extrapolation sets whose training loss was once not finite."""


def test_a_run_has_a_record_once_it_is_finished(tmp_path: Path) -> None:
    assert records.read_all(tmp_path) == []
    records.write(tmp_path, RT)
    assert records.read_all(tmp_path) == [(tmp_path / RECORD, RT)]


def test_records_of_runs_and_of_shipped_tables_are_one_table(tmp_path: Path) -> None:
    own, diverged = tmp_path / "results" / "studies" / "s" / "lr0.001", replace(RT, seed=1, metrics={}, diverged_step=7)
    records.write(own, RT)
    records.write_all(tmp_path / "results" / "reference" / "rt" / "parity.jsonl", [replace(RT, seed=2), diverged])

    table = records.load(tmp_path / "results")
    assert list(table["seed"]) == [2, 1, 0]
    assert list(table["validation.token_accuracy"].dropna()) == [0.75, 0.75]
    assert table["length-80.token_accuracy"].isna().tolist() == [False, True, False]
    assert table["file"].iloc[-1] == own / RECORD
    assert {entry.name for entry in fields(Record)} <= set(table.columns)
    assert list(records.load(tmp_path / "results", own)["seed"]) == [2, 1, 0]
    (tmp_path / "none").mkdir()
    assert records.load(tmp_path / "none").empty
    with pytest.raises(FileNotFoundError, match="name files or folders"):
        records.load(tmp_path / "typo")


@pytest.mark.parametrize("change", [("0.75", "0.76"), ('"steps": 20000', '"steps": 20'), ("lr", "rl"), ("lr", "ü")])
@pytest.mark.parametrize("name", [RECORD, "table.jsonl"])
def test_a_changed_record_is_refused(name: str, change: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / name
    records.write_all(file, [RT]) if name.endswith("jsonl") else records.write(tmp_path, RT)
    file.write_bytes(file.read_text().replace(*change).encode("latin-1"))
    with pytest.raises(DamagedFileError, match=name):
        records.load(tmp_path)


def test_a_record_without_a_field_is_named(tmp_path: Path) -> None:
    content = {name: value for name, value in vars(RT).items() if name != "study"}
    records.write_lines(tmp_path / "old.jsonl", [content])
    with pytest.raises(DamagedFileError, match=r"study: field required"):
        records.load(tmp_path)
