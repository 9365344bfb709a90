"""Settings of the C library for trainings on a CPU."""

import ctypes
import platform
from types import SimpleNamespace

import pytest

from runners.device import keep_freed_memory

GIB, MIB = 1 << 30, 1 << 20
TRIM, MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in glibc's malloc.h


@pytest.mark.parametrize(
    ("largest", "calls"),
    [(GIB, [(MMAP, GIB), (TRIM, GIB)]), (32 * MIB, [(MMAP, GIB), (MMAP, 32 * MIB), (TRIM, GIB)])],
    ids=["new", "old"],
)
def test_freed_memory_is_kept_by_all_versions_of_glibc(
    largest: int, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def mallopt(setting: int, value: int) -> int:
        made.append((setting, value))
        return int(setting == TRIM or value <= largest)

    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory.__wrapped__()
    assert made == calls


def test_other_c_libraries_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("opened"))
    keep_freed_memory.__wrapped__()
