"""Files that are read back: flipped bytes are refused, and files of earlier versions are read."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runners.files import (
    DamagedFileError,
    clear_leftovers,
    load_info,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)

CONTENT = {"study": "rt é", "loss": 0.125, "seeds": [0, 1], "curve": [{"step": 1, "loss": None}], "done": True}
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "c": torch.ones(3, dtype=torch.bfloat16)}


def damaged(path: Path) -> Iterator[int]:
    """Flip each byte of a file in three ways, one at a time, and cut it off at some; yield the place."""
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bits in (0x01, 0x10, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
            yield at
        if at % 16 == 0:
            path.write_bytes(whole[:at])
            yield at
    path.write_bytes(whole)


def is_refused(read: Callable[[Path], Any], path: Path) -> bool:
    try:
        read(path)
    except DamagedFileError as error:
        message = str(error)
    else:
        return False

    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("): delete it and run the same command again")
    return True


def test_each_damage_of_a_json_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, CONTENT)
    passed = {at for at in damaged(path) if not is_refused(read_json, path)}
    assert not passed
    assert read_json(path) == CONTENT


def test_each_damage_of_a_tensor_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, TENSORS, CONTENT)
    passed = {at for at in damaged(path) if not is_refused(load_tensors, path)}
    assert not passed
    tensors, info = load_tensors(path)
    assert info == load_info(path) == CONTENT
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_the_description_of_tensors_is_checked_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_tensors(path, TENSORS, {"step": 1234})
    path.write_bytes(path.read_bytes().replace(b"1234", b"1235"))
    assert is_refused(load_info, path)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    """Those of earlier versions."""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(CONTENT, indent=2))
    assert read_json(path) == CONTENT
    save_file(TENSORS, tmp_path / "old.safetensors", {"info": json.dumps(CONTENT)})
    tensors, info = load_tensors(tmp_path / "old.safetensors")
    assert info == load_info(tmp_path / "old.safetensors") == CONTENT
    assert torch.equal(tensors["a.weight"], TENSORS["a.weight"])


def test_what_killed_processes_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Whatever they were writing. What is young may be a living process's; hidden files of others are none of ours."""
    left, others = [".unfinished-a.png", ".unfinished-b", ".tmpAbCdEf"], [".a-b.json", ".ipynb_checkpoints", ".lock"]
    (tmp_path / left[1]).mkdir()
    (tmp_path / left[1] / "half").touch()
    (tmp_path / others[1]).mkdir()
    for name in (*left, *others):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".unfinished-young.json").touch()

    write_json(tmp_path / "a.json", {})
    assert {path.name for path in tmp_path.iterdir()} == {*others, "a.json", ".unfinished-young.json"}
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "a.json"}
