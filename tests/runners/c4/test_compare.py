"""The comparison of runs: means over seeds, runs without an end, and what is refused."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import t

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.__main__ import main  # noqa: E402
from runners.c4.curve import read_curve, write_curve  # noqa: E402
from runners.c4.stored import curves_of, stored_runs, that_differ_in_the_seed  # noqa: E402
from runners.files import read_json, write_json  # noqa: E402
from tests.runners.c4.runs import configured, folder_of, run  # noqa: E402


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder: three seeds at the rate 0.01, one at 0.02, of the same text."""
    out = tmp_path_factory.mktemp("results")
    for lr, seed in ((0.01, 0), (0.01, 1), (0.01, 2), (0.02, 0)):
        run(configured(texts, out, lr=lr, seed=seed, steps=4, evaluations=2))
    return out


@pytest.fixture(autouse=True)
def a_wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def results(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "results"))


def rows(text: str) -> list[list[str]]:
    """Cells of the lines of all tables, below the headings."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]


def test_runs_that_differ_in_the_seed_alone_share_a_row_with_their_mean(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", "--out", str(results)])
    out = capsys.readouterr().out
    found = [json.loads(path.read_text()) for path in (results / "c4").glob("*/result.json")]
    losses = {lr: [r["validation_loss"] for r in found if r["config"]["lr"] == lr] for lr in (0.01, 0.02)}
    mean = sum(losses[0.01]) / 3
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in losses[0.01]) / 2)
    half = float(t.ppf(0.975, 2)) * spread / math.sqrt(3)

    cells = {row[0]: row for row in rows(out)}
    seeds, single = cells["transformer, lr 0.01"], cells["transformer, lr 0.02"]
    assert (seeds[3], single[3]) == (f"{mean:.4f} ± {half:.4f}", f"{losses[0.02][0]:.4f}")
    bits = mean / math.log(2) / found[0]["corpus"]["bytes_per_token"]
    assert seeds[4] == f"{bits:.4f}"
    assert seeds[2] == str(4 * 4 * 12)
    end = "smallest" if mean < losses[0.02][0] else "largest"
    assert f" is the {end} of 0.01, 0.02, so a better one may lie beyond it\n" in out
    assert "3 seeds" in cells
    (chart,) = (results / "figures").glob("c4-comparison-*.png")
    assert f"chart: {chart}\ntable: {chart.with_suffix('.csv')}\n" in out

    with chart.with_suffix(".csv").open() as file:
        first, second = sorted(csv.DictReader(file), key=lambda row: row["model"])
    assert (first["model"], first["seeds"], second["seeds"]) == ("transformer, lr 0.01", "3", "1")
    assert (first["remark"], second["remark"]) == ("3 seeds", "")
    assert float(first["nats_per_token"]) == pytest.approx(mean, rel=1e-12)
    assert float(first["half_width"]) == pytest.approx(half, rel=1e-6)
    assert (float(second["nats_per_token"]), second["half_width"]) == (losses[0.02][0], "")


def test_runs_without_an_end_are_last_and_say_how_far_they_came(
    texts: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a mean, because losses of other steps or of some seeds alone are not comparable."""
    stopped, diverged = (
        folder_of(configured(texts, results, lr=0.01, seed=seed, steps=4, evaluations=2)) for seed in (1, 2)
    )
    (stopped / "result.json").unlink()
    lines = (stopped / "curve.csv").read_text().splitlines(keepends=True)
    (stopped / "curve.csv").write_text("".join(lines[:3]))
    shutil.move(diverged, results / "diverged")
    main(["compare", "--out", str(results)])
    first, second, *remark = rows(capsys.readouterr().out)
    assert (first[0], second[0]) == ("transformer, lr 0.02", "transformer, lr 0.01")
    assert second[3:5] == ["", ""]
    assert " ".join(row[0] for row in remark) == "2 seeds, seed 1: step 2 of 4"

    # Alone, it has its last validation loss, and stays behind a finished run with a higher one.
    finished = folder_of(configured(texts, results, lr=0.02, steps=4, evaluations=2))
    rows_of_curve = read_curve(finished)
    write_curve(finished, [*rows_of_curve[:-1], replace(rows_of_curve[-1], validation_loss=99.0)])
    main(["compare", str(stopped), str(finished), "--out", str(results)])
    first, second, *_ = rows(capsys.readouterr().out)
    assert (first[0], first[3]) == ("transformer, lr 0.02", "99.0000")
    assert second[0] == "transformer, lr 0.01"
    assert float(second[3]) < 99

    # A diverged seed takes the mean away, too.
    shutil.move(results / "diverged", diverged)
    shutil.rmtree(stopped)
    (diverged / "result.json").unlink()
    write_json(diverged / "diverged.json", {"step": 5, "documents": [], "message": "loss nan"})
    main(["compare", "--out", str(results)])
    first, second, *remark = rows(capsys.readouterr().out)
    assert second[3:5] == ["", ""]
    assert " ".join(row[0] for row in remark) == "2 seeds, seed 2: diverged at step 5"


