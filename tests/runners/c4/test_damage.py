"""Damaged files of pretraining: each is named, and training continues from an earlier checkpoint where there is one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")


from runners.c4.config import Config  # noqa: E402
from runners.c4.evaluation import generate  # noqa: E402
from runners.c4.export import load_model  # noqa: E402
from runners.files import DamagedFileError  # noqa: E402
from runners.records import RECORD  # noqa: E402
from tests.runners.c4.runs import (  # noqa: E402
    At,
    Interruption,
    configured,
    folder_of,
    interrupt,
    last_tensors,
    run,
)

Damage = Callable[[Path], object]


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x01
    path.write_bytes(whole)


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
        run(config, At(7, interrupt))
    return config


def damaged_copy(config: Config, out: Path, damage: Damage) -> tuple[Config, Path]:
    """Copy a results folder and damage its run; return the run's configuration and folder."""
    shutil.copytree(config.out, out, dirs_exist_ok=True)
    copied = replace(config, out=out)
    folder = folder_of(copied)
    damage(folder)
    return copied, folder


@pytest.mark.parametrize("damage", [*map(flip_newest, (0, 30, 700, -5000, -1))])
def test_training_continues_from_the_earlier_checkpoint(
    damage: Damage, killed: Config, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = damaged_copy(killed, tmp_path, damage)
    record = run(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folder}/")
    assert " is damaged (" in line
    assert line.endswith("): the earlier checkpoint step-00000003.safetensors is used")
    assert record.metrics == run(finished).metrics
    assert len((folder / "curve.csv").read_text().splitlines()) == 9
    continued = last_tensors(config)
    for name, tensor in last_tensors(finished).items():
        assert torch.equal(continued[name], tensor), name


@pytest.mark.parametrize("name", ["run.json", RECORD])
def test_a_damaged_description_or_record_is_named(name: str, finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, flip_file(name, 100))
    if name != RECORD:
        (folder / RECORD).unlink()
    with pytest.raises(DamagedFileError, match=rf"^{folder / name} is damaged .*: delete .* run the same command"):
        run(config)


@pytest.mark.parametrize("at", [0, 30, 700, -5000, -1])
def test_generate_uses_the_earlier_checkpoint(
    at: int, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: Callable[..., str]
) -> None:
    _, folder = damaged_copy(finished, tmp_path, flip_newest(at))
    arguments = ["--device", "cpu", "--max-new-tokens", "2", "--prompt", "kan"]
    generate.main([str(folder), *arguments])
    assert capsys.readouterr().err.endswith(": the earlier checkpoint step-00000006.safetensors is used\n")

    # A file that is named has no earlier one.
    newest = folder / "checkpoints" / "step-00000008.safetensors"
    error = ended(generate.main, [str(newest), *arguments])
    assert error.startswith(f"error: {newest} is damaged (")
    assert error.endswith("): delete it and run the same command again\n")


@pytest.mark.parametrize("at", [0, 200, -10])
def test_a_damaged_tokenizer_is_refused_and_written_again(at: int, finished: Config, tmp_path: Path) -> None:
    config, folder = damaged_copy(finished, tmp_path, flip_file("tokenizer.json", at))
    with pytest.raises(
        DamagedFileError, match=rf"^{folder}/tokenizer.json is damaged \(its checksum .*training again$"
    ):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / RECORD).unlink()
    run(config)
    assert (folder / "tokenizer.json").read_bytes() == (folder_of(finished) / "tokenizer.json").read_bytes()
    load_model(folder)


def test_questions_are_not_answered_by_an_earlier_checkpoint(finished: Config, tmp_path: Path) -> None:
    config, _ = damaged_copy(finished, tmp_path / "out", flip_newest(-1))
    question = {"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(question))
    with pytest.raises(DamagedFileError, match=r"step-00000008.safetensors is damaged"):
        run(replace(config, downstream=str(tmp_path)))
