"""Options that all benchmarks have, and how a benchmark reads its command line."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from runners.cli import check_out, cli
from runners.device import find_devices
from runners.guidance import flag_of

LEAST_REPEATS = 5


class CommonOptions(Protocol):
    """Options of every benchmark."""

    @property
    def repeats(self) -> int:
        """Repeats of each figure."""

    @property
    def limit(self) -> float:
        """Seconds. A cell is skipped if one eager pass takes longer."""

    @property
    def budget(self) -> float:
        """Seconds. Once they are spent, only cells that take less than a second altogether are timed."""

    @property
    def device(self) -> str:
        """Device: auto, cpu or cuda."""

    @property
    def out(self) -> Path:
        """Folder of results."""


def parse_options(
    options_class: type,
    presets: Mapping[str, Any],
    arguments: Sequence[str],
    several: Sequence[str],
    counts: Sequence[str],
) -> tuple[Any, torch.device]:
    """Read a command line.

    Args:
        options_class: a dataclass that has ``CommonOptions``.
        presets: defaults by type of device.
        arguments: the command line.
        several: options that need at least one value.
        counts: options whose values must be at least 1.

    Returns:
        The options, with the defaults of the device, and the device.

    Raises:
        ValueError: an option does not fit; the message says what to do.
    """
    # The defaults depend on the device, so read that option first.
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--device", nargs="?", default="auto")
    device = find_devices(peek.parse_known_args(arguments)[0].device or "auto")[0]

    options = cli(options_class, presets[device.type], arguments)

    _check_values(options, several, counts)
    check_out(options.out)
    return options, device


def check_names(chosen: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError unless all chosen implementations are known."""
    if lacking := [name for name in chosen if name not in known]:
        raise ValueError(f"no implementation {lacking[0]!r} on this device: choose from {', '.join(known)}")


def _check_values(options: Any, several: Sequence[str], counts: Sequence[str]) -> None:
    """Raise ValueError for a missing value or one out of range; arguments as ``parse_options``."""
    for name in several:
        if not getattr(options, name):
            raise ValueError(f"{flag_of(name)} is missing: give at least one value")

    for name in counts:
        values = getattr(options, name)
        if bad := [v for v in (values if isinstance(values, tuple) else (values,)) if v is not None and v < 1]:
            raise ValueError(f"{flag_of(name)} {bad[0]} must be at least 1")

    if options.repeats < LEAST_REPEATS:
        raise ValueError(f"--repeats {options.repeats} must be at least {LEAST_REPEATS}")

    for name in ("limit", "budget"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name} {getattr(options, name)} must be a number of seconds above 0")
