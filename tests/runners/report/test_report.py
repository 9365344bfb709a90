"""The pages: what they show of which records."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from mixers import MIXERS
from runners import records
from runners.benchmarks import read_benchmarks, steps_of_layers
from runners.mad.profile import seed_scores
from runners.mad.rows import ENTRIES, PROFILED, load_rows
from runners.records import REFERENCE
from runners.report import __main__ as report
from runners.report import correlation
from runners.report.__main__ import main
from runners.report.boards import Board, boards_of, values_of
from runners.report.curves import loss_pictures, panels_of_families
from runners.report.language import (
    LOSSES,
    MEAN_RANK,
    PARTS,
    PLANNED,
    answer,
    correlations,
    profile_answer,
    read_models,
    scores_of,
)
from runners.report.published import (
    anchors,
    claims_table,
    papers_claims,
    papers_page,
    read_claims,
    wide_steps,
)
from runners.report.ranks import mean_ranks, places
from runners.report.svg import Chart
from runners.style import Style
from tasks import PUBLISHED, TASKS
from tests.runners.report.conftest import LAYERS, SHIPPED
from tests.runners.report.made_up import bench, cell, diverged, write_cell, write_model, write_study

MODELS = "language-models"
ALL_LAYERS = "2026-11-30-bench-all-layers/layers-nvidia-h200.json"


class Outside(HTMLParser):
    """Addresses that a page would load something from, and the ids of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        names = ("src", "srcset", "data", "xlink:href", *(["href"] if tag == "link" else []))
        self.loaded += [given[name] or "" for name in names if name in given]


def board_of(folder: Path, *studies: Path) -> tuple[Board, list[str]]:
    """Return the board of the reference protocol, and the lines about studies that are left out."""
    reference = load_rows(folder / "reference", ("full", "quick"), ENTRIES.values(), TASKS)
    (board, *_), left_out = boards_of(reference, records.load(*studies))
    return board, left_out


def rows_of(page: Path, label: str) -> dict[str, list[str]]:
    """Return the texts of the cells of each row of a table, by the name of its layer."""
    (table,) = re.findall(rf'aria-label="{label}">(.*?)</table>', page.read_text(), re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], re.DOTALL)
    found = [[re.sub(r"<[^>]+>", " ", one).split() for one in re.split(r"</t[dh]>", row)[:-1]] for row in rows]
    return {texts[1][0]: [" ".join(text) for text in texts] for texts in found}


def test_each_page_is_one_file_that_loads_nothing_and_has_every_id_once(pages: Path) -> None:
    assert {file.stem for file in pages.iterdir()} == {*report.PAGES}
    links = {*re.findall(r'href="([^"#]+)', (pages / "index.html").read_text())} - {"data:,"}
    assert not [link for link in links if not (pages / link).exists()]
    for page in pages.iterdir():
        outside = Outside()
        outside.feed(text := page.read_text())
        assert {address.partition(":")[0] for address in outside.loaded} <= {"", "data"}
        assert len(outside.ids) == len(set(outside.ids))
        assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", text)
        assert not re.findall(r">\s*(nan|None)\s*<", text)


def test_figures_of_the_leaderboards_are_those_of_the_records(pages: Path, results: Path) -> None:
    rows = rows_of(pages / "full.html", "parity")
    assert [*rows] == ["rt-block-4", "transformer+rt", "rt", "my_layer:MyLayer", "deltanet", "transformer"]
    for row in (*LAYERS, "rt-block-4", "transformer+rt"):
        table = records.load(results / "reference" / row / "parity.jsonl")
        chosen = table[table["test.token_accuracy"].notna()]
        for column, metric in ((2, "token"), (3, "sequence")):
            assert float(rows[row][column][:6]) == pytest.approx(chosen[f"test.{metric}_accuracy"].mean(), abs=5e-5)
        assert rows[row][4] == f"{chosen['lr'].iloc[0]:g}"
        assert rows[row][-1] == f"{(table['seconds'] / table['together']).sum():.0f} s"
    assert "*" in rows["rt-block-4"][2]  # the end of the grid
    assert [rows[row][0] for row in ("rt", "my_layer:MyLayer", "deltanet", "rt-block-4")] == ["1", "2", "3", "–"]

    # A row of the first page has the mean rank of a layer that has all tasks, and the time of a step.
    overall = rows_of(pages / "index.html", "leaderboard")
    assert [*overall] == ["rt", "deltanet", "transformer", "my_layer:MyLayer"]
    assert overall["rt"][:6] == ["1", "rt", "1.0", "0.925", "0.925", "0.925"]
    assert overall["my_layer:MyLayer"][:6] == ["–", "my_layer:MyLayer yours", "–", "", "", "0.825"]
    assert [row[6] for row in overall.values()] == ["2.5×", "–", "1×", "–"]


