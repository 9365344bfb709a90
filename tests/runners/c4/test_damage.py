"""Damaged files of pretraining: each is named, and training continues from an earlier checkpoint where there is one."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4 import checkpoints, pretraining  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.curve import COLUMNS, read_curve  # noqa: E402
from runners.c4.evaluation import generate  # noqa: E402
from runners.files import DamagedFileError, read_json, write_json  # noqa: E402
from tests.runners.c4.runs import (  # noqa: E402
    ALONE,
    At,
    Interruption,
    configured,
    corpus_of,
    folder_of,
    interrupt,
    last_tensors,
    run,
)

pytestmark = pytest.mark.usefixtures("undrawn")
Damage = Callable[[Path], object]


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x01
    path.write_bytes(whole)


def flip_in_row(step: int) -> Damage:
    """Flip a byte in the row of a step."""

    def damage(folder: Path) -> None:
        path = folder / "curve.csv"
        start = sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[:step])
        flip(path, start + 12)

    return damage


def truncate_curve(rows: int) -> Damage:
    """Keep the first rows of a curve."""

    def damage(folder: Path) -> None:
        path = folder / "curve.csv"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: rows + 1]))

    return damage


def flip_newest(at: int) -> Damage:
    """Flip a byte of the newest checkpoint."""
    return lambda folder: flip(max((folder / "checkpoints").iterdir()), at)


def flip_file(name: str, at: int) -> Damage:
    return lambda folder: flip(folder / name, at)


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run with checkpoints of the steps 6 and 8."""
    config = configured(texts, tmp_path_factory.mktemp("finished"))
    run(config)
    return config


