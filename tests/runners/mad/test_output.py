"""The last ten lines of a command, against the records of its runs; names; narrow terminals."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from mixers.transformer import Transformer
from runners import compare, records
from runners.mad import __main__ as mad
from runners.mad.points import chosen, points
from runners.mad.rows import ENTRIES, file_of
from runners.mad.tables import labelled
from tests.runners.mad.commands import TINY, planned, trained
from tests.runners.mad.made_up import as_shown, interval_of, layer, record, table

TASKS = ("in-context-recall", "parity", "compression")
ROWS = ("transformer", "lru", "linear-attention")
SMALL = [*TINY, "--lr", "1e-3", "--weight-decay", "0", "--seeds", "2"]
Interval = tuple[float, float, float]


def accuracies(places: Iterator[Path]) -> list[float]:
    return [one.metrics["test"]["token_accuracy"] or 0.0 for _, one in records.read_all(*places)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of reference rows, which have the settings of ``SMALL``."""
    folder = tmp_path_factory.mktemp("reference")
    options, experiments = planned(["--mixer", *ROWS, "--task", *TASKS, *SMALL])
    for one in experiments:
        lr, weight_decay = options.lr, options.weight_decay
        found = trained(folder / "studies", one, lr=lr, weight_decay=weight_decay, seeds=2)
        file = file_of(folder, "full", ENTRIES[one.mixer], one.task)
        records.write_all(file, (run for _, run in records.read_all(*found["file"])))
    return folder


def places_of(intervals: Mapping[str, Interval], own: str) -> tuple[int, str]:
    """Rank and counts of a layer among means with the ends of their intervals."""
    mean, low, high = intervals[own]
    others = [of for name, of in intervals.items() if name != own]
    better = sum(other > high for _, other, _ in others)
    worse = sum(other < low for *_, other in others)
    rank = 1 + sum(round(other - mean, 12) > 0 for other, *_ in others)
    return rank, f"of {len(intervals)}: {better} ahead, {len(others) - better - worse} tied, {worse} behind"


@pytest.mark.usefixtures("undiagnosed", "wide_terminal")
@pytest.mark.parametrize("tasks", [TASKS[:1], TASKS])
def test_the_last_ten_lines_say_where_the_layer_stands(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks: tuple[str, ...]
) -> None:
    out = ["--reference", str(reference), "--out", str(tmp_path)]
    mad.main(["--mixer", "gla", "--task", *tasks, *SMALL, *out])
    text = capsys.readouterr().out
    last = text.splitlines()[-10:]

    # From the records alone: means, intervals and ranks on each task.
    ranks: dict[str, list[int]] = {name: [] for name in (*ROWS, "gla")}
    for task in tasks:
        found = {name: interval_of(accuracies(iter([reference / name / f"{task}.jsonl"]))) for name in ROWS}
        mine = accuracies((tmp_path / "studies").glob(f"gla-{task}-*/*/record.json"))
        found["gla"] = interval_of(mine)
        for name in found:
            ranks[name].append(places_of(found, name)[0])
        rank, counts = places_of(found, "gla")
        own = re.split(r"  +", re.search(rf"^(→ gla|{task}.*?)  .*–.*$", text, re.MULTILINE)[0])  # type: ignore[index]
        assert own[1] == as_shown(mine)
        assert own[3:] == [f"{rank} of 4", *re.findall(r"(\d+) (?:ahead|tied|behind)", counts)]
        if len(tasks) == 1:
            place = re.compile(rf"gla on {task} \(custom\): {rank}(st|nd|rd|th) {counts}$")
            assert any(map(place.match, last))

            # Its neighbours, and the Transformer.
            order = sorted(found, key=lambda name: -found[name][0])
            at = order.index("gla")
            shown = [line.split()[0] for line in last if re.search(r"\d of 4", line) and "ahead" not in line]
            assert {"transformer", *order[max(0, at - 1) : at], *order[at + 1 : at + 2]} <= {*shown}

    if len(tasks) > 1:
        means = {name: fmean(of) for name, of in ranks.items()}
        place = 1 + sum(mean < means["gla"] for mean in means.values())
        (overall,) = (line for line in last if line.startswith("gla over 3 tasks: "))
        assert re.search(rf": {place}(st|nd|rd|th) of 4 by mean rank, {means['gla']:.1f}; beside it ", overall)

    # Costs relative to the Transformer; where the rest is.
    (gla, *_), (other, *_) = (
        [one for _, one in records.read_all(place)] for place in (tmp_path / "studies", reference / "transformer")
    )
    assert f"parameters {gla.parameters / 1000:.2f}k ({gla.parameters / other.parameters:.3g}×)" in last[-3]
    assert last[-2].endswith("rows with costs: the .csv beside it, or --verbose")
    assert last[-1].startswith(f"runs and diagnosis: {tmp_path}/studies")
    assert len(text.splitlines()) <= 10 + 3 * len(tasks)


class Foreign(Transformer):
    @dataclass(frozen=True, kw_only=True)
    class Config(Transformer.Config):
        scale: float = 1.0
        names: tuple[str, ...] = ()


def test_no_two_settings_share_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In tables, sentences and folders; of a layer from outside and of a registered one."""
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Foreign))
    settings = [["--mixer.heads", n] for n in ("2", "4", "8")]
    scales = [["--mixer.scale", y] for y in ("0.1234567", "0.1234568", "2")]
    of = {
        "layers_of_others:L": [*settings, *scales, ["--mixer.names", "x", "y"], ["--mixer.names", "x-y"]],
        "rt": settings,
    }
    experiments = [
        planned(["--mixer", mixer, "--task", "parity", *TINY, *more])[1][0]
        for mixer, all_ in of.items()
        for more in all_
    ]
    assert len({one.label for one in experiments}) == len(experiments)
    assert len({one.folder(tmp_path).name.partition("-parity")[0] for one in experiments}) == len(experiments)
    found = [record(layer=one.label, study=one.name, mixer=one.mixer) for one in experiments]
    assert {*labelled(chosen(points(table(*found))))["label"]} == {one.label for one in experiments}
    assert experiments[0].label == "layers_of_others:L-heads-2"
    assert experiments[6].label == "layers_of_others:L-names-x-y"


def listed(tmp_path: Path) -> None:
    mad.main(["--list", "--mixer", "transformer"])


def compared(tmp_path: Path) -> None:
    for one in (*layer("rt", (0.5, 0.7)), *layer("mine", (0.25, 0.2))):
        records.write(tmp_path / "studies" / one.layer / f"seed{one.seed}", one)
    compare.main(["--out", str(tmp_path), "--reference", "none"])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("columns", ["0", "20", "60"])
@pytest.mark.parametrize(
    ("show", "cells"), [(listed, ["transformer", "197k"]), (compared, ["rt", as_shown([0.5, 0.7])])]
)
def test_a_narrow_terminal_keeps_the_cells(
    show: Callable[[Path], Any], cells: list[str], columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Some schedulers set no columns at all."""
    monkeypatch.setenv("COLUMNS", columns)
    show(tmp_path)
    assert any(all(cell in line for cell in cells) for line in capsys.readouterr().out.splitlines())
