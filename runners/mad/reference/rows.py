"""Reference rows for comparison with a user's own studies: which cells are comparable, and how they are shown.

A cell and a study are comparable if they share task and data, model (widths and number of layers), training (steps,
batch, evaluations, optimizer), grid and number of seeds. Precision may differ, so that studies on a laptop have
reference rows, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from mixers import MIXERS
from runners.guidance import flag_of
from runners.mad.experiment import Described
from runners.mad.options import GRIDS, PRESETS, Options
from runners.mad.reference.cells import FOLDER, PROTOCOLS, Cell, CellPoint, protocol_folder, read_cells
from runners.mad.reference.entries import LAYERS
from runners.mad.reference.staleness import find_stale
from runners.mad.results.ranking import MARK, print_ranks
from runners.mad.results.standings import Standing, as_trained
from runners.mad.results.summary import Estimate, Point, Summary, means_beyond_training, under_grid
from tasks import TASKS

STALE = "stale: trained on other data, or by code that trains differently from today's"
TASK_SETTINGS = "the task's own settings"
"""Named among the options with which a study has reference rows, because it is the absence of options."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The settings that results must share to be comparable.

    Attributes:
        task: registered name.
        task_config: settings of the task.
        shape: widths and number of layers.
        steps: optimizer steps.
        training: batch size, evaluations, optimizer.
        points: learning rate and weight decay of each grid point.
        seeds: number of runs of the chosen point.
    """

    task: str
    task_config: dict[str, Any]
    shape: dict[str, int]
    steps: int
    training: dict[str, Any]
    points: list[tuple[float, float]]
    seeds: int

    @staticmethod
    def of(settings: Described | Cell, points: Sequence[Point | CellPoint]) -> "Terms":
        """Return the terms of a study or a cell.

        Args:
            settings: ``config`` of the study, or the cell.
            points: the grid points.
        """
        training = asdict(settings.protocol)
        return Terms(
            task=settings.task,
            task_config=settings.task_config,
            shape=asdict(settings.shape),
            steps=settings.protocol.total_steps(settings.task_config["train_examples"]),
            training={name: value for name, value in training.items() if name not in ("epochs", "steps")},
            points=sorted((point.lr, point.weight_decay) for point in points),
            seeds=max((len(point.seeds) for point in points), default=0),
        )

    def missing_options(self, other: "Terms") -> list[str]:
        """Return the options with which results with the terms ``other`` would have these terms."""
        found = [] if self.task_config == other.task_config else [TASK_SETTINGS]
        found += [_option(name, n) for name, n in self.shape.items() if n != other.shape[name]]
        found += [_option("steps", self.steps)] if self.steps != other.steps else []
        found += [_option(name, value) for name, value in self.training.items() if value != other.training[name]]

        # The preset replaces default values only. Where others were given, beside it or not, each needs its option.
        default, full = ((_points_of(options), options.seeds) for options in (PRESETS["grid"][0], PRESETS["full"][0]))
        if (self.points, self.seeds) == full and (other.points, other.seeds) == default:
            return [*found, "--preset full"]
        (lrs, decays), (other_lrs, other_decays) = map(_axes, (self.points, other.points))
        if lrs != other_lrs:
            found.append("--grid wide" if lrs == sorted(GRIDS["wide"]) else _option("lr", _words(lrs)))
        found += [_option("weight_decay", _words(decays))] if decays != other_decays else []
        found += [f"--seeds {self.seeds} --seeds-of chosen"] if self.seeds != other.seeds else []
        return found


def _points_of(options: Options) -> list[tuple[float, float]]:
    return sorted({(run.lr, run.weight_decay) for run in options.runs})


def _axes(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Return the learning rates and the weight decays of grid points."""
    return [sorted(set(values)) for values in zip(*points, strict=True)]


