"""Counts of choices in the reference results of the ten tasks: seeds, edges of the grid, intervals.

    python counts.py

"270 cells" are those of the rows without the nine newest layers and without stacks, "21 layers" those among them that
are ranked; "30 layers" are all that are ranked. The counts of choices at the end are over all 360
cells, stacks included.
"""

from itertools import product

import numpy as np
from scipy import stats

from mixers import MIXERS
from runners.mad.points import chosen, estimate_of, points
from runners.mad.rows import ENTRIES, LAYERS, STACKS, load_rows
from runners.records import REFERENCE
from tasks import PUBLISHED

NEWEST = {"fox", "path", "mlstm", "slstm", "m2rnn", "kda", "gdn2", "deltaproduct", "mamba3"}
KINDS = {"token": "test.token_accuracy", "sequence": "test.sequence_accuracy"}

if __name__ == "__main__":
    table = load_rows(REFERENCE, ("full",), ENTRIES.values(), PUBLISHED)
    older = table[~table["layer"].isin(NEWEST | {entry.name for entry in STACKS})]
    ranked = {entry.name for entry in LAYERS}
    of_points = points(table)
    best = chosen(of_points)
    choices = {(row["layer"], row["task"]): row for row in best.to_dict("records")}
    cells = [cell for cell in choices if cell[0] in set(older["layer"])]
    print(len(cells), "cells,", len({layer for layer, _ in cells}), "rows,", len(MIXERS), "registered layers")

    # Seed 0 beside the others.
    all_ranked = [cell for cell in choices if cell[0] in ranked]
    for some, (kind, column) in product((cells, all_ranked), KINDS.items()):
        ahead = []
        for layer, task in some:
            row = choices[layer, task]
            runs = table[(table["layer"] == layer) & (table["task"] == task)]
            runs = runs[(runs["lr"] == row["lr"]) & (runs["weight_decay"] == row["weight_decay"])]
            seeds_S = runs.sort_values("seed")[column].to_numpy(float)[:5]
            ahead.append([seeds_S[s] - np.delete(seeds_S, s).mean() for s in range(5)])
        ahead_CS = np.array(ahead)
        low, high = stats.t.interval(0.95, len(some) - 1, ahead_CS[:, 0].mean(), stats.sem(ahead_CS[:, 0]))
        print(f"{kind}, {len(some)}: seed 0 ahead by {ahead_CS[:, 0].mean():.3g} ({low:.3g} to {high:.3g});", end=" ")
        print("cells in which each seed is ahead of the others' mean", (ahead_CS > 1e-9).sum(0).tolist())

    # Edges, and choices by seed 0 alone.
    edges = [cell for cell, row in choices.items() if cell[0] in ranked and row["edge"] == "largest"]
    print(len(edges), "of", len(ranked) * len(PUBLISHED), "cells of 30 layers at the largest rate;", end=" ")
    print({task: sum(other == task for _, other in edges) for task in PUBLISHED})
    edges = [cell for cell in edges if cell[0] not in NEWEST]
    print("of 21 layers:", {task: sum(other == task for _, other in edges) for task in PUBLISHED})

    moved, several, leads = 0, 0, []
    validation = "validation.token_accuracy"
    for layer, task in choices:
        runs = table[(table["layer"] == layer) & (table["task"] == task)]
        whole = [of for _, of in runs.groupby(["lr", "weight_decay"]) if set(range(5)) <= set(of["seed"])]
        best_of_whole = max(of[of["seed"] == 0][validation].max() for of in whole)
        leads.append(runs[runs["seed"] == 0][validation].max() - best_of_whole)
        if len(whole) > 1:
            several += 1
            means = [of[of["seed"] < 5][validation].mean() for of in whole]
            first = [of[of["seed"] == 0][validation].iloc[0] for of in whole]
            moved += int(np.argmax(means) != np.argmax(first))
    print(moved, "of", several, "cells with several whole points would choose another by seed 0 alone;", end=" ")
    one = sum(lead > 0 for lead in leads)
    print(
        f"in {one} of {len(choices)} cells a point without five seeds has a better seed 0, by at most {max(leads):.3g}"
    )

    # Intervals.
    ends = [estimate_of(choices[cell], column) for cell in cells for column in KINDS.values()]
    print(sum(end.low < 0 or end.high > 1 for end in ends), "of", len(ends), "intervals leave [0, 1]")
