"""The page: what it shows of which records, at whatever stage these are."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from runners.drawing import DARK, spread, style_of, styles
from runners.mad.reference.cells import ProtocolName
from runners.mad.results.summary import Estimate, Point, read_summary, summarise, write_summary
from scipy.stats import binom

from mixers.registry import MIXERS
from runners.report import __main__ as report
from runners.report.__main__ import main
from runners.report.cells import YOURS, Board, reference_board, training_flops
from runners.report.language import LanguageModel
from runners.report.own import command_of, read_own
from runners.report.page import show
from runners.report.paper import Evidence, read_claims
from runners.report.pictures import LONGEST, end_label
from runners.report.pictures.costs import state_picture
from runners.report.pictures.lengths import position_picture
from runners.report.ranks import mean_ranks, rank_on_task
from runners.report.records import ABSENT, Records
from runners.report.speed import anchors, tables
from runners.report.svg import INK, STYLE, name_lines, panel
from tasks import TASKS
from tests.runners.mad.commands import planned
from tests.runners.report.made_up import language_model, use, write_cell, write_study

PUBLISHED = Path(__file__).parents[3] / "results" / "published"
MINE = ("--mixer", "transformer", "--task", "parity")
TINY = (
    *("--steps", "4", "--evaluations", "2", "--batch-size", "8", "--width", "16", "--mlp-width", "16"),
    *("--lr", "1e-3", "--weight-decay", "0", "--mixer.heads", "2"),
)


def board_of(results: Path) -> Board:
    return reference_board(results / "reference", "full", [])


class Outside(HTMLParser):
    """Addresses that a page would load something from, and elements that are not closed."""

    VOID = ("meta", "link", "input", "br", "wbr", "image", "path", "use", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if identity := given.get("id"):
            self.ids.append(identity)
        for name in ("src", "srcset", "data", "xlink:href"):
            self.loaded.append(given.get(name) or "")
        if tag == "link":
            self.loaded.append(given.get("href") or "")


def test_the_page_is_one_file_that_loads_nothing_and_has_every_id_once(page: Path) -> None:
    text = page.read_text()
    assert [file.name for file in page.parent.iterdir()] == ["index.html"]
    outside = Outside()
    outside.feed(text)
    assert {address.partition(":")[0] for address in outside.loaded if not address.startswith("#")} <= {"", "data"}
    assert len(outside.ids) == len(set(outside.ids))
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", text)


def test_a_cell_that_is_not_trained_says_so_and_a_stale_one_is_marked(page: Path) -> None:
    text = page.read_text()
    rows = dict(re.findall(r'<tr data-kind="\w+" data-layer="([\w-]+)"(.*?)\n    </tr>', text, re.DOTALL))
    assert rows.keys() == {"rt", "transformer", "deltanet"}
    missing = re.findall(r'<td class="none" data-task="([\w-]+)">not trained</td>', rows["transformer"])
    assert "copying" in missing
    assert "parity" not in missing
    assert len(missing) == 8
    assert {name for name, row in rows.items() if "badge stale" in row} == {"deltanet"}
    assert "7<small> of 270</small>" in text

    # A cell links to its record, and says the command that made it.
    assert (page.parent / re.findall(r'<a class="cell" href="([^"]+)"', rows["rt"])[0]).exists()
    assert "python -m runners.mad.reference --layers rt --tasks parity" in rows["rt"]


def test_without_any_cell_the_page_has_no_figures_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.report.__main__.FOLDER", tmp_path / "reference")
    main(["--out", str(tmp_path)])
    page = (tmp_path / "report" / "index.html").read_text()
    assert "0<small> of 270</small>" in page
    assert "<svg" not in page
    assert page.count("No cell is trained yet.") >= 2
    verdicts = re.findall(r'<article class="claim" data-verdict="([\w ]+)">', page)
    assert len(verdicts) > 20
    assert not re.findall(r">\s*(nan|None|0\.0000)", page.partition('id="paper"')[0])


def test_own_studies_stand_in_the_same_tables_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results", tmp_path / "own"
    write_cell(results, "rt", "parity", [1.0, 1.0])
    use(results, monkeypatch)
    study, other = write_study(out, *MINE, *TINY), write_study(out, *MINE, *TINY, "--task.length", "48")
    main([str(study), str(other), "--out", str(results)])
    page = (results / "report" / "index.html").read_text()

    # A study of other settings of the task is left out.
    said = capsys.readouterr().out
    assert f"left out, because no reference result has their task's settings: {read_summary(other).study};" in said
    (row,) = re.findall(r'<tr data-kind="own"(.*?)\n    </tr>', page, re.DOTALL)
    assert f'data-layer="transformer{YOURS}"' in row
    assert "badge own" in row
    assert "badge short" in row
    assert "--steps 4" in row
    assert 'data-token="0.6"' in row

    # The page opens with the board that it stands on, and says "yours" once.
    assert 'data-board="published"' in page
    assert f"{YOURS} <span" not in row

    # Its diagnosis is the picture of accuracies along the sequence; it is not ranked.
    assert 'role="img"' in page.partition('id="published-positions"')[2].partition("</article>")[0]
    assert '<td class="rank">' in row


def test_accuracies_along_the_sequence_are_drawn_for_the_cells_that_hold_them(results: Path) -> None:
    assert not position_picture(board_of(results)).panels
    file = results / "reference" / "rt" / "parity.json"
    cell = json.loads(file.read_text())
    file.write_text(json.dumps({**cell, "positions": {"axis": "position", "index": [0, 9], "accuracy": [1, 0.25]}}))
    picture = position_picture(board_of(results))
    assert list(picture.panels) == ["parity"]
    assert list(picture.legend) == ["rt"]
    assert picture.missing.startswith("In no panel: transformer, deltanet. Layers are missing where")
    assert "rt: 1.000 at the first, 0.250 at the last" in picture.panels["parity"]["both"]


@pytest.mark.parametrize(
    ("protocol", "given"),
    [
        ("full", ["--mixer.block", "4", "--task.length", "48", *TINY, "--seeds", "2"]),
        ("full", ["--seeds-of", "chosen", "--seeds", "5", "--grid", "wide"]),
        ("full", ["--grid", "wide"]),
        ("quick", ["--lr", "1e-3", "--width", "32", "--seeds-of", "all", "--steps", "30"]),
        ("quick", ["--epochs", "200", "--seeds", "1", "--mixer.heads", "4"]),
        ("quick", ["--short-convolution", "3"]),
        ("quick", []),
    ],
)
def test_the_command_of_a_study_makes_the_same_experiment(protocol: ProtocolName, given: list[str]) -> None:
    preset = ["--preset", "quick"] if protocol == "quick" else []
    options, (experiment,) = planned([*preset, "--mixer", "rt", "--task", "parity", *given])
    seeds: dict[tuple[float, float], list[int]] = {}
    for run in options.runs:
        seeds.setdefault((run.lr, run.weight_decay), []).append(run.seed)
    next(iter(seeds.values())).extend(options.more_seeds)  # of the chosen point
    points = [
        Point(lr=lr, weight_decay=decay, seeds=s, estimates=None, diverged={}) for (lr, decay), s in seeds.items()
    ]
    summary = replace(summarise(experiment, [], None, {}), points=points, chosen=0)
    command = command_of(summary, protocol)
    again, (same,) = planned(command.split()[3:])
    assert same.fingerprint == experiment.fingerprint
    assert set(again.runs) == set(options.runs)
    assert [*again.more_seeds] == [*options.more_seeds]

    # Nothing that the preset has is named.
    if not given or "wide" in given:
        seeds_given = " --seeds 1" if given == ["--grid", "wide"] else ""
        assert command == f"python -m runners.mad --preset {protocol} --mixer rt --task parity{seeds_given}"


def test_the_details_of_a_study_without_a_result_begin_with_its_steps(results: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "own", *MINE, *TINY)
    summary = read_summary(study)
    points = [replace(point, values=None, estimates=None, diverged={0: 2, 1: 2}) for point in summary.points]
    write_summary(replace(summary, points=points, chosen=None, best_seed=None), study)
    main([str(study), "--out", str(results)])
    page = (results / "report" / "index.html").read_text()
    (details,) = re.findall(r"<template><b>transformer \(yours\) on parity</b>(.*?)</template>", page, re.DOTALL)
    assert re.sub(r"\s+", " ", details.partition("</table>")[2]).startswith(" 4 steps")


def test_a_study_whose_runs_diverged_is_of_the_protocol_though_no_seed_repeats_it(tmp_path: Path) -> None:
    study = write_study(tmp_path, *MINE, "--preset", "quick")
    summary = read_summary(study)
    points = [replace(summary.points[0], lr=lr, seeds=[0], values=None, diverged={0: 2}) for lr in (2e-3, 5e-3)]
    write_summary(replace(summary, points=points, chosen=None, best_seed=None), study)
    (cell,) = read_own([study], print)["quick"]
    assert not cell.differs
    assert "--seeds" not in (cell.command or "--seeds")


def test_a_larger_grid_or_more_seeds_leave_a_study_in_its_place(tmp_path: Path) -> None:
    """The tables show what the protocol's grid alone chose, with its seeds."""
    study = write_study(tmp_path, *MINE, "--preset", "quick")
    summary = read_summary(study)

    def point(lr: float, scores: Sequence[float]) -> Point:
        names = ("validation_token", "test_sequence", "test_token") if len(scores) > 1 else ("validation_token",)
        values = {"validation_score": [*scores], **{f"{name}_accuracy": [*scores] for name in names}}
        estimates = {name: Estimate.of(found) for name, found in values.items()}
        seeds = [*range(len(scores))]
        return Point(lr=lr, weight_decay=0.0, seeds=seeds, values=values, estimates=estimates, diverged={})

    def shown(*points: Point) -> Any:
        write_summary(replace(summary, points=[*points], chosen=len(points) - 1, best_seed=0), study)
        (cell,) = read_own([study], print)["quick"]
        return cell

    small = point(2e-3, [0.3]), point(5e-3, [0.5, 0.9, 0.4])
    before = shown(*small)
    assert not before.differs
    larger = shown(*small, point(1e-2, [0.6, 0.7, 0.8]))
    more = shown(small[0], point(5e-3, [0.5, 0.9, 0.4, 0.1]))
    for after in (larger, more):
        assert not after.differs
        assert after.standing.test == before.standing.test
        for name in ("points", "chosen", "test", "curves"):
            assert getattr(after.content, name) == getattr(before.content, name)

    # Without test figures of the smaller grid's choice, the study stands as what it is.
    assert shown(small[0], point(5e-3, [0.5]), point(1e-2, [0.6, 0.7, 0.8])).differs