def test_the_first_screen_says_where_a_layer_stands(
    pages: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's own layer stands on the board that has it; without one, RT on that of the profiles."""
    monkeypatch.setattr(report, "REFERENCE", results / "reference")
    main(["--out", str(tmp_path)])
    words = {
        pages: [
            "my_layer:MyLayer yours 2nd of 4: mean rank 2.0 (2.0 to 2.0) over 1 task, reference protocol",
            "Strengths, by rank parity 0.8250 (0.3431–0.9770) 2nd of 4, tied with 3",
            "bench layers --lengths 128 --layers transformer my_layer:MyLayer",
            "parameters 1.00k 1×",
        ],
        tmp_path / "report": [
            "rt profile at width 128: tier 1 of 3; rank 1 of 3",
            "Strengths, by rank parity 0.889 (0.889–0.889) 1st of 3",
            "step, width 128, 30 runs at once 5 ms 2.5×",
        ],
    }
    for folder, said in words.items():
        text = " ".join(re.sub(r"<[^>]+>", " ", (folder / "index.html").read_text()).split())
        assert [one for one in said if one not in text.partition("Findings")[0]] == []


def test_mean_ranks_are_among_the_layers_that_have_all_tasks(results: Path) -> None:
    board, _ = board_of(results)
    assert {row: place for row, (place, _) in board.overall.items()} == {"rt": 1, "transformer": 3, "deltanet": 2}
    assert board.ranks("parity") == {"rt": 1, "transformer": 3, "deltanet": 2}

    # Equal means share the rank; a layer that diverged has none; intervals are of tasks and seeds.
    values = {
        ("a", "x"): [1.0],
        ("b", "x"): [1.0],
        ("c", "x"): [],
        ("a", "y"): [0.1, 0.9],
        ("b", "y"): [0.4],
        ("c", "y"): [0.2],
    }
    found = mean_ranks(values, ["x", "y"])
    assert found.means == {"a": 1.25, "b": 1.75}
    assert found.intervals["a"] == (1.0, 2.0)
    assert mean_ranks({("a", "x"): [1.0]}, ["x"]) is None
    assert places({"a": 0.5, "b": 0.9, "c": 0.9}) == {"a": 3, "b": 1, "c": 1}


def test_ones_own_layer_of_the_project_has_no_rank_and_one_of_other_settings_is_left_out(
    results: Path, tmp_path: Path
) -> None:
    again = write_study(tmp_path, cell("rt", "parity", [1.0, 1.0], study="again"))
    short = write_study(tmp_path, cell("mine:Mine", "parity", [1.0, 1.0], steps=10))
    board, (left_out,) = board_of(results, again, short)
    assert [cell.value for cell in board.cells.values() if cell.kind == "again"] == [1.0]
    assert board.ranks("parity") == {"rt": 1, "transformer": 3, "deltanet": 2}
    assert "steps 10 (theirs 50)" in left_out  # of the nearest preset
    assert "mine:Mine" not in " ".join(board.rows)


def test_losses_of_language_models_are_those_of_the_records(pages: Path, results: Path) -> None:
    rows = rows_of(pages / "language.html", "language models")
    assert [*rows] == ["rt", "deltanet", "transformer"]  # by loss
    for layer, row in rows.items():
        runs = records.load(results / "reference" / MODELS / f"{layer}.jsonl")
        best = runs[runs["lr"] == 3e-3]
        figures = [best[f"validation.{name}"].mean() for name in ("loss", "recall_loss", "rest_loss", "bits_per_byte")]
        assert [text.split()[0] for text in row[2:6]] == [f"{y:.3f}" for y in figures]
    assert (pages / "language.html").read_text().count("<td>2.090*</td>") == 2  # against the Transformer, twice


def test_models_are_compared_only_if_they_read_the_same_text(tmp_path: Path) -> None:
    write_model(tmp_path, "rt", 3.0)
    write_model(tmp_path, "transformer", 3.1, runs=3)
    write_model(tmp_path, "gla", 3.2, metrics={}, curve={}, diverged_step=2)
    models = read_models(tmp_path, alike=True)
    assert {name: (model.finished, model.lr) for name, model in models.items()} == {
        "rt": (True, 3e-3),
        "transformer": (False, 3e-3),
        "gla": (False, None),
    }
    assert models["gla"].mean("loss") == float("inf")
    drawn = loss_pictures(panels_of_families({"rt": models["rt"], "transformer": models["rt"]}))
    assert "rt: 3.000 at the end, +0.000 from transformer" in drawn["recurrent attention"]

    write_model(tmp_path, "lru", 3.0, steps=50)
    assert read_models(tmp_path, alike=False)
    with pytest.raises(ValueError, match="different texts or settings"):
        read_models(tmp_path, alike=True)
    write_model(tmp_path, "lru", 3.0, text="b")
    with pytest.raises(ValueError, match="different texts or settings"):
        read_models(tmp_path, alike=False)


def test_shipped_results_give_the_analysis_that_was_fixed_beforehand() -> None:
    """Its figures, and exploratory ones, are those of the table of claims."""
    board, _ = board_of(SHIPPED)
    models = [*read_models(REFERENCE / MODELS, alike=True).values()]
    claim = read_claims(SHIPPED / "claims.csv")
    rho = answer(board, models)
    assert f"{rho.value:.2f}" == claim("tasks-predict-between-families").value
    assert f"{rho.p:.2f}" == "0.48"
    assert not rho.significant

    within = {row.score: row.rhos["within"]["loss"] for row in correlations(scores_of(board, models), models)}
    names = {"MQAR": "mqar", "in-context recall": "in-context-recall", "copying": "copying"}
    for name, task in names.items():
        found = within[task]
        assert f"{found.value:.2f}" == claim("tasks-predict-within-recall", name)
        assert found.significant
    assert within[MEAN_RANK] is not None

    ranks = mean_ranks(values_of(board.cells), PUBLISHED)
    assert f"of {len(ranks.means)} layers" in claim("mean-rank-ties").claim
    layers = {
        "Feedback Transformer": "feedback-transformer",
        "M²RNN": "m2rnn",
        "Gated DeltaNet-2": "gdn2",
        "RWKV-7": "rwkv7",
    }
    for name, row in layers.items():
        assert f"{ranks.means[row]:.1f}" == claim("mean-rank-ties", name)
    intervals = [f"{low:.1f} to {high:.1f}" for low, high in (ranks.intervals[row] for row in layers.values())]
    assert claim("mean-rank-ties").interval == "; ".join(intervals)


def test_shipped_profiles_give_the_answer_of_the_table_of_claims() -> None:
    rows = (PROFILED[layer] for layer in PLANNED)
    scores = seed_scores(load_rows(SHIPPED / "reference", ["profile"], rows, TASKS))
    found = profile_answer(scores, [*read_models(REFERENCE / MODELS, alike=True).values()])
    claim = read_claims(SHIPPED / "claims.csv")
    for part in PARTS:
        rhos = found["rows"][0].rhos[part]
        words = [f"{rhos[loss].value:.2f}, adjusted p {found['adjusted'][part, loss]:.2g}" for loss in [*LOSSES][:2]]
        assert claim(f"profiles-predict-{part}-families").value == "validation loss {}; recall tokens {}".format(*words)


@pytest.mark.parametrize(("sign", "shown"), [(1, ["between", "within"]), (-1, [])])
def test_profiles_predict_losses_if_they_order_layers_and_families_as_the_losses_do(
    sign: int, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlation, "RESAMPLES", 499)
    models = [*read_models(REFERENCE / MODELS, alike=True).values()]
    rows = [(model.layer, task, -sign * model.mean("loss")) for model in models for task in TASKS]
    scores = pd.DataFrame(rows, columns=["layer", "task", "score"])
    found = profile_answer(scores, models)
    assert found["shown"] == shown
    first = [rho for of_part in found["rows"][0].rhos.values() for rho in [of_part["loss"]] if rho]
    assert [rho.value for rho in first] == pytest.approx([sign, sign])
    assert min(found["adjusted"].values()) == pytest.approx(4 * min(rho.p for rho in first))
    assert [row.score for row in found["rows"][1:]] == [*TASKS]
    assert profile_answer(scores[1:], models) is None


def test_a_layer_that_diverged_says_so(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("parity", "copying"):
        write_cell(tmp_path, cell("rt", task, [0.9, 0.9]))
        write_cell(tmp_path, diverged("lru", task))
    (tmp_path / "claims.csv").symlink_to(SHIPPED / "claims.csv")
    monkeypatch.setattr(report, "REFERENCE", tmp_path / "reference")
    main(["--out", str(tmp_path)])
    assert rows_of(tmp_path / "report" / "full.html", "parity")["lru"][:4] == ["–", "lru", "diverged", "diverged"]
    assert "1,024</" not in (tmp_path / "report" / "index.html").read_text()
    assert "width of language models" not in (tmp_path / "report" / "speed.html").read_text()
    assert "No language model is trained yet" in (tmp_path / "report" / "language.html").read_text()


def test_what_cannot_be_shown_is_one_line(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., str]
) -> None:
    monkeypatch.setattr(report, "REFERENCE", results / "reference")
    out = ["--out", str(tmp_path / "out")]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is not there" in ended(main, [str(tmp_path / "nothing"), *out])
    assert f"{empty} holds no records" in ended(main, [str(empty), *out])
    assert "holds no language models" in ended(main, ["--language-models", str(empty), *out])

    study = write_study(tmp_path, cell("my_layer:MyLayer", "parity", [0.8]))
    file = next(study.rglob("record.json"))
    file.write_text(file.read_text().replace("my_layer", "my_l4yer"))
    assert f"{file} is damaged" in ended(main, [str(study), *out])
    assert not (tmp_path / "out").exists()


def test_the_papers_claims_take_our_figures_from_the_table_of_claims() -> None:
    claim = read_claims(SHIPPED / "claims.csv")
    claims = papers_claims(claim)
    assert len(claims) == 24
    assert {found["verdict"] for found in claims} == {"agrees", "partly", "differs", "not shown"}
    assert any(claim("transition").value in found["why"] for found in claims)
    assert all(len({len(line) for line in found["table"]}) <= 1 for found in claims)
    assert all((SHIPPED / record).exists() for found in claims for record in found["records"])
    assert claim("transition", "Transformer, 6 layers") == "2.738, 2.736"
    assert all(claim(name).status == "holds" for name in report.GLANCE)
    assert all(claim(found["ours"]).status == "holds" for found in claims if found["ours"])
    shown = {found["name"]: found for found in claims_table(SHIPPED / "claims.csv")}
    assert all(found["command"] and all(file.exists() for file in found["records"]) for found in shown.values())
    assert not {found["ours"] for found in claims if found["ours"]} - {*shown}
    assert papers_page(claim) == (SHIPPED.parent / "docs" / "paper.md").read_text(encoding="utf-8")


def test_every_anchor_has_its_record() -> None:
    benchmarks = read_benchmarks(SHIPPED / "published")
    rows = anchors(SHIPPED / "published", benchmarks)
    assert len(rows) == 11
    for row in rows:
        assert "not measured" not in row["figures"]
        assert row["device"] == "NVIDIA H200"
    gains = [float(row["gain"].removesuffix("×")) for row in rows if row["gain"] != "–"]
    assert (min(gains), max(gains)) == (2.4, 14.8)
    assert fmean(gains) > 2

    # The record with most layers comes first, which has all of the package.
    steps = steps_of_layers(benchmarks)
    assert {steps[layer].record for layer in MIXERS} == {SHIPPED / "published" / ALL_LAYERS}
    assert {runs: round(ratio, 2) for runs, (_, ratio) in steps["rt"].times.items()} == {1: 5.85, 6: 2.47, 30: 1.73}


def test_steps_at_the_width_of_language_models_are_those_of_their_record(pages: Path) -> None:
    first, second = (rows_of(pages / "speed.html", f"steps at width 1,024, {y}") for y in ("32 × 512", "8 × 2,048"))
    assert [*first] == ["transformer", "deltanet", "rt"]
    assert first["rt"] == ["3", "rt", "52", "6.5×", "1.5", "9.0", "1.0e-02", "rt kernel; compiled"]
    assert [*second.values()][1:] == [
        ["2", "rt", "120", "15×", "1.5", "9.0", "1.0e-02", "rt kernel; compiled"],
        ["–", "deltanet", "skipped: out of memory"],
    ]

    # The chart: a hollow mark for each time at the second shape.
    ((caption, chart),) = re.findall("<figcaption>(.*?)</figcaption>(.*?)</figure>", (pages / "speed.html").read_text())
    assert caption == "Filled: 32 × 512; hollow: 8 × 2,048"
    assert [chart.count(text) for text in (">6.5×, 15×<", ">2.5×<", ">1×, 1×<", "fill:var(--card)")] == [1, 1, 1, 2]

    times = {layer: row[7] for layer, row in rows_of(pages / "index.html", "leaderboard").items()}
    assert times == {"rt": "6.5× , 15×", "deltanet": "2.5× , –", "transformer": "1× , 1×", "my_layer:MyLayer": "–"}
    assert {layer: row[5] for layer, row in rows_of(pages / "index.html", "profiles").items()}.items() <= times.items()


def test_a_record_of_another_width_changes_no_board_and_the_newest_with_all_layers_is_shown() -> None:
    of_two, of_one = {"transformer": 2.0, "rt": 5.0}, {"transformer": 2.0}
    wide = {"width": 1024, "batch_size": 128, "length": 128}
    benchmarks = {
        Path("newest.json"): bench(of_one, **wide),
        Path("newer.json"): bench(of_two, **wide),
        Path("older.json"): bench(of_two, **wide),
        Path("other.json"): bench({**of_two, "gla": 3.0}, **wide, runs=6),
        Path("narrow.json"): bench(of_two, length=128),
    }
    assert {steps.record.stem for steps in steps_of_layers(benchmarks).values()} == {"narrow"}
    assert wide_steps(benchmarks)["record"].stem == "newer"
    assert wide_steps({Path("narrow.json"): bench(of_two, width=128, length=128)}) == {}


def test_a_chart_puts_data_where_its_axes_say() -> None:
    chart = Chart(description="a & b", labels={"x": "n", "y": "y"}, logs="x", limits={"x": (1, 100), "y": (0, 1)})
    style = Style(color="#0072b2", marker="o")
    chart.line([1, 10, 100], [0, 0.5, 1], style, tip="<line>")
    chart.mark(10, 0.5, style)
    chart.end("first", 1.0, style.color)
    chart.end("second", 1.0, style.color)
    root = ElementTree.fromstring(chart.svg())
    assert root.get("aria-label") == "a & b"
    (line,) = [path for path in root.iter("path") if path.findtext("title") == "<line>"]
    points: Any = [tuple(map(float, pair.split(","))) for pair in str(line.get("d"))[1:].split()]
    assert points[0][0] == chart.left
    assert points[1] == pytest.approx([(a + b) / 2 for a, b in zip(points[0], points[2], strict=True)], abs=0.1)
    (mark,) = [path for path in root.iter("path") if path.get("transform")]
    assert f"translate({points[1][0]:.1f} {points[1][1]:.1f})" in str(mark.get("transform"))
    names = {text.text: float(str(text.get("y"))) for text in root.iter("text")}
    assert names["second"] - names["first"] >= 8 or names["first"] - names["second"] >= 8
    assert {"1", "10", "100"} <= {text.text for text in root.iter("text")}
