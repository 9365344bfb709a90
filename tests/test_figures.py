"""The figures of the pages and of results/claims.csv that rest on the reference results follow from their files."""

import csv
import json
import re
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from mixers import MIXERS
from runners.c4.reference.rows import chosen_rate, open_places
from runners.records import read_all
from tasks import PUBLISHED
from tests.runners.mad.made_up import as_shown, interval_of

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
WRITTEN = [README, *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "paper")]
"""Pages that are not made of the claims."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-\d+)?")
LARGEST = 2e-2
"""Largest learning rate of the cells that have one beyond the wide grid."""


@cache
def cells() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Records of the chosen point of each reference cell of the reference protocol, by layer and task.

    It is the best mean token accuracy on validation of the points with five seeds, of which none diverged.
    """
    found: dict[tuple[str, str, float, float], list[dict[str, Any]]] = {}
    for path in REFERENCE.glob("*/*.jsonl"):
        for one in map(json.loads, path.read_text().splitlines()):
            found.setdefault((one["layer"], one["task"], one["lr"], one["weight_decay"]), []).append(one)
    whole = {
        key: runs
        for key, runs in found.items()
        if key[1] in PUBLISHED and len(runs) == 5 and all(run["diverged_step"] is None for run in runs)
    }
    ascending = sorted(whole.items(), key=lambda item: fmean(token_accuracies(item[1], "validation")))
    return {key[:2]: sorted(runs, key=lambda run: run["seed"]) for key, runs in ascending}


def token_accuracies(runs: list[dict[str, Any]], split: str) -> list[float]:
    return [run["metrics"][split]["token_accuracy"] for run in runs]


@cache
def trained() -> list[str]:
    """Registered layers that have all tasks."""
    return [layer for layer in MIXERS if all((layer, task) in cells() for task in PUBLISHED)]


@cache
def overview() -> str:
    return (REFERENCE / "overview.md").read_text(encoding="utf-8")


def accuracies(layer: str, task: str, probe: str = "") -> list[list[float]]:
    """Sequence and token accuracies of a cell's seeds, on the test split unless a probe is named."""
    runs = [run["metrics"][probe or "test"] for run in cells()[layer, task]]
    return [[run[f"{kind}_accuracy"] for run in runs] for kind in ("sequence", "token")]


def rounds_to(text: str, value: float) -> bool:
    """Whether a text ends with the value, rounded to as many digits; a half may be rounded up or down."""
    return abs(float(text.split()[-1]) - value) <= 0.5000001 * 0.1 ** len(text.partition(".")[2] or "0000000")


def results_row(layer: str, task: str) -> list[str]:
    """A layer's part of a row of results: accuracies and learning rate, with a star if that is the grid's largest."""
    runs = cells()[layer, task]
    rate, ceiling = runs[0]["lr"], runs[0]["ceiling"]["token"]
    is_edge = rate == LARGEST and fmean(token_accuracies(runs, "validation")) < ceiling - 1e-3
    return [*(as_shown(seeds, digits=3) for seeds in accuracies(layer, task)), f"{rate:g}{'*' * is_edge}"]


@pytest.mark.parametrize("task", PUBLISHED)
def test_the_results_in_the_pages_follow_from_the_cells(task: str) -> None:
    [worth] = re.findall(rf"^\| `{task}` \|(?: \d\S* \(\S*\)\*? \|){{5}} (.*) \|$", overview(), re.MULTILINE)
    row = [f"`{task}`", *results_row("rt", task), *results_row("transformer", task), worth]
    assert f"| {' | '.join(row)} |" in RESULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.stem)
def test_as_many_layers_have_all_tasks_as_the_pages_say(page: Path) -> None:
    said = f" {len(trained())} layers have been trained (on all ten tasks|at length on ten of the tasks)\\."
    assert re.search(said, " ".join(page.read_text().split()))


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("profile-first", r"(\d+ share)"),
        ("mean-rank-ties-rt", r"(RT is \w+)"),
        ("mean-rank-ties-transformer", r"(\d+th)"),
        ("mean-rank-ties-behind", r"^(\d+) of"),
        ("small-language-models", r"lowest loss (of \d+)"),
        ("small-language-models", r"RT the (\w+ lowest)"),
    ],
)
def test_the_places_in_the_readme_are_those_of_claims(claim: str, said: str) -> None:
    """Whole numbers and words, which are not compared with claims elsewhere."""
    [text] = [row["claim"] for row in claims() if row["name"] == claim]
    [word] = re.findall(said, text)
    findings = README.read_text(encoding="utf-8").partition("## What was found")[2].partition("\n## ")[0]
    assert re.search(rf"\b{word}\b", findings)


