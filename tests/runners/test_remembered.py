"""The files of facts that processes share."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from runners.remembered import remembered

WRITERS = 8


def test_facts_that_are_found_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Each writer has read the file before any of them writes it."""
    file, found = tmp_path / "cache" / "facts.json", Barrier(WRITERS)

    def find(places: Sequence[int]) -> list[str]:
        found.wait()
        return ["a fact"] * len(places)

    keys = [f"key {writer}" for writer in range(WRITERS)]
    with ThreadPoolExecutor(WRITERS) as pool:
        facts = [*pool.map(lambda key: remembered(file, str, [key], find), keys)]
    assert facts == [["a fact"]] * WRITERS
    assert remembered(file, str, keys, lambda places: ["lost"] * len(places)) == ["a fact"] * WRITERS
