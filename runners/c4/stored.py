"""The runs in a results folder: their descriptions, curves and ends, and labels that tell them apart."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from json import dumps
from pathlib import Path
from typing import Any

from mixers.registry import variant_label
from runners.c4.curve import Row, read_curve
from runners.c4.identity import INCIDENTAL
from runners.c4.records import REHEARSAL, read_record
from runners.files import DamagedFileError

ALIKE = 0.95
"""Share of the validation tokens of one run that another has at least if their losses are compared."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run in a results folder, finished or not.

    Attributes:
        folder: folder of its files.
        described: its description (``runners.c4.identity.describe_run``).
        codes: hashes of code that is known to train as its code did, that one included.
        rows: its curve.
        result: its result; None if it is not finished.
        diverged_at: step at which it diverged; None if it did not.
    """

    folder: Path
    described: dict[str, Any]
    codes: frozenset[str]
    rows: list[Row]
    result: dict[str, Any] | None
    diverged_at: int | None

    @property
    def name(self) -> str:
        """Name of its folder, which identifies its configuration and its corpus."""
        return self.folder.name

    @property
    def corpus(self) -> str:
        """Name of the folder of its corpus."""
        return str(self.described["corpus"].get("folder"))

    @property
    def validation_tokens(self) -> int:
        """Number of tokens that an evaluation reads, whole sequences of the first in the validation split."""
        return int(self.described["config"]["validation_tokens"])

    def is_comparable(self, other: "StoredRun") -> bool:
        """Whether both losses are those of the same text, but for a last sequence that does not fit."""
        fewer, more = sorted((self.validation_tokens, other.validation_tokens))
        return self.corpus == other.corpus and fewer >= ALIKE * more

    @property
    def last(self) -> Row | None:
        """The last row with a validation loss; None if there is none yet."""
        return next((row for row in reversed(self.rows) if row.validation_loss is not None), None)


def stored_runs(folders: Iterable[Path], say: Callable[[str], None]) -> list[StoredRun]:
    """Read the runs in folders.

    Args:
        folders: folders of runs; those without a ``run.json``, whose run has not begun, are left out.
        say: prints a line for each run that is left out because a file of it is damaged.
    """
    runs = []
    for folder in folders:
        try:
            described = read_record(folder / "run.json")
            if described is None:
                continue
            names = "result.json", "diverged.json", REHEARSAL
            result, diverged, rehearsed = (read_record(folder / name) for name in names)

            # A finished run has one row per step.
            rows = read_curve(folder, None if result is None else result["step"])
        except DamagedFileError as error:
            say(f"left out of the comparison: {folder.name}: {error}")
            continue
        diverged_at = None if diverged is None or result is not None else diverged["step"]
        runs.append(
            StoredRun(
                folder=folder,
                described=described,
                codes=frozenset([described["code"], *(rehearsed or {"codes": []})["codes"]]),
                rows=rows,
                result=result,
                diverged_at=diverged_at,
            )
        )
    return runs


def curves_of(runs: Iterable[StoredRun]) -> dict[str, list[list[Row]]]:
    """Return the curves of runs by their labels; those that differ in the seed alone share one."""
    groups = that_differ_in_the_seed(runs)
    labels = labels_of({group[0].name: group[0].described for group in groups}, ignored=["seed"])
    return {labels[group[0].name]: [run.rows for run in group] for group in groups}


def that_differ_in_the_seed(runs: Iterable[StoredRun]) -> list[list[StoredRun]]:
    """Group runs whose settings differ in the seed alone, and whose code trains in the same way."""
    groups: list[list[StoredRun]] = []
    for run in runs:
        alike = [g for g in groups if _setting(g[0]) == _setting(run) and any(run.codes & other.codes for other in g)]
        if not alike:
            groups.append([run])
            continue

        # A run may be known to train as the runs of several groups do.
        first, *others = alike
        first += [*chain(*others), run]
        groups = [group for group in groups if all(group is not other for other in others)]
    return groups


def _setting(run: StoredRun) -> str:
    """Return the settings of a run but for the seed."""
    left_out = {*INCIDENTAL, "seed"}
    config = {name: value for name, value in run.described["config"].items() if name not in left_out}
    return dumps([config, run.described["mixer_options"]], sort_keys=True)


def labels_of(runs: Mapping[str, dict[str, Any]], ignored: Collection[str] = (), alike: bool = False) -> dict[str, str]:
    """Return a label for each run: its layer with the options that were set, and the settings in which runs differ.

    Args:
        runs: descriptions (``describe_run``) by name, which stands for the label where labels are equal.
        ignored: settings that labels do not name.
        alike: whether runs that differ in these alone share a label; else their names stand for it.
    """
    left_out = {*INCIDENTAL, "mixer", *ignored}
    settings = {name: run["config"].items() for name, run in runs.items()}
    each = {name: {key: y for key, y in items if key not in left_out} for name, items in settings.items()}
    keys = dict.fromkeys(key for values in each.values() for key in values)
    differing = [key for key in keys if len({repr(values.get(key)) for values in each.values()}) > 1]

    labels = {}
    for name, run in runs.items():
        words = [variant_label(run["config"]["mixer"], run["mixer_options"], 1)]
        for key in differing:
            if (value := each[name].get(key)) is not None:  # None stands for what follows from other settings
                words.append(f"{key.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}")
        labels[name] = ", ".join(words)
    times = Counter(labels.values())
    return {name: label if alike or times[label] == 1 else name for name, label in labels.items()}