def test_losses_on_less_of_the_validation_text_have_a_table_of_their_own(
    texts: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(configured(texts, results, lr=0.02, steps=4, evaluations=2, validation_tokens=24))
    main(["compare", "--out", str(results)])
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("validation loss on") == 2
    assert ", 24 tokens" in out
    assert ", 48 tokens" in out
    assert len([*(results / "figures").glob("c4-comparison-*.png")]) == 2


def test_losses_on_nearly_the_same_text_are_compared(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole sequences of another length leave another rest."""
    for path in (results / "c4").glob("*/run.json"):
        described = read_json(path)
        tokens = 6848 if described["config"]["lr"] == 0.02 else 6880
        write_json(path, described | {"config": described["config"] | {"validation_tokens": tokens}})
    main(["compare", "--out", str(results)])
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("validation loss on") == 1
    assert ", 6,880 tokens" in out


def test_a_rate_that_diverged_has_been_tried(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (results / "c4").glob("*/run.json"):
        if read_json(path)["config"]["lr"] == 0.02:
            (path.parent / "result.json").unlink()
            write_json(path.parent / "diverged.json", {"step": 3, "documents": [], "message": "loss nan"})
    main(["compare", "--out", str(results)])
    assert "the best lr 0.01 is the smallest of 0.01, 0.02" in capsys.readouterr().out


def change(results: Path, seed: int, **entries: object) -> None:
    """Change the description of the run with a seed at the rate 0.01."""
    for path in (results / "c4").glob("*/run.json"):
        described = read_json(path)
        if (described["config"]["lr"], described["config"]["seed"]) == (0.01, seed):
            write_json(path, described | entries)


def test_runs_of_other_options_or_of_code_that_trains_otherwise_have_rows_of_their_own(
    texts: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(results, 1, mixer_options={"qk_norm": True})
    main(["compare", "--out", str(results)])
    cells = [row[0] for row in rows(capsys.readouterr().out)]
    assert sorted(cells) == [
        "2 seeds",
        "transformer, lr 0.01",
        "transformer, lr 0.02",
        "transformer-qk-norm, lr 0.01",
    ]

    # Code that is known to train in the same way is the same code.
    change(results, 2, code="another")
    files = [folder_of(configured(texts, results, lr=0.01, seed=n, steps=4, evaluations=2)) for n in (0, 2)]
    first, third = (folder / "rehearsal.json" for folder in files)
    write_json(third, read_json(third) | {"codes": ["another"]})
    main(["compare", "--out", str(results)])
    assert "2 seeds" not in capsys.readouterr().out
    write_json(first, read_json(first) | {"codes": [*read_json(first)["codes"], "another"]})
    main(["compare", "--out", str(results)])
    assert "2 seeds" in capsys.readouterr().out


def test_curves_of_a_chart_do_not_name_seeds_that_their_groups_begin_with(texts: Path, results: Path) -> None:
    shutil.rmtree(folder_of(configured(texts, results, lr=0.01, seed=0, steps=4, evaluations=2)))
    found = curves_of(stored_runs((results / "c4").iterdir(), print))
    assert {label: len(curves) for label, curves in found.items()} == {
        "transformer, lr 0.01": 2,
        "transformer, lr 0.02": 1,
    }


def test_a_seed_joins_others_of_which_one_trains_in_the_same_way(texts: Path, results: Path) -> None:
    folders = [folder_of(configured(texts, results, lr=0.01, seed=n, steps=4, evaluations=2)) for n in range(3)]
    runs = [
        replace(run, codes=frozenset(codes))
        for run, codes in zip(stored_runs(folders, print), ("a", "ab", "b"), strict=True)
    ]
    assert that_differ_in_the_seed(runs) == [runs]


def test_texts_whose_bytes_are_not_known_have_no_bits_per_byte(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (results / "c4").glob("*/run.json"):
        described = read_json(path)
        del described["corpus"]["bytes_per_token"]
        write_json(path, described)
    main(["compare", "--out", str(results)])
    shown = {row[0]: row[4] for row in rows(capsys.readouterr().out) if row[0] != "3 seeds"}
    assert shown == {"transformer, lr 0.01": "", "transformer, lr 0.02": ""}


def test_a_damaged_run_is_left_out_with_a_line(texts: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(configured(texts, results, lr=0.02, steps=4, evaluations=2))
    (folder / "result.json").write_text("{")
    strange = results / "c4" / "strange"
    strange.mkdir()
    write_json(strange / "run.json", {"config": {}, "mixer_options": {}, "corpus": {}, "code": "x"})
    main(["compare", "--out", str(results)])
    out = capsys.readouterr().out
    assert "left out of the comparison: strange: " in out
    assert f"left out of the comparison: {folder.name}: {folder / 'result.json'} is damaged" in out
    assert [row[0] for row in rows(out)] == ["transformer", "3 seeds"]


@pytest.mark.parametrize("content", ["nothing", "no run", "twice"])
def test_what_cannot_be_compared_is_one_line_and_status_2(
    content: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = next((results / "c4").iterdir())
    copy = Path(shutil.copytree(one, tmp_path / "other" / one.name))
    arguments, said = {
        "nothing": (["--out", str(tmp_path / "new")], f"{tmp_path / 'new' / 'c4'} has no run that can be read: train"),
        "no run": ([str(results)], f"no run at {results}: give the folder of a run (results/c4/...)"),
        "twice": ([str(one), str(copy)], f"{one} and {copy} hold the same run: name one of them"),
    }[content]
    with pytest.raises(SystemExit) as stop:
        main(["compare", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
