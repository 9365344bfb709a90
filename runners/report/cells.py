"""The cells of the leaderboards: a layer on a task, from the reference results and given studies.

There are two boards. All cells of a board were trained under the same protocol, except a user's own cells, which list
the options in which they differ.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mixers.registry import find_mixer
from runners.mad.experiment import Described
from runners.mad.plan import plan_experiments
from runners.mad.reference.cells import Cell as StoredCell
from runners.mad.reference.cells import CellPoint, Content, ProtocolName, options_of, protocol_folder, read_cells
from runners.mad.reference.entries import ENTRIES
from runners.mad.reference.rows import Terms, to_standings
from runners.mad.results.ranking import MARK
from runners.mad.results.standings import Standing
from tasks import TASKS
from tasks.base import Task

Kind = Literal["layer", "variant", "own"]
METRICS = ("sequence", "token")
YOURS = " (yours)"
"""End of the label of a user's own study."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layer on a task.

    Attributes:
        row: label of the layer.
        kind: a registered layer with its defaults, a variant of a registered layer, or a user's own study.
        standing: accuracies, limits and costs.
        content: settings and figures.
        differs: options that a training under the board's protocol would need in addition.
        stale: whether it was trained on other data, or by code that trains differently from today's code.
        command: command that trains it; empty for a layer of a script or notebook, which has none.
        record: file that contains it.
        diagnosis: content of ``diagnosis.json``, if there is one.
    """

    row: str
    kind: Kind
    standing: Standing
    content: Content
    differs: tuple[str, ...] = ()
    stale: bool = False
    command: str
    record: Path
    diagnosis: Mapping[str, Any] | None = None

    @property
    def is_ranked(self) -> bool:
        """Whether it counts in ranks: no variant, no cell of other settings, and none that a user has trained again."""
        again = self.kind == "own" and self.row.removesuffix(YOURS) in ENTRIES
        return self.kind != "variant" and not self.differs and not again

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.standing.task

    @property
    def short(self) -> bool:
        """Whether its number of steps differs from the board's protocol."""
        return any(option.startswith("--steps") for option in self.differs)

    def values(self, metric: str) -> list[float]:
        """Return the test accuracies of the seeds; none if every grid point diverged."""
        found: list[float] = getattr(self.content.test, f"{metric}_accuracy")
        return found


@dataclass(frozen=True, kw_only=True)
class Board:
    """A leaderboard.

    Attributes:
        name: key in the page.
        title: title for readers.
        protocol: description of the training of its cells.
        warning: limits of its figures that a reader must know.
        rows: kind and family of each row by label, including rows without a cell.
        cells: cells by row and task.
    """

    name: str
    title: str
    protocol: str
    warning: str = ""
    rows: dict[str, tuple[Kind, str]]
    cells: dict[tuple[str, str], Cell]

    @property
    def trained(self) -> int:
        """Number of cells of the protocol that are trained."""
        return sum(cell.kind != "own" for cell in self.cells.values())

    @property
    def expected(self) -> int:
        """Number of cells of the protocol, trained or not."""
        return sum(kind != "own" for kind, _ in self.rows.values()) * len(TASKS)


def reference_board(folder: Path, protocol: ProtocolName, own: Sequence[Cell]) -> Board:
    """Return the board of a protocol of the reference results, with a user's own cells of the same tasks.

    Args:
        folder: folder of the reference results.
        protocol: full or quick.
        own: cells of the user's studies whose task settings are those of this protocol.
    """
    cells_folder = protocol_folder(folder, protocol)
    contents = [content for task in TASKS for content in read_cells(cells_folder, ENTRIES.values(), task)]
    cells = [
        _reference_cell(content, standing, cells_folder, protocol)
        for content, standing in zip(contents, to_standings(contents), strict=True)
    ]

    rows: dict[str, tuple[Kind, str]] = {cell.row: ("own", cell.standing.family) for cell in own}
    for entry in ENTRIES.values():
        rows[entry.name] = ("layer" if entry.name == entry.mixer else "variant", find_mixer(entry.mixer).family)

    full = protocol == "full"
    return Board(
        name="published" if full else "quick",
        title="published protocol" if full else "quick preset",
        protocol=_describe(protocol),
        warning="" if full else "Small settings for a laptop. This is not the published protocol.",
        rows=rows,
        cells={(cell.row, cell.task): cell for cell in (*own, *cells)},
    )


@cache
def protocol_settings(task: str, protocol: ProtocolName) -> Described:
    """Return the settings of a protocol's cells of a task, those of the Transformer for a layer."""
    (experiment,) = plan_experiments(options_of(ENTRIES["transformer"], task, protocol), {}, {})
    return experiment.described


@cache
def protocol_terms(task: str, protocol: ProtocolName) -> Terms:
    """Return the terms of a protocol's cells of a task."""
    options = options_of(ENTRIES["transformer"], task, protocol)
    seeds = [*range(options.seeds)]
    points = [CellPoint(lr=run.lr, weight_decay=run.weight_decay, seeds=seeds) for run in options.runs]
    return Terms.of(protocol_settings(task, protocol), points)


@cache
def _positions(task: str, config: str) -> int:
    return int(task_of(task, json.loads(config)).split("train").inputs_ST.shape[1])


def task_of(name: str, settings: Mapping[str, Any]) -> Task:
    """Return a task with settings from a JSON file."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    kind = TASKS[name]
    return kind(kind.Config(**plain))


def training_flops(cell: Cell) -> float | None:
    """Return the FLOPs of training one run: three forward passes of the layer per token of each step."""
    flops = cell.standing.costs.flops_per_token
    if not flops:
        return None
    positions = _positions(cell.task, json.dumps(cell.content.task_config))
    return 3.0 * flops[min(flops)] * cell.content.steps * cell.content.protocol.batch_size * positions


def _describe(protocol: ProtocolName) -> str:
    """Return a description of a protocol, made from its options."""
    options = options_of(ENTRIES["transformer"], "parity", protocol)
    length = f"{options.steps:,} steps" if options.steps else f"{options.epochs or 200} epochs"
    lrs = ", ".join(f"{lr:g}" for lr in sorted({run.lr for run in options.runs}))
    decays = " and ".join(f"{decay:g}" for decay in sorted({run.weight_decay for run in options.runs}))
    return (
        f"Width {options.width}, MLP {options.mlp_width}, {length} in batches of {options.batch_size} sequences, "
        f"learning rates {lrs}, weight decay {decays}; {options.seeds} seeds of the point chosen on validation."
    )


def _reference_cell(content: StoredCell, standing: Standing, folder: Path, protocol: ProtocolName) -> Cell:
    """Return a stored cell."""
    name, task = content.layer, content.task
    preset = "" if protocol == "full" else f" --preset {protocol}"
    return Cell(
        row=name,
        kind="layer" if name == content.mixer else "variant",
        standing=replace(standing, mixer=name),
        content=content,
        stale=standing.mixer.endswith(MARK),
        command=f"python -m runners.mad.reference{preset} --layers {name} --tasks {task}",
        record=folder / name / f"{task}.json",
    )


def limits(board: Board, task: str) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return ceiling and chance of a task, from a cell of the protocol; None without one."""
    for cell in board.cells.values():
        if cell.task == task and not cell.differs:
            return asdict(cell.standing.ceiling), asdict(cell.standing.chance)
    return None
