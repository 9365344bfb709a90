"""The options of a preset with those of the caller, and the tokenizer that belongs to the data."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from runners.c4 import __main__ as command
from runners.c4.config import Config
from runners.c4.data.tokenizer import file_beside
from runners.c4.presets import configure, with_tokenizer


def folder(path: Path, tokenizer: str) -> str:
    """A folder as ``convert`` makes it, with this content in place of a tokenizer."""
    file_beside(path).parent.mkdir(parents=True)
    file_beside(path).write_text(tokenizer)
    (path / "c4-train.json.gz").touch()
    return str(path)


def chosen(*data: str, given: tuple[str, ...] = ()) -> str:
    return with_tokenizer(replace(Config(), data=data), given).tokenizer


def test_lists_and_paths_take_the_form_of_their_options(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (entry,) = os.scandir(tmp_path)  # a path that is no ``Path``
    config = configure("tiny", {"data": [Path("a"), "b"], "tokenizer": Path("t"), "out": entry, "wandb_tags": ["c"]})
    assert (config.data, config.tokenizer, config.wandb_tags) == (("a", "b"), "t", ("c",))
    assert config.out == tmp_path / "results"


def test_the_tokenizer_made_with_the_data_is_taken_unless_one_is_given(tmp_path: Path) -> None:
    one, same = (folder(tmp_path / name, "a") for name in ("one", "same"))
    own = str(file_beside(Path(one)))
    assert chosen(one) == chosen(f"{one}/c4-train.json.gz") == chosen(one, same) == own
    assert chosen(one, given=("lr", "tokenizer")) == chosen() == chosen(str(tmp_path)) == Config().tokenizer


def test_a_folder_of_that_name_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("tokenizer"), "a")
    config, _ = command.read(["--preset", "tiny", "--data", "tokenizer"])
    assert config.tokenizer == str(file_beside(Path("tokenizer")))
    config, _ = command.read(["--preset=tiny", "--data=tokenizer", "--tokenizer=some-one/some-thing"])
    assert config.tokenizer == "some-one/some-thing"


def test_different_tokenizers_are_an_error(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", "a"), folder(tmp_path / "other", "b")
    with pytest.raises(
        ValueError, match=r"different tokenizers, .*one/tok.*json and .*other/tok.*json: give --tokeniz"
    ):
        chosen(one, other)
