"""Compiled code in the cache folder: built once, kept, and replaced if damaged."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from mixers.ops.cache import from_cache


def test_a_file_is_built_once_and_replaced_if_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []

    def build(path: Path) -> None:
        built.append(path.name)
        path.write_bytes(b"content")

    def load() -> bytes:
        return from_cache("name", ".code", build, Path.read_bytes)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [load(), load()] == [b"content"] * 2
    assert built == ["name.code"]
    (path,) = (tmp_path / "recurrent-transformer-diagnostics").iterdir()

    path.write_bytes(b"contenu")  # one bit
    assert load() == b"content"
    assert len(built) == 2
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == b"content"

    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # no folder can be made there
    assert load() == b"content"
    assert len(built) == 3


def test_another_name_is_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(path: Path) -> None:
        path.write_text(path.name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("a", "a-b", "b"):
        assert from_cache(name, ".code", build, Path.read_text) == f"{name}.code"


def test_threads_may_build_the_same_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    together, copy, copies = Barrier(4, timeout=60), shutil.copyfile, []

    def build(path: Path) -> None:
        together.wait()
        path.write_bytes(b"content")

    def watched(built: Path, beside: str) -> None:
        copies.append(beside)
        copy(built, beside)

    monkeypatch.setattr(shutil, "copyfile", watched)
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(from_cache, "name", ".code", build, Path.read_bytes) for _ in range(4)]
        assert [load.result() for load in loads] == [b"content"] * 4
    assert len({*copies}) == 4  # none writes to the file of another
    assert len([*(tmp_path / "recurrent-transformer-diagnostics").iterdir()]) == 1