def test_a_study_of_earlier_code_is_stale_beside_that_of_today(tmp_path: Path) -> None:
    study = write_study(tmp_path, *MINE, "--preset", "quick")
    summary = read_summary(study)
    later = tmp_path / "studies" / "later"
    write_summary(replace(summary, study=f"{summary.study} r2"), later)
    found = read_own([study, later], print)["quick"]
    assert {cell.record.parent: cell.stale for cell in found} == {study: True, later: False}
    assert [cell.stale for cell in read_own([study], print)["quick"]] == [False]


def test_a_layer_without_a_figure_is_named_below_the_picture_and_not_in_its_legend(results: Path) -> None:
    board = board_of(results)
    row = next(iter(board.cells.values())).row
    costs = replace(next(iter(board.cells.values())).standing.costs, state_floats=None)
    cells = {
        place: replace(cell, standing=replace(cell.standing, costs=costs)) if cell.row == row else cell
        for place, cell in board.cells.items()
    }
    picture = state_picture(replace(board, cells=cells))
    assert row not in picture.legend
    assert picture.missing.endswith(f"In no panel, because the figure is not known of them: {row}.")
    assert row in state_picture(board).legend


def test_labels_of_own_studies_name_what_differs_from_their_table(
    tmp_path: Path,
) -> None:
    short, quick = ("--steps", "30"), (*MINE, "--preset", "quick")
    commands = (MINE, (*MINE, *short), quick, (*quick, *short), (*quick, *short, "--width", "128"))
    commands += ((*quick, "--width", "32", "--lr", "1e-2"),)  # the page has another place for other grids
    studies = [write_study(tmp_path, *given) for given in commands]
    found = read_own(studies, print)
    assert {cell.row for cell in found["full"]} == {f"transformer{YOURS}", f"transformer (steps 30){YOURS}"}
    differing = ("", " (steps 30)", " (width 128, steps 30)", " (width 32)")
    labels = [f"transformer{words}" for words in differing]
    assert {cell.row for cell in found["quick"]} == {label + YOURS for label in labels}