def language_models() -> dict[str, dict[str, float]]:
    """Mean losses of each layer's language model over the seeds of its learning rate, and its costs."""
    found = {}
    for path in (REFERENCE / "language-models").glob("*.jsonl"):
        runs = runs_of(path)
        rate = min((run for run in runs if run["seed"] == 0), key=loss_of)["lr"]
        chosen = [run for run in runs if run["lr"] == rate]
        found[path.stem] = {
            "validation_loss": fmean(map(loss_of, chosen)),
            "recall_loss": fmean(run["metrics"]["validation"]["recall_loss"] for run in chosen),
            "training_loss": fmean(run["curve"]["train_loss"][-1] for run in chosen),
            "parameters": chosen[0]["settings"]["parameters_without_embeddings"],
            "lr": rate,
        }
    return found


AT_30M = {
    "rt-6": "RT, 6 × 640 | 3.049",
    "transformer-6": "Transformer, 6 × 640 | 3.097",
    "transformer-12": "Transformer, 12 × 448 | 3.067",
    "rt-3": "RT, 3 × 896 | –",
    "rt-6-no-persistent-norm": "RT without persistent norm | worse",
    "rt-6-beta2-0.99": "RT, β2 0.99 | –",
    "rt-6-equal-time": "RT, equal time, 108M tokens | –",
}
"""Models that were compared when text was read 6.3 times and once, and the paper's results."""


