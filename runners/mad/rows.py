"""Rows of the reference results: every layer on every task under the reference protocol, and in two other presets.

A file ``results/reference/<row>/<task>.jsonl`` holds the records of a row on a task: all grid points with seed 0, and
the chosen point with more seeds, test figures and curves. Those of ``quick`` are in the folder of that name, and those
of ``profile``, one record for the whole ladder of the task (``packed``), in that of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from mixers import MIXERS
from mixers.named import members_of
from runners import records
from runners.files import rounded
from runners.mad.points import POINT
from runners.records import Record

OF_A_RUNG = (
    *("study", "difficulty", "lr", "seed", "diverged_step", "metrics", "ceiling", "chance"),
    *("seconds", "together"),
)
"""Fields in which the runs of a ladder differ."""
ReferencePreset = Literal["full", "quick", "profile"]
"""Presets of the reference results."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the reference results.

    Attributes:
        name: name of the row and of its folder.
        mixer: registered name of the layer, or a stack of such layers.
        options: settings of the layer that differ from its defaults.
        layers: stacked layers.
        sizes: options of the command that differ from the preset's: widths, or ``match``.
        tasks: tasks on which it is trained; empty for all.
    """

    name: str
    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()


FIRST = (
    *("rt", "transformer", "deltanet", "gated-deltanet", "rwkv7", "mamba2", "mamba", "gla", "hyena", "lstm"),
    *("staircase", "sliding-attention"),
)
"""Layers that are trained first, in this order; the others follow."""

VARIANTS = (
    # The paper's trade of depth for speed (conclusion, "blocking").
    Entry(name="rt-block-4", mixer="rt", options={"block": 4}),
    Entry(name="rt-block-16", mixer="rt", options={"block": 16}),
    # The paper's ablation of the norm on persistent pairs.
    Entry(name="rt-no-persistent-norm", mixer="rt", options={"persistent_norm": False}),
    # Effective depth: how many Transformer layers one RT layer is worth.
    Entry(name="transformer-2-layers", mixer="transformer", layers=2),
    Entry(name="transformer-3-layers", mixer="transformer", layers=3),
    Entry(name="transformer-4-layers", mixer="transformer", layers=4),
)

STACKS = tuple(
    Entry(name=name, mixer=name, layers=len(members_of(name)))
    for name in (
        *("transformer+rt", "2*rt"),
        *("deltanet+transformer", "2*deltanet"),
        *("mamba2+transformer", "2*mamba2"),
        *("3*gated-deltanet+transformer", "4*gated-deltanet"),
        *("3*kda+transformer", "4*kda"),
    )
    if MIXERS.keys() >= {*members_of(name)}
)
"""Stacks of different layers, each before its first layer in equal depth; two and four Transformer layers are above."""

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        *(Entry(name=name, mixer=name) for name in FIRST[:2]),
        *VARIANTS,
        *(Entry(name=name, mixer=name) for name in (*FIRST[2:], *(name for name in MIXERS if name not in FIRST))),
        *STACKS,
    )
}
"""All rows by name, in the order in which they are trained."""
AGAINST_STATE, WIDTHS = ("mqar", "copying"), (32, 128, 256)
"""Abilities whose capacity is measured against the size of the state, and the widths beside that of the preset."""
EQUAL_ALREADY = ("rt", "transformer", "deltanet", "staircase", "sliding-attention")
"""Layers with the parameters of the Transformer at equal width, within the tolerance of ``--match``."""
PROFILED = ENTRIES | {
    entry.name: entry
    for entry in (
        *(
            Entry(name=f"{name}-equal-params", mixer=name, sizes={"match": "params"})
            for name in FIRST
            if name not in EQUAL_ALREADY
        ),
        *(
            Entry(
                name=f"{name}-width-{size}",
                mixer=name,
                sizes={"width": size, "mlp_width": 4 * size},
                tasks=AGAINST_STATE,
            )
            for name in FIRST
            for size in WIDTHS
        ),
    )
}
"""All rows of the profiles: those above, and the layers that are trained first at other sizes."""
LAYERS = tuple(ENTRIES[name] for name in ENTRIES if name in MIXERS)
"""The rows of the registered layers with their defaults."""
RANKED = tuple(entry for entry in ENTRIES.values() if not entry.options)
"""The rows among which one's own layers are ranked, those of equal depth."""


def file_of(folder: Path, preset: ReferencePreset, entry: Entry, task: str) -> Path:
    """Return the file of a row on a task, in the folder of all reference results."""
    return (folder if preset == "full" else folder / preset) / entry.name.replace("*", "x") / f"{task}.jsonl"


def load(name: str, tasks: Iterable[str]) -> pd.DataFrame | None:
    """Return the records among which one's own are ranked: of all layers and stacks with their defaults, on some tasks.

    Args:
        name: ``shipped``, ``none`` or a folder of reference results.
        tasks: names of tasks; those of one's own have no records.

    Returns:
        The table of records as ``runners.records.load`` returns it; None for ``none``.

    Raises:
        ValueError: there is no such folder.
        DamagedFileError: a file is damaged.
    """
    if name == "none":
        return None
    folder = records.REFERENCE if name == "shipped" else Path(name)
    if not name or (name != "shipped" and not folder.is_dir()):
        raise ValueError(f"--reference {name} is no folder: give shipped, none, or a folder of reference results")
    return load_rows(folder, ("full", "quick"), RANKED, tasks)


def load_rows(
    folder: Path, presets: Iterable[ReferencePreset], entries: Iterable[Entry], tasks: Iterable[str]
) -> pd.DataFrame:
    """Return the table of the records of rows on tasks, as far as they are there, in the order of tasks and rows.

    It has the column ``candidate``, as ``with_candidates`` adds it.

    Raises:
        DamagedFileError: a file is damaged.
    """
    entries, presets = list(entries), list(presets)
    files = [file_of(folder, preset, entry, task) for task in tasks for preset in presets for entry in entries]
    found = records.read_all(*(file for file in files if file.exists()))
    return with_candidates(records.table_of([(file, run) for file, record in found for run in unpacked(record)]))


def packed(runs: Sequence[Record]) -> Record:
    """Return the runs of a ladder as one small record, with what differs between them in its ``settings``."""
    rows = []
    for run in runs:
        found = {
            split: {"token_accuracy": figures["token_accuracy"]}
            for split, figures in run.metrics.items()
            if split in ("validation", "test")
        }
        rows.append({**vars(run), "metrics": found, "seconds": rounded(run.seconds)})
    return replace(runs[0], metrics={}, settings={name: [row[name] for row in rows] for name in OF_A_RUNG})


def unpacked(record: Record) -> list[Record]:
    """Return the runs of a record that ``packed`` made; of another one, the record."""
    if not record.settings:
        return [record]
    rows = zip(*record.settings.values(), strict=True)
    return [replace(record, settings={}, **dict(zip(record.settings, row, strict=True))) for row in rows]


def with_candidates(table: pd.DataFrame) -> pd.DataFrame:
    """Return records with the column ``candidate``, which marks the points with the most seeds of their study.

    The first seed decides which points get more seeds, but not between them.
    """
    seeds = table.groupby(POINT)["seed"].transform("size")
    return table.assign(candidate=seeds == seeds.groupby(table["study"]).transform("max"))
