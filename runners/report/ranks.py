"""Mean ranks of layers with bootstrap intervals.

Mean ranks are comparable only among layers with the same tasks. Layers that are trained on all tasks are therefore
ranked among themselves, over all tasks. A layer that lacks tasks has no mean rank. ``runners.mad.reference.overview``
has the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from runners.mad.results.ranking import DIGITS, places
from runners.report.cells import Board, Cell
from tasks import TASKS

RESAMPLES = 2000
"""Number of bootstrap samples."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Mean ranks of the complete layers.

    Attributes:
        means: mean rank by row; 1 is the best.
        intervals: 95% interval by row: percentiles of the mean rank over resampled tasks and seeds.
        behind_first: 95% interval by row of the mean rank less that of the best layer. Both are taken from the same
            samples, so layers may differ clearly although their own intervals overlap. It is not adjusted for the
            number of layers.
    """

    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    behind_first: dict[str, tuple[float, float]]

    def level_with_first(self) -> list[str]:
        """Return the rows that are not clearly behind the best one."""
        first = min(self.means, key=self.means.__getitem__)
        return [row for row, (low, _high) in self.behind_first.items() if low <= 0 and row != first]


def mean_ranks(board: Board, metric: str, tasks: Sequence[str] | None = None) -> Ranks | None:
    """Rank the layers of a board that have all tasks; return None if fewer than two have.

    Variants, cells that differ from the board's protocol, and layers of the project that a user has trained again are
    not ranked. Layers with equal means share the smaller rank. A layer whose grid points all diverged is last.

    Args:
        board: the cells.
        metric: ``sequence`` or ``token``.
        tasks: the tasks over which ranks are averaged; all unless given.
    """
    cells = {place: cell for place, cell in board.cells.items() if cell.is_ranked}
    tasks = list(TASKS) if tasks is None else tasks
    rows = [row for row in dict.fromkeys(row for row, _ in cells) if all((row, task) in cells for task in tasks)]
    if len(rows) < 2:
        return None
    values = [[cells[row, task].values(metric) or [-np.inf] for task in tasks] for row in rows]

    # Mean ranks of the layers (L) over the tasks (T).
    means_LT = np.array([[round(fmean(seeds), DIGITS) for seeds in of_row] for of_row in values])
    observed = _ranks(means_LT[None])[0].mean(axis=1)

    # B bootstrap samples of the seeds, then of the tasks.
    rng = np.random.default_rng(SEED)
    drawn_BLT = np.empty((RESAMPLES, len(rows), len(tasks)))
    for layer, task in np.ndindex(len(rows), len(tasks)):
        seeds = values[layer][task]
        drawn_BLT[:, layer, task] = rng.choice(seeds, (RESAMPLES, len(seeds))).mean(axis=1).round(DIGITS)
    chosen_BT = rng.integers(len(tasks), size=(RESAMPLES, len(tasks)))
    resampled_BL = np.take_along_axis(_ranks(drawn_BLT), chosen_BT[:, None, :], axis=2).mean(axis=2)
    first = int(observed.argmin())

    return Ranks(
        means=dict(zip(rows, observed.tolist(), strict=True)),
        intervals=_intervals(rows, resampled_BL),
        behind_first=_intervals(rows, resampled_BL - resampled_BL[:, first, None]),
    )


def rank_on_task(cells: Sequence[Cell], metric: str) -> dict[str, int]:
    """Return the rank of each row among the cells of a task."""
    return places({cell.row: -fmean(cell.values(metric) or [-np.inf]) for cell in cells})


def _intervals(rows: Sequence[str], samples_BL: NDArray[np.float64]) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of each row's samples."""
    lows, highs = np.percentile(samples_BL, [2.5, 97.5], axis=0)
    return {row: (float(low), float(high)) for row, low, high in zip(rows, lows, highs, strict=True)}


def _ranks(means_BLT: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the ranks among the layers, shape (B, L, T)."""
    ranks_BLT: NDArray[np.int64] = rankdata(-means_BLT, method="min", axis=1).astype(np.int64)
    return ranks_BLT