def test_the_models_at_30m_follow_from_their_files() -> None:
    def shown(path: Path) -> str:
        if not path.exists():
            return "–"
        runs = [record for _, record in read_all(path)]
        best = next(run for run in runs if (run.lr, run.seed) == (chosen_rate(runs), 0))
        losses = [best.metrics[name]["loss"] for name in ("validation", "training")]
        return "{:.3f} / {:.3f}".format(*losses) + "†" * bool(open_places(runs))

    folders = [REFERENCE / "language-models" / name for name in ("rt-against-transformer", "read-once")]
    folders.append(ROOT / "results" / "published" / "2026-11-30-text-read-once-again")
    rows = [
        " | ".join([f"| {start}", *(shown(folder / f"{name}.jsonl") for folder in folders)]) + " |"
        for name, start in AT_30M.items()
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")


def runs_of(path: Path) -> list[dict[str, Any]]:
    """Runs of a language model that did not diverge."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return [run for run in runs if run["diverged_step"] is None]


def loss_of(run: dict[str, Any]) -> float:
    return run["metrics"]["validation"]["loss"]


def mean_ranks(layers: Sequence[str]) -> dict[str, float]:
    """Mean rank of each of the layers by token accuracy over the tasks; equal means share the smaller rank."""
    means = [[round(fmean(accuracies(layer, task)[1]), 12) for task in PUBLISHED] for layer in layers]
    ranks = rankdata(-np.array(means), method="min", axis=0).mean(axis=1)
    return dict(zip(layers, ranks.tolist(), strict=True))


def test_the_language_models_among_the_results_follow_from_their_files() -> None:
    models = language_models()
    ranks = mean_ranks([*models])
    rows = [
        f"| `{layer}` | {model['parameters'] / 1e6:.2f}M "
        f"| {model['lr']:g}{'*' * (model['lr'] == 0.1)} "
        f"| {model['training_loss']:.3f} | {model['validation_loss']:.3f} | {model['recall_loss']:.2f} "
        f"| {ranks[layer]:.1f} |"
        for layer, model in sorted(models.items(), key=lambda item: item[1]["validation_loss"])
    ]
    assert len(rows) > 20
    assert "\n".join(rows) in (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")


def test_the_correlation_among_the_results_is_that_of_the_families() -> None:
    losses = {layer: model["validation_loss"] for layer, model in language_models().items()}
    ranks = mean_ranks([*losses])
    families = {layer: MIXERS[layer].family for layer in losses}

    def by_family(figures: dict[str, float]) -> list[float]:
        placed = dict(zip(figures, rankdata(list(figures.values())), strict=True))
        names = dict.fromkeys(families.values())
        return [fmean(y for layer, y in placed.items() if families[layer] == name) for name in names]

    rho = spearmanr(by_family(ranks), by_family({layer: losses[layer] for layer in ranks})).statistic
    assert f"ρ is {rho:.2f} between the seven families" in " ".join(RESULTS.read_text(encoding="utf-8").split())


def claims() -> list[dict[str, str]]:
    return list(csv.DictReader((ROOT / "results" / "claims.csv").read_text(encoding="utf-8").splitlines()))


def records(claim: dict[str, str]) -> list[Path]:
    """Files or folders of a claim. Names of reference results have no ending, because either format counts."""
    stems = [ROOT / "results" / name for name in claim["record"].split("; ")]
    return [next(path for end in ("", ".json", ".jsonl") if (path := Path(f"{stem}{end}")).exists()) for stem in stems]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_figures_in_sentences_are_those_of_the_claims_that_stand_beside_them(page: Path) -> None:
    holding = {claim["name"]: " ".join(claim.values()) for claim in claims() if claim["status"] == "holds"}
    prose = re.sub(r"(?ms)^```.*?^```$|^\|[^\n]*|\]\(.*?\)", "", page.read_text(encoding="utf-8"))
    for sentences in re.split(r"\n\n|\n- ", prose):
        names = set(re.findall(r"`([a-z\d]+(?:-[a-z\d]+)+|transition|overfitted)`", sentences))
        assert holding.keys() >= names or page not in (README, RESULTS)
        known = NUMBER.findall(" ".join(holding[name] for name in names & holding.keys()).replace(",", ""))
        shares = r"|\b\d+(?=\sof\s\d)|(?<=\d\sof\s)\d+"
        for figure in re.findall(r"(?<!\d)-?\d+(?:,\d{3}|\.\d+|e-\d|%)+" + shares, re.sub("`.*?`", "", sentences)):
            figure = figure.replace(",", "").rstrip("%")
            assert any(rounds_to(figure, float(value)) for value in known), f"{figure} in {sentences}"


def test_the_claims_have_their_form() -> None:
    assert len({claim["name"] for claim in claims()}) == len(claims()) > 200
    assert {claim["status"] for claim in claims()} == {"holds", "superseded", "refuted"}
    for claim in claims():
        assert list(claim) == ["name", "claim", "value", "interval", "unit", "n", "command", "date", "status", "record"]
        assert 0 < len(claim["claim"].split()) <= 20, claim["name"]
        assert all([date.fromisoformat(claim["date"]), *records(claim)])


def test_accuracies_in_the_claims_are_those_of_the_cells_that_they_name() -> None:
    checked = 0
    for claim in (claim for claim in claims() if claim["status"] == "holds"):
        metric, _, probe = claim["unit"].partition(" accuracy")
        for name, *figures in zip(*(claim[key].split("; ") for key in ("record", "value", "interval")), strict=False):
            layer, _, task = name.removeprefix("reference/").partition("/")
            if metric in ("sequence", "token") and (layer, task) in cells() and all(figures):
                value, (low, high) = figures[0], figures[1].split(" to ")
                interval = interval_of(accuracies(layer, task, probe.removeprefix(", "))[metric == "token"])
                assert all(map(rounds_to, (value, low, high), interval)), claim["name"]
                checked += 1
    assert checked > 300


def test_the_exponents_of_latency_follow_from_the_times_of_their_record() -> None:
    (claim,) = (claim for claim in claims() if claim["name"] == "latency-linear")
    cells = json.loads(records(claim)[0].read_text())["cells"]
    for sequences, exponent in re.findall(r"(\d+) sequences ([\d.]+)", claim["value"]):
        place = {"phase": "forward", "layers": 1, "batch_size": int(sequences), "implementation": "rt-chunked-graph"}
        timed = [(cell["length"], cell["median_ms"]) for cell in cells if place.items() <= cell.items()]
        assert len(timed) > 3
        assert rounds_to(exponent, np.polyfit(*np.log(timed).T, 1)[0])


def test_losses_in_the_claims_are_those_of_runs_of_the_models_that_they_name() -> None:
    """That a loss is the one of its rate and seed is not checked."""
    for claim in claims():
        if not claim["unit"].startswith("nats") or "language-models/" not in claim["record"]:
            continue
        known = {f"{loss_of(run):.3f}" for path in records(claim) for run in runs_of(path)}
        assert set(re.findall(r"\b[23]\.\d{3}\b", claim["value"])) <= known, claim["name"]
