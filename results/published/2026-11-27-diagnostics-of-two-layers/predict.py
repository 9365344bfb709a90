"""Do diagnostics of two layers predict losses of language models better than those of one?

    python -m runners.mad --preset quick --mixer all --task all --layers 2 --out two_layers    # on a GPU
    python predict.py two_layers/studies    # without the folder: from the stored figures of 2026-11-27

``two_layers.json`` holds the stored figures: the token accuracy of each seed on the test split, by layer and task.

Score: mean rank by token accuracy over the ten tasks, preset quick. Loss: validation loss of the 21 small language
models. Printed are Spearman's rank correlations (1: better scores, lower losses): over all layers, between families (a
family counts once, with the mean rank of its members) with the p-value of all orders of the families, and within
families; then the difference between two layers and one over all layers, with its 95% interval of paired bootstrap
samples of the layers.
"""

import json
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.stats import rankdata, spearmanr

from mixers import MIXERS
from tasks import TASKS

REFERENCE = Path(__file__).parents[2] / "reference"
STORED = Path(__file__).with_name("two_layers.json")
FAMILIES = np.array([mixer.family for mixer in MIXERS.values()])
RESAMPLES = 2000


def main(folders: list[str]) -> None:
    """Print the correlations."""
    losses = np.array([loss_of(layer) for layer in MIXERS])
    found = of_studies(Path(folders[0])) if folders else json.loads(STORED.read_text())
    scores = {1: table(one_layer), 2: table(lambda layer, task: fmean(found[layer][task]))}

    ranks = {}
    for layers, accuracies in scores.items():
        ranks[layers] = rankdata(-accuracies.round(12), method="min", axis=0).mean(axis=1)
        print(f"\n{layers} layer{'s' * (layers > 1)}")
        report("mean rank", ranks[layers], losses)
        for task, column in zip(TASKS, accuracies.T, strict=True):
            report(task, -column, losses)
        for mean, layer in sorted(zip(ranks[layers], MIXERS, strict=True)):
            print(f"  {mean:5.1f} {layer}")

    rng = np.random.default_rng(0)
    draws = rng.integers(len(losses), size=(RESAMPLES, len(losses)))
    differences = [spearman(ranks[2][at], losses[at]) - spearman(ranks[1][at], losses[at]) for at in draws]
    low, high = np.nanpercentile(differences, (2.5, 97.5))
    whole = spearman(ranks[2], losses) - spearman(ranks[1], losses)
    print(f"\nall layers, mean rank, two layers less one: {whole:.2f} ({low:.2f} to {high:.2f})")


def of_studies(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the token accuracies of the seeds on the test split, by layer and task."""
    found: dict[str, dict[str, list[float]]] = {}
    for file in sorted(folder.glob("*/summary.json")):
        study = json.loads(file.read_text())
        values = study["points"][study["chosen"]]["values"]["test_token_accuracy"]
        found.setdefault(study["config"]["mixer"], {})[study["config"]["task"]] = values
    return found


def loss_of(layer: str) -> float:
    """Return the mean validation loss of a layer's language model over the seeds of its learning rate."""
    model = json.loads((REFERENCE / "language-models" / f"{layer}.json").read_text())
    return fmean(run["validation_loss"] for run in model["runs"] if run["lr"] == model["chosen"])


def one_layer(layer: str, task: str) -> float:
    """Return the token accuracy of one layer in the preset quick."""
    cell = json.loads((REFERENCE / "quick" / layer / f"{task}.json").read_text())
    return fmean(cell["test"]["token_accuracy"])


def table(score: Callable[[str, str], float]) -> np.ndarray:
    """Return the score of each layer on each task."""
    return np.array([[score(layer, task) for task in TASKS] for layer in MIXERS])


def report(name: str, scores: np.ndarray, losses: np.ndarray) -> None:
    """Print the correlations of a score, of which less is better."""
    x, y = rankdata(scores), rankdata(losses)
    names = list(dict.fromkeys(FAMILIES))
    of_x, of_y = ([values[name == FAMILIES].mean() for name in names] for values in (x, y))
    between = spearman(of_x, of_y)
    orders = [abs(spearman(of_x, list(order))) >= abs(between) - 1e-9 for order in permutations(rankdata(of_y))]
    shared = np.array([np.sum(family == FAMILIES) > 1 for family in FAMILIES])
    inside = [values - np.array([values[family == FAMILIES].mean() for family in FAMILIES]) for values in (x, y)]
    within = np.corrcoef(inside[0][shared], inside[1][shared])[0, 1]
    print(
        f"{name:26} all {spearman(x, y):5.2f}   between {between:5.2f} (p {fmean(orders):.3f})   within {within:5.2f}"
    )


def spearman(x: np.ndarray | list[float], y: np.ndarray | list[float] | tuple[float, ...]) -> float:
    """Return Spearman's rank correlation."""
    return float(spearmanr(x, y).statistic)


if __name__ == "__main__":
    main(sys.argv[1:])