@pytest.fixture(scope="module")
def killed(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The same run, killed in step 7 with checkpoints of the steps 3 and 6."""
    config = configured(texts, tmp_path_factory.mktemp("killed"))
    with pytest.raises(Interruption):
        run(config, [At(7, interrupt)])
    return config


def damaged_copy(config: Config, out: Path, damage: Damage) -> tuple[Config, Path]:
    """Copy a results folder and damage its run; return the run's configuration and folder."""
    shutil.copytree(config.out, out, dirs_exist_ok=True)
    copied = replace(config, out=out)
    folder = folder_of(copied)
    damage(folder)
    return copied, folder


@pytest.mark.parametrize(
    "damage", [*map(flip_newest, (0, 30, 700, -5000, -1)), flip_in_row(5), truncate_curve(5), truncate_curve(3)]
)
def test_training_continues_from_the_earlier_checkpoint(
    damage: Damage, killed: Config, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = damaged_copy(killed, tmp_path, damage)
    result = run(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folder}/")
    assert " is damaged (" in line
    assert line.endswith("): the earlier checkpoint step-00000003.safetensors is used")
    assert result["loss"] == read_json(folder_of(finished) / "result.json")["loss"]
    assert len(read_curve(folder, 8)) == 8
    continued = last_tensors(config)
    for name, tensor in last_tensors(finished).items():
        assert torch.equal(continued[name], tensor), name


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((flip_in_row(step), "curve.csv") for step in (0, 1, 3)),
        (truncate_curve(2), "curve.csv"),
        (lambda folder: (folder / "curve.csv").unlink(), "curve.csv"),
        *((flip_file("run.json", at), "run.json") for at in (0, 50, 300, -12)),
    ],
)
def test_training_stops_where_nothing_intact_is_left(damage: Damage, name: str, killed: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(killed, tmp_path, damage)
    with pytest.raises(
        DamagedFileError, match=rf"^{folder / name} is damaged .*: delete .* run the same command again$"
    ):
        run(config)


def test_a_lost_curve_before_the_result_is_named(finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, lambda folder: (folder / "result.json").unlink())
    (folder / "curve.csv").unlink()
    with pytest.raises(
        DamagedFileError, match=rf"^{folder}/curve.csv is damaged \(rows are missing\): delete the folder"
    ):
        run(config)


@pytest.mark.parametrize("at", [3, 100, -20])
def test_a_damaged_result_is_refused(at: int, finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, flip_file("result.json", at))
    with pytest.raises(DamagedFileError, match=rf"^{folder}/result.json is damaged .*: delete it and run the same"):
        run(config)
    (folder / "result.json").unlink()
    assert run(config)["loss"] == read_json(folder_of(finished) / "result.json")["loss"]


@pytest.mark.parametrize("at", [0, 30, 700, -5000, -1])
def test_generate_uses_the_earlier_checkpoint(
    at: int, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = damaged_copy(finished, tmp_path, flip_newest(at))
    arguments = ["--device", "cpu", "--max-new-tokens", "2", "--prompt", "kan"]
    generate.main([str(folder), *arguments])
    assert capsys.readouterr().err.endswith(": the earlier checkpoint step-00000006.safetensors is used\n")

    # A file that is named has no earlier one.
    newest = folder / "checkpoints" / "step-00000008.safetensors"
    with pytest.raises(SystemExit) as stop:
        generate.main([str(newest), *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {newest} is damaged (")
    assert line.endswith("): delete it and the result.json of its run, and run the command of the training again")


@pytest.mark.parametrize("at", [0, 200, -10])
def test_a_damaged_tokenizer_is_refused_and_written_again(at: int, finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, flip_file("tokenizer.json", at))
    with pytest.raises(
        DamagedFileError, match=rf"^{folder}/tokenizer.json is damaged \(its checksum .*training again$"
    ):
        checkpoints.load_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "result.json").unlink()
    run(config)
    assert (folder / "tokenizer.json").read_bytes() == (folder_of(finished) / "tokenizer.json").read_bytes()
    checkpoints.load_model(folder)


@pytest.mark.parametrize("at", [0, 30, 300, -20])
def test_a_damaged_manifest_is_named(at: int, finished: Config, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path, dirs_exist_ok=True)
    config = replace(finished, out=tmp_path)
    path = corpus_of(config).folder / "manifest.json"
    flip(path, at)
    with pytest.raises(ValueError, match=rf"^{path} is damaged .*: delete the folder {path.parent} and run"):
        corpus_of(config)


def test_a_run_of_an_earlier_version_continues(killed: Config, finished: Config, tmp_path: Path) -> None:
    """Its curve and its description have no checksums."""

    def strip(folder: Path) -> None:
        rows = [line.rpartition(",")[0] + "\n" for line in (folder / "curve.csv").read_text().splitlines()]
        assert rows[0] == ",".join(COLUMNS) + "\n"
        (folder / "curve.csv").write_text("".join(rows))
        described = read_json(folder / "run.json")
        del described["corpus"][checkpoints.TOKENIZER_CHECKSUM]
        write_json(folder / "run.json", described)

    config, _ = damaged_copy(killed, tmp_path, strip)
    assert run(config)["loss"] == read_json(folder_of(finished) / "result.json")["loss"]


@pytest.mark.parametrize("damage", [flip_in_row(2), truncate_curve(7), lambda folder: (folder / "curve.csv").unlink()])
def test_a_damaged_curve_of_a_finished_run_is_left_out_of_the_chart(
    damage: Damage, finished: Config, tmp_path: Path
) -> None:
    config, folder = damaged_copy(finished, tmp_path, damage)
    console = Console(record=True, file=io.StringIO(), width=200)
    assert pretraining.run(config, {}, ALONE, console).chart.is_file()
    assert f"left out of the comparison: {folder.name}: {folder}/curve.csv is damaged (" in console.export_text()
    with pytest.raises(DamagedFileError, match=f"^{folder}/curve.csv is damaged"):
        read_curve(folder, config.steps)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"step": "all"}'])
@pytest.mark.parametrize("name", ["run.json", "result.json", "diverged.json", "downstream.json"])
def test_a_record_with_other_entries_is_refused(name: str, content: str, finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path / "out", lambda folder: (folder / name).write_text(content))
    if name == "diverged.json":
        (folder / "result.json").unlink()
    question = {"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(question))
    with pytest.raises(
        DamagedFileError, match=rf"^{folder / name} is damaged \((it holds no|\w+:) .*: delete it and run"
    ):
        run(replace(config, downstream=str(tmp_path)))


def test_the_run_of_another_program_does_not_stop_the_chart(finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, lambda folder: None)
    for name, content in (("a", "{}"), ("b", "null"), ("c", json.dumps({"corpus": 3}))):
        (folder.parent / name).mkdir()
        (folder.parent / name / "run.json").write_text(content)
    console = Console(record=True, file=io.StringIO(), width=200)
    assert pretraining.run(config, {}, ALONE, console).chart.is_file()
    lines = [line for line in console.export_text().splitlines() if line.startswith("left out of the comparison: ")]
    assert [line.split(": ")[1] for line in lines] == [*"abc"]


@pytest.mark.parametrize(
    ("damage", "steps"),
    [
        (lambda folder: None, 6),
        (flip_newest(-1), 3),
        (flip_newest(0), 3),
        (truncate_curve(5), 3),
        (truncate_curve(2), 0),
        (lambda folder: [path.write_bytes(b"") for path in (folder / "checkpoints").iterdir()], 0),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), 0),
        (lambda folder: (folder / "checkpoints" / "step-00000007.safetensors").symlink_to("deleted meanwhile"), 0),
    ],
)
def test_steps_done_are_those_that_are_not_trained_again(
    damage: Damage, steps: int, killed: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = damaged_copy(killed, tmp_path, damage)
    assert checkpoints.steps_done(folder) == steps
    assert capsys.readouterr() == ("", "")


def test_questions_are_not_answered_by_an_earlier_checkpoint(finished: Config, tmp_path: Path) -> None:
    config, _ = damaged_copy(finished, tmp_path / "out", flip_newest(-1))
    question = {"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(question))
    with pytest.raises(DamagedFileError, match=r"step-00000008.safetensors is damaged .* and the result.json"):
        run(replace(config, downstream=str(tmp_path)))