def _words(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The user's own layers in one setting, and the reference rows beside them.

    Attributes:
        own: the user's own layers.
        rows: reference rows; empty if no row is comparable.
        reason: what the user can do to get rows, if there are none.
        narrowed: those of the own layers whose studies have more grid points or seeds than the rows; here they stand
            with what they would have shown without these.
    """

    own: list[Standing]
    rows: list[Standing]
    reason: str | None = None
    narrowed: list[Standing] = field(default_factory=list)


def reference_folder(name: str) -> Path | None:
    """Return the folder that ``--reference`` names; None for ``none``.

    Raises:
        ValueError: there is no such folder.
    """
    if name == "none":
        return None
    folder = FOLDER if name == "shipped" else Path(name)
    if name != "shipped" and not folder.is_dir():
        raise ValueError(f"--reference {name} is no folder: give shipped, none, or a folder of reference results")
    return folder


def check_rows(folder: Path, tasks: Iterable[str]) -> None:
    """Read the reference results on tasks once, before anything is trained.

    Raises:
        DamagedFileError: a file is damaged, or holds no reference result.
    """
    for task in tasks:
        for name in PROTOCOLS:
            read_cells(protocol_folder(folder, name), LAYERS, task)


def terms_of(summary: Summary) -> Terms:
    """Return the terms of a finished study."""
    return Terms.of(summary.config, summary.points)


def rankings(summaries: Sequence[Summary], standings: Sequence[Standing], folder: Path) -> list[Ranking]:
    """Find the reference rows for finished studies; studies of equal terms share a ranking.

    A study with more grid points or seeds than the rows is shown as it would be without these. A study whose runs all
    diverged shares a ranking with the first study of equal terms but for the number of seeds.

    Args:
        summaries: the studies.
        standings: as what each of them is shown.
        folder: of the reference results.
    """
    cells_of = {summary.config.task: _cells(folder, summary.config.task) for summary in summaries}
    shown, narrowed = [], []
    for summary, standing in zip(summaries, standings, strict=True):
        narrow = _narrowed(summary, cells_of[summary.config.task])
        if narrow is not None:
            named = {name: getattr(standing, name) for name in ("mixer", "difficulty", "place")}
            standing = replace(Standing.of(narrow), **named)
            narrowed.append(standing)
        shown.append((narrow or summary, standing))

    groups: list[tuple[Terms, list[tuple[Summary, Standing]]]] = []
    compared = [terms_of(summary) for summary, _ in shown if summary.chosen is not None]
    for summary, standing in shown:
        terms = terms_of(summary)
        if summary.chosen is None:
            terms = next((other for other in compared if replace(other, seeds=terms.seeds) == terms), terms)
        group = next((members for known, members in groups if known == terms), None)
        if group is None:
            groups.append((terms, group := []))
        group.append((summary, standing))
    found = [_comparable(terms, members, *cells_of[terms.task]) for terms, members in groups]
    rows = iter(to_standings([cell for cells, _ in found for cell in cells]))

    # A chart has one row for each label.
    labels = {standing.mixer for standing in standings}
    made = []
    for (_, members), (cells, reason) in zip(groups, found, strict=True):
        own = [standing for _, standing in members]
        beside = [_apart(replace(row, difficulty=own[0].difficulty), labels) for row in islice(rows, len(cells))]
        fewer = [s for s in own if any(s is other for other in narrowed)]
        made.append(Ranking(own=own, rows=beside, reason=reason, narrowed=fewer))
    return made


def _cells(folder: Path, task: str) -> tuple[list[Cell], list[Cell]]:
    """Return the reference results on a task, of the full and of the quick protocol."""
    full, quick = (read_cells(protocol_folder(folder, name), LAYERS, task) for name in PROTOCOLS)
    return full, quick


def _narrowed(summary: Summary, cells: Sequence[Sequence[Cell]]) -> Summary | None:
    """Return what a study would show with the grid and the seeds of the reference rows; None if that is not known.

    It is None, too, if the study has these, or if rows differ from it in more than grid and seeds.
    """
    own = terms_of(summary)
    known = [Terms.of(cell, cell.points) for of_protocol in cells for cell in of_protocol[:1]]
    if own in known:
        return None
    alike = (terms for terms in known if replace(terms, points=own.points, seeds=own.seeds) == own)
    return next((found for terms in alike if (found := under_grid(summary, terms.points, terms.seeds))), None)


def _apart(row: Standing, labels: set[str]) -> Standing:
    """Return a reference row with a label that differs from those of the user's own layers, also if it is stale."""
    label = row.mixer.removesuffix(MARK)
    stale = row.mixer.removeprefix(label)
    return replace(row, mixer=f"{label} (reference){stale}") if label in labels else row


def _comparable(
    terms: Terms, members: Sequence[tuple[Summary, Standing]], full: list[Cell], quick: list[Cell]
) -> tuple[list[Cell], str | None]:
    """Return the cells that may stand beside studies of equal terms; where no cell may, what would give some.

    ``full`` and ``quick`` are the cells on the task.
    """
    # If every point diverged, none was chosen to be repeated with more seeds, and their number says nothing.
    diverged = all(summary.chosen is None for summary, _ in members)

    def of_cell(cell: Cell) -> Terms:
        found = Terms.of(cell, cell.points)
        return replace(found, seeds=terms.seeds) if diverged else found

    if cells := [cell for cell in (*full, *quick) if of_cell(cell) == terms]:
        # One's own training of a reference row takes its place.
        again = {summary.fingerprint for summary, _ in members}
        return [cell for cell in cells if cell.fingerprint not in again], None

    if terms.task not in TASKS:
        return [], "no reference result is on a task of your own; layers that a command names together are compared"

    # Nothing of the protocol is trained.
    preset = members[0][0].config.preset
    if not full or (preset == "quick" and not quick):
        wanted = " --preset quick" if preset == "quick" else ""
        return [], f"python -m runners.mad.reference{wanted} --tasks {terms.task} trains them"

    # Suggest the options of the cells that need the fewest changes.
    lacking = [of_cell(cell).missing_options(terms) for cell in (*full[:1], *quick[:1])]
    needed = min(lacking, key=len)
    if preset != "quick" and quick and needed is lacking[-1] and TASK_SETTINGS in needed:  # they are the preset's
        return [], "reference rows need --preset quick, with the settings of its tasks"
    others = ", or --preset quick" if quick and needed is lacking[0] else ""
    wanted = " ".join(needed).replace(f"{TASK_SETTINGS} ", f"{TASK_SETTINGS} and ")
    return [], f"reference rows need {wanted}{others}"


def to_standings(cells: Sequence[Cell]) -> list[Standing]:
    """Return the standings of cells, named after their rows; stale cells are marked."""
    return [_standing(cell, stale) for cell, stale in zip(cells, find_stale(cells), strict=True)]


def _standing(cell: Cell, stale: bool) -> Standing:
    values = {f"test_{name}": found for name, found in vars(cell.test).items()}
    names = list(MIXERS)
    point = cell.chosen_point
    chosen = None if point is None else (point.lr, point.weight_decay)
    return Standing(
        mixer=cell.layer + (MARK if stale else ""),
        family=cell.family,
        remark=cell.remark,
        task=cell.task,
        difficulty="baseline" if cell.preset is None else cell.preset,
        test=None if cell.chosen is None else {n: Estimate.of(found) for n, found in values.items() if found},
        seeds=len(cell.seeds),
        diverged=0 if point is None else len(point.diverged),
        ceiling=cell.ceiling,
        chance=cell.chance,
        costs=cell.costs,
        preset=cell.preset,
        steps=cell.steps,
        extrapolation={} if cell.chosen is None else means_beyond_training(cell.probes),
        trained=as_trained(cell.mixer, vars(MIXERS[cell.mixer].Config()) | cell.options, cell.shape, chosen),
        place=((names.index(cell.mixer), cell.mixer), -1),
    )


def shown_together(standings: list[Standing], found: Sequence[Ranking]) -> tuple[list[Standing], list[Standing]]:
    """Return the user's own layers and the reference rows for a chart of both.

    Args:
        standings: the user's own layers, for where there are no rankings.
        found: their rankings.
    """
    own = [s for ranking in found for s in ranking.own]
    return own or standings, [row for ranking in found for row in ranking.rows]


def print_rankings(found: Sequence[Ranking], console: Console) -> None:
    """Print the rankings with their sentences; settings without reference rows get one line per reason."""
    if ranked := [([*ranking.own, *ranking.rows], ranking.own) for ranking in found if ranking.rows]:
        print_ranks(ranked, console)
    if any(MARK in row.mixer for ranking in found for row in ranking.rows):
        console.print(STALE)

    for ranking in found:
        for s in ranking.narrowed:
            console.print(
                f"{s.mixer} on {s.setting} is ranked with the grid and seeds of the reference rows", soft_wrap=True
            )
    reasons = dict.fromkeys(ranking.reason for ranking in found if ranking.reason is not None)
    for reason in reasons:
        lacking = [ranking.own for ranking in found if ranking.reason == reason]
        settings = ", ".join(dict.fromkeys(own[0].setting for own in lacking))
        layers = ", ".join(dict.fromkeys(s.mixer for own in lacking for s in own))
        where = f"{layers} on {settings}" if len(reasons) > 1 else settings
        console.print(f"no reference rows for {where}: {reason}", soft_wrap=True)


def _option(name: str, value: Any) -> str:
    """Return a setting as an option of the command line."""
    return f"{flag_of(name)} {value}"
