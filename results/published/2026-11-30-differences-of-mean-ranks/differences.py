"""How far each layer is behind the first by mean rank on the ten tasks, with intervals adjusted for all comparisons.

    python differences.py differences.csv

Tasks and seeds are drawn 400,000 times, in each draw the same tasks for all layers. An interval holds 1 - 0.05 / 29 of
the differences.
"""

import csv
import sys

import numpy as np
import pandas as pd

from runners.mad.ranking import DIGITS, average_ranks
from runners.mad.rows import ENTRIES, load_rows
from runners.records import REFERENCE
from runners.report.boards import boards_of, values_of
from tasks import PUBLISHED

DRAWS = 400_000

if __name__ == "__main__":
    reference = load_rows(REFERENCE, ("full",), ENTRIES.values(), PUBLISHED)
    board = next(board for board in boards_of(reference, pd.DataFrame())[0] if board.name == "full")
    seeds = values_of(board.cells)
    layers = [row for row in board.overall if all(seeds.get((row, task)) for task in board.tasks)]
    rng = np.random.default_rng(0)

    # Mean ranks, as they are and drawn.
    means_TL = np.array([[np.mean(seeds[row, task]).round(DIGITS) for row in layers] for task in board.tasks])
    means_L = average_ranks(means_TL).mean(0)
    chosen_BT = rng.integers(len(board.tasks), size=(DRAWS, len(board.tasks)))
    times_TB = np.stack([(chosen_BT == task).mean(1) for task in range(len(board.tasks))])
    drawn_BL = np.zeros((DRAWS, len(layers)))
    for task, times_B in zip(board.tasks, times_TB, strict=True):
        values = [seeds[row, task] for row in layers]
        drawn = np.stack([rng.choice(of_row, (DRAWS, len(of_row))).mean(1).round(DIGITS) for of_row in values], 1)
        ranks_BL = np.concatenate([average_ranks(part) for part in np.array_split(drawn, 1000)])
        drawn_BL += times_B[:, None] * ranks_BL

    # Differences from the first.
    first = int(means_L.argmin())
    tail = 100 * 0.05 / (len(layers) - 1) / 2
    differences_BL = drawn_BL - drawn_BL[:, [first]]
    lows_L, highs_L = np.percentile(differences_BL, [tail, 100 - tail], axis=0)
    shares_L = (differences_BL <= 0).mean(0)
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["layer", "mean rank", f"behind {layers[first]}", "low", "high", "share of draws not behind"])
        for n in np.argsort(means_L):
            figures = means_L[n], means_L[n] - means_L[first], lows_L[n], highs_L[n]
            table.writerow([layers[n], *(f"{figure:.2f}" for figure in figures), f"{shares_L[n]:.2g}"])