def test_studies_of_two_precisions_both_name_theirs(tmp_path: Path) -> None:
    """The table states none, because that of its rows is not the same."""
    study, other = write_study(tmp_path, *MINE, "--preset", "quick"), tmp_path / "studies" / "other"
    summary = read_summary(study)
    config = replace(summary.config, precision="another")
    write_summary(replace(summary, config=config, study=f"{summary.study} other"), other)
    names = [summary.config.precision, "another"]
    rows = [cell.row for cell in read_own([study, other], print)["quick"]]
    assert sorted(rows) == sorted(f"transformer (precision {name}){YOURS}" for name in names)


def test_a_study_that_no_board_has_is_refused_in_one_line(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "own", *MINE, *TINY, "--task.length", "48")
    with pytest.raises(SystemExit) as stopped:
        main([str(study), "--out", str(results)])
    assert stopped.value.code == 2
    assert "every study is left out" in capsys.readouterr().err
    assert not (results / "report").exists()


def test_mean_ranks_are_over_all_tasks_among_the_layers_that_have_them_all(
    page: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mean_ranks(board_of(results), "token") is None
    assert "No mean rank: fewer than two layers are trained on all 10 tasks." in page.read_text()

    for task in TASKS:
        write_cell(results, "gla", task, [0.7, 0.7])
        write_cell(results, "lstm", task, [0.8 if task == "mqar" else 0.6] * 2)
    ranks = mean_ranks(board_of(results), "token")
    assert ranks is not None
    assert ranks.means == pytest.approx({"gla": 1.1, "lstm": 1.9})
    low, high = ranks.intervals["gla"]
    assert 1.0 == low < 1.1 < high < 1.9

    # The others stand below, with the number of their tasks. Pictures would take seconds to draw.
    monkeypatch.setattr(report, "DRAWS", ())
    main(["--out", str(results)])
    text = (results / "report" / "index.html").read_text()
    found = re.findall(
        r'data-layer="([\w-]+)".*?<td class="rank"[^>]*>\s*<span class="sequence">(.*?)<', text, re.DOTALL
    )
    assert found[:3] == [("gla", "1.1"), ("lstm", "1.9"), ("rt", "3 of 10 tasks")]
    assert dict(found[3:]) == {"transformer": "2 of 10 tasks", "deltanet": "2 of 10 tasks"}
    assert "accuracy among the 2 layers that are trained on all 10 tasks, over these tasks, with" in text


def test_ones_own_layer_is_ranked_over_the_tasks_that_it_has_under_the_protocol(results: Path) -> None:
    for task in TASKS:
        write_cell(results, "gla", task, [0.7, 0.7], sequences=[0.1, 0.1])
        write_cell(results, "lstm", task, [0.65, 0.65], sequences=[0.5, 0.5])
    board = board_of(results)
    mine, differing = (
        replace(board.cells["deltanet", task], row="mine", kind="own") for task in ("parity", "memorization")
    )
    cells = {("mine", "parity"): mine, ("mine", "memorization"): replace(differing, differs=("--steps 4",))}
    own = show(replace(board, rows={"mine": ("own", "other")} | board.rows, cells=board.cells | cells), []).own

    assert (own.title, own.counts) == ("published protocol", {"mine": 1})
    assert own.ranks is not None
    assert own.ranks.means == {"gla": 1, "lstm": 2}
    (ranks,) = own.of_some.values()
    assert ranks is not None
    assert ranks.means == {"rt": 1, "deltanet": 2, "mine": 2, "gla": 4, "lstm": 5, "transformer": 6}


def test_the_interval_of_a_mean_rank_is_that_of_resampled_tasks(results: Path) -> None:
    """Without differences between seeds, the second places among ten resampled tasks are binomial."""
    for n, task in enumerate(TASKS):
        write_cell(results, "gla", task, [0.7, 0.7])
        write_cell(results, "lstm", task, [0.8 if n < 4 else 0.6] * 2)
    ranks = mean_ranks(board_of(results), "token")
    assert ranks is not None
    for row, share in (("gla", 0.4), ("lstm", 0.6)):
        expected = [1 + binom.ppf(quantile, 10, share) / 10 for quantile in (0.025, 0.975)]
        assert ranks.intervals[row] == pytest.approx(expected)


def test_layers_whose_intervals_overlap_may_differ_in_the_same_samples(results: Path) -> None:
    """GLA is one place ahead of LSTM on every task. Three equal layers are before both on three tasks, and behind both
    on seven, so that the intervals of the mean ranks are wide."""
    for n, task in enumerate(TASKS):
        write_cell(results, "gla", task, [0.7, 0.7])
        write_cell(results, "lstm", task, [0.6, 0.6])
        for row in ("hyena", "lru", "mamba"):
            write_cell(results, row, task, [0.9 if n < 3 else 0.1] * 2)
    ranks = mean_ranks(board_of(results), "token")
    assert ranks is not None
    assert ranks.means == pytest.approx({"gla": 1.9, "lstm": 2.9, "hyena": 2.4, "lru": 2.4, "mamba": 2.4})
    assert ranks.intervals["gla"][1] > ranks.intervals["lstm"][0]
    assert ranks.behind_first["gla"] == (0, 0)
    assert ranks.behind_first["lstm"] == pytest.approx((1, 1))
    assert ranks.behind_first["hyena"][0] < 0 < ranks.behind_first["hyena"][1]
    assert sorted(ranks.level_with_first()) == ["hyena", "lru", "mamba"]


def test_the_cost_of_training_is_three_forward_passes_of_every_token(results: Path) -> None:
    write_cell(results, "gla", "parity", [0.7, 0.7])
    cell = board_of(results).cells["gla", "parity"]
    flops = cell.standing.costs.flops_per_token
    assert flops is not None
    assert training_flops(cell) == 3 * flops[min(flops)] * 20_000 * 128 * 40  # steps, sequences, positions


def test_layers_whose_seeds_have_the_same_sum_share_a_rank(results: Path) -> None:
    """A sum of floats depends on the order, and on the numbers that have the same sum."""
    counts = {"gla": (1276, 1234, 1249, 1219, 1270), "lstm": (1277, 1269, 1234, 1219, 1249)}
    assert sum(counts["gla"]) == sum(counts["lstm"])
    for task in TASKS:
        for row, correct in counts.items():
            write_cell(results, row, task, [count / 1280 for count in correct])
    board = board_of(results)
    ranks = mean_ranks(board, "token")
    assert ranks is not None
    assert ranks.means == {"gla": 1.0, "lstm": 1.0}
    cells = [board.cells[row, "parity"] for row in ("gla", "lstm")]
    assert rank_on_task(cells, "token") == {"gla": 1, "lstm": 1}


def test_a_layer_of_the_project_that_a_user_has_trained_again_is_not_ranked_twice(results: Path) -> None:
    for task in TASKS:
        for row, accuracy in (("gla", 0.9), ("lstm", 0.8)):
            write_cell(results, row, task, [accuracy] * 5)
    before = mean_ranks(board_of(results), "token")
    own = [
        replace(cell, row=row + YOURS, kind="own")
        for (of, _), cell in board_of(results).cells.items()
        for row in {"gla": ["gla", "mine:L"]}.get(of, [])
    ]
    ranks = mean_ranks(reference_board(results / "reference", "full", own), "token")
    assert before is not None
    assert ranks is not None
    assert before.means == {"gla": 1, "lstm": 2}
    assert ranks.means == {"mine:L (yours)": 1, "gla": 1, "lstm": 3}


def test_bootstrap_samples_of_the_same_mean_share_a_rank(results: Path) -> None:
    """Sums of shares of 1024 are exact, sums of shares of 1280 are rounded; the order of the layers is the same."""
    rights = {"gla": [1279, 1280, 1278, 1279, 1279], "lstm": [1280, 1277, 1279, 1279, 1280]}
    found = []
    for count in (1024, 1280):
        for task in TASKS:
            for row, of_row in rights.items():
                write_cell(results, row, task, [(right - 1280 + count) / count for right in of_row])
        found.append(mean_ranks(board_of(results), "token"))
    assert found[0] is not None
    assert found[0] == found[1]


def test_verdicts_follow_the_cells(results: Path) -> None:
    evidence = Evidence(board_of(results), Records(results / "published"), {}, [])
    assert evidence.ahead("parity", "token") == "agrees"
    assert evidence.ahead("mqar", "token") == "not shown"
    assert evidence.blocks() == "not shown"
    assert evidence.recurrence() == "partly"  # parity alone is trained
    assert (evidence.depth(), evidence.worth("parity")) == ("agrees", "not trained")
    assert evidence.acc("transformer", "copying", "token") == "not trained"

    # Where neither answers a sequence, the better tokens do not count.
    for row, mean in (("rt", 0.3), ("transformer", 0.2)):
        write_cell(results, row, "s5-permutations", [mean, mean], sequences=[0.0, 0.0])
    write_cell(results, "transformer", "parity", [1.0, 1.0])
    assert Evidence(board_of(results), Records(results / "published"), {}, []).depth() == "not shown"

    write_cell(results, "rt-block-4", "parity", [0.5, 0.5], mixer="rt")
    evidence = Evidence(board_of(results), Records(results / "published"), {}, [])
    assert evidence.ahead("parity", "token") == "differs"
    assert evidence.recurrence() == "differs"
    assert (evidence.depth(), evidence.worth("parity")) == ("not shown", "1")
    assert evidence.blocks() == "partly"


def test_a_claim_names_small_language_models_once_rt_and_the_transformer_are_finished(results: Path) -> None:
    def claimed(small: Sequence[LanguageModel]) -> str:
        return Evidence(board_of(results), Records(results / "published"), {}, small).small_models()

    rt, transformer = (language_model(layer, loss) for layer, loss in (("rt", 3.0), ("transformer", 3.5)))
    assert claimed([rt, transformer]).endswith("RT has 3.010 and the Transformer 3.510 nats per token. ")
    assert claimed([rt]) == claimed([rt, replace(transformer, finished=False)]) == ""


def test_claims_read_their_figures_from_the_published_records(results: Path) -> None:
    """Each file that a claim or an anchor names is there, and has the cell."""
    claims = {claim.where: claim for claim in read_claims(board_of(results), Records(PUBLISHED), {}, [])}
    graphs = {row[0]: row for row in claims["Table 2"].table}
    assert [float(text) for text in graphs["512"][3:5]] == [427, 149]
    assert graphs["2048"][3] == ABSENT
    assert "12 of 12 checks hold" in claims["Theorem 1 (Appendix A)"].why
    for claim in claims.values():
        assert all((PUBLISHED.parent / record).exists() for record in claim.records)
        assert len({len(row) for row in claim.table}) <= 1

    shown = anchors(Records(PUBLISHED))
    assert [row.what for row in shown if ABSENT in row.ours] == []
    assert [row.gain for row in shown[:2]] == ["2.7×", "2.4×"]
    assert len(tables(Records(PUBLISHED))) == len(list(Records(PUBLISHED).benchmarks())) >= 10


def test_a_layer_has_one_color_under_every_label() -> None:
    rt = style_of("rt")
    assert {style_of(label).color for label in ("rt-block-4", "rt (block 4)", "rt-640x6-lr0.01-seed0")} == {rt.color}
    assert style_of("transformer").color == style_of("transformer-2-layers").color == style_of("transformer-xl").color
    assert style_of("transformer").marker != style_of("transformer-xl").marker
    assert style_of("rtx").color == style_of("mine:Layer").color != rt.color
    many = styles([f"rt-{n}" for n in range(16)])
    assert styles(["mine:B", "mine:A"]) == styles(["mine:A", "mine:B"])
    assert len({(style.color, style.line) for style in many.values()}) == 16
    assert {style_of(name).color for name in ("rt", "transformer", "gla", "mine")} <= DARK.keys()


def test_names_at_the_ends_of_lines_keep_their_order_and_distance() -> None:
    places = spread([0.5, 1.0, 0.99, 0.0, 1.0], 0.1, 0.0, 1.0)
    assert places[0] == 0.5
    ordered = sorted(places)
    assert all(b - a > 0.0999 for a, b in pairwise(ordered))
    assert places[3] == 0.0
    assert max(places) == 1.0


@pytest.mark.parametrize("name", [*MIXERS, "rt-no-persistent-norm", "M" * LONGEST + " ★"])
def test_names_at_the_ends_of_lines_stay_in_their_panel(name: str) -> None:
    figure, axes = panel()
    with rc_context(STYLE):
        name_lines(axes, [("rt", 0.0, INK), (name, 1.0, INK)])
        ends = [text.get_window_extent().x1 for text in axes.texts]
    assert max(ends) <= figure.bbox.x1


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ("lab.mine:Mine (yours)", "Mine ★"),
        ("mine:KernelAttention (steps 30) (yours)", "KernelAttention ★"),
        ("mine:KernelAttention-kind-rbf (yours)", "KernelA…ind-rbf ★"),
    ],
)
def test_the_label_of_a_line_tells_variants_of_an_own_layer_apart(tmp_path: Path, row: str, label: str) -> None:
    (cell,) = read_own([write_study(tmp_path, *MINE)], print)["full"]
    assert end_label(replace(cell, row=row)) == label
