"""Processes on several machines, here threads with a group of their own, and the results folder that they see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runners.c4.distributed import World
from runners.c4.shared_folder import require_shared

SIZE = 3


def outcomes(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``require_shared`` raises in each process, each with its folder."""
    meeting, here, sent = threading.Barrier(SIZE, timeout=30), threading.local(), [None] * SIZE

    def broadcast(values: list[Any]) -> None:
        if here.rank == 0:
            sent[0] = values[0]
        meeting.wait()
        values[0] = sent[0]
        meeting.wait()

    def gather(values: list[Any], mine: Any) -> None:
        sent[here.rank] = mine
        meeting.wait()
        values[:] = sent
        meeting.wait()

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "barrier", meeting.wait)

    def process(rank: int) -> str:
        here.rank = rank
        try:
            require_shared(folders[rank], World(rank=rank, size=SIZE, device=torch.device("cpu")))
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(process, range(SIZE)))


def test_one_folder_for_all_passes_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes([tmp_path / "out"] * SIZE, monkeypatch) == [""] * SIZE
    assert list((tmp_path / "out").iterdir()) == []


def test_a_process_with_another_folder_ends_all_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, alone = tmp_path / "out", tmp_path / "other"
    alone.mkdir()
    for error in outcomes([shared, alone, shared], monkeypatch):
        assert "is not one folder for all: process 1 on " in error
        assert "process 2" not in error
    assert [*shared.iterdir(), *alone.iterdir()] == []


def test_a_process_alone_writes_nothing(tmp_path: Path) -> None:
    require_shared(tmp_path / "out", World(rank=0, size=1, device=torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []
