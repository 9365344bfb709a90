"""``diagnostics --layers``: what a row holds, what gets no number, how targets are judged. No speed is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from mixers.ops.native.norm import norm_library
from mixers.registry import MIXERS, find_mixer
from mixers.rt.dispatch import choose
from runners.bench import accuracy, preparation, scheduler
from runners.bench.__main__ import main
from runners.bench.accuracy import Check
from runners.bench.cells import Figures
from runners.bench.diagnostics.layers import bench as layers_bench
from runners.bench.diagnostics.layers.bench import LayerCell, LayersBench
from runners.bench.diagnostics.layers.options import PRESETS, parse
from runners.bench.diagnostics.layers.oracle import LayerOracle
from runners.bench.diagnostics.layers.record import cell_to_dict, to_dict
from runners.bench.diagnostics.layers.report import _targets, plot, rows
from runners.bench.implementations import Setting

CPU = torch.device("cpu")
NORMS = ["rms_norm native"] if norm_library(torch.float32) else []  # PyTorch's own have no name
TINY = ["--device", "cpu", "--width", "16", "--mlp-width", "32", "--batch-size", "4", "--limit", "60"]
LENGTHS = ["--lengths", "16", "--together-at", "16"]
MODULE = """
from dataclasses import dataclass, replace
import torch
from torch import nn
from mixers.base import Layer

class Scaled(Layer):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        factor: float = 1.0

    def __init__(self, config, shape):
        super().__init__(config, shape)
        self.gain = nn.Parameter(torch.ones(shape.width))
        self.closed = nn.Parameter(torch.zeros(shape.width))

    def forward(self, x_BTD):
        return self.config.factor * (self.gain * x_BTD + self.closed * x_BTD.cumsum(1))

class Wrong(Scaled):
    @classmethod
    def plain_config(cls, config):
        return replace(config, factor=1.03)

class Broken(Scaled):
    def forward(self, x_BTD):
        raise RuntimeError("no such\\nkernel")
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short checks and repeats; no cache of another process; layers of a user's module."""
    monkeypatch.setattr(accuracy, "CHECK_LENGTHS", (9,))
    monkeypatch.setattr(preparation, "SECONDS_A_REPEAT", 1e-4)
    (tmp_path / "own_layers_of_a_bench.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def own(name: str) -> str:
    return f"own_layers_of_a_bench:{name}"


def run(folder: Path, *arguments: str) -> Any:
    main(["diagnostics", *TINY, "--out", str(folder), *arguments])
    return stored(folder)


def stored(folder: Path) -> Any:
    (path,) = (folder / "bench").glob("*.json")
    assert path.name.startswith("diagnostics-layers-")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


def on_gpu(monkeypatch: pytest.MonkeyPatch, *names: str) -> LayersBench:
    """Return a run with the defaults of a GPU, in which nothing is measured yet."""
    monkeypatch.setitem(PRESETS, "cpu", PRESETS["cuda"])
    grid = ["--lengths", "128", "256"]
    bench = LayersBench(parse(["--device", "cpu", "--layers", *names, *grid]), CPU, "")
    monkeypatch.setattr(bench.clock, "cuda", True)
    return bench


def figures(milliseconds: float, gib: float = 1.0, first: float = 5.0) -> Figures:
    facts = {"first_step_seconds": first, "methods": [], "compiled": True}
    return Figures(seconds=[1e-3 * milliseconds] * 5, passes=1, peak_gib=gib, facts=facts)


def test_a_row_holds_times_errors_and_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--lengths", "20", "16", "--together-at", "16", "--runs", "2", "1"]
    content = run(tmp_path, "--layers", "transformer", own("Scaled"), *grid)
    table = capsys.readouterr().out
    assert content["complete"]
    assert content["command"].startswith("python -m runners.bench diagnostics --device cpu")
    assert content["versions"]["torch"] == torch.__version__
    assert content["caches_filled_at_start"].keys() == {"inductor", "triton"}

    cells = content["cells"]
    assert [(cell["length"], cell["implementation"], cell["runs"]) for cell in cells] == [
        *((16, name, runs) for name in ("transformer", own("Scaled")) for runs in (1, 2)),
        *((20, name, 1) for name in ("transformer", own("Scaled"))),
    ]
    for cell in cells:
        assert (cell["status"], cell["repeats"], cell["compiled"]) == ("timed", 5, False)
        assert cell["methods"] == NORMS
        assert 0 < cell["min_ms"] <= cell["median_ms"] <= cell["max_ms"]
        assert cell["first_step_seconds"] > 0
        assert 0 < cell["error"] < 1e-5
        assert cell["targets"] == []
        assert f"{cell['median_ms']:.2f} (" in table
    assert table.count("; ".join(["not compiled", *NORMS])) == 4


def test_the_methods_of_a_step_are_stored_by_name() -> None:
    bench = LayersBench(parse([*TINY, "--layers", "rt", *LENGTHS]), CPU, "")
    expected = {f"rt {choose('auto', torch.zeros(1, 16, 16), 32, 2, 1)}", *NORMS}
    assert set(bench.build(bench.cells[0]).facts["methods"]) == expected


def test_a_layer_that_fails_or_is_wrong_is_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--layers", own("Broken"), own("Wrong"), own("Scaled"), *LENGTHS)
    assert stop.value.code == 1
    broken, wrong, sound = stored(tmp_path)["cells"]
    assert broken["status"] == "failed: RuntimeError: no such kernel"
    assert wrong["status"].startswith("wrong: error 2.9e-02 > 1.0e-05 in ")
    for cell in (broken, wrong):
        assert cell["median_ms"] is cell["peak_gib"] is cell["first_step_seconds"] is None
    assert sound["status"] == "timed"
    table = capsys.readouterr().out
    assert "failed: RuntimeError: no such kernel" in table
    assert "wrong: error 2.9e-02" in table


def test_the_first_step_comes_before_the_check_which_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    build, check = layers_bench.first_step, scheduler.check_implementation
    monkeypatch.setattr(layers_bench, "first_step", lambda *a: order.append("step") or build(*a))
    monkeypatch.setattr(scheduler, "check_implementation", lambda *a: order.append("check") or check(*a))
    bench = LayersBench(parse([*TINY, "--layers", own("Scaled"), *LENGTHS, "--runs", "1", "2"]), CPU, "")
    scheduler.Scheduler(bench, lambda description: None, lambda: None).run()
    assert order == ["step", "step", "check"]
    assert [figures.status for figures in bench.figures.values()] == ["timed", "timed"]


def test_all_names_every_registered_layer_once() -> None:
    assert parse([*TINY, "--layers", "lstm", "all", *LENGTHS]).layers == tuple(dict.fromkeys(["lstm", *MIXERS]))


def test_parameters_that_start_at_zero_are_drawn_for_the_check() -> None:
    setting = Setting(width=16, heads=0, mlp_width=32, batch_size=4)
    params, *_ = LayerOracle(find_mixer(own("Scaled")), setting, autocast=False).sample(9)
    assert (params["gain"] == 1).all()
    assert params["closed"].std() > 0.05
    assert not params["closed"][0].equal(params["closed"][1])


def test_targets_are_judged_by_runs_and_by_the_pace_of_rt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = on_gpu(monkeypatch, "rt", "lstm")

    def cell(name: str, length: int, runs: int) -> LayerCell:
        return LayerCell(implementation=name, length=length, runs=runs)

    bench.figures = {
        cell("rt", 128, 1): figures(2),
        cell("rt", 128, 6): figures(3.5),
        cell("rt", 128, 30): figures(12, gib=5),
        cell("lstm", 128, 1): figures(9),
        cell("lstm", 128, 6): figures(4.1),
        cell("lstm", 128, 30): figures(11, gib=13, first=31),
        cell("rt", 256, 1): figures(5),
        cell("lstm", 256, 1): figures(5.1),
    }
    shown = [_targets(row).replace("\n", "; ") for layers in rows(bench).values() for row in layers]
    assert shown == [
        "met",
        "missed: 4 ms at R 6; 12 GiB at R 30; 30 s to the first step at R 30",
        "met",
        "missed: 5 ms at R 1",
    ]
    figures_of_pace = [target["figure"] for target in cell_to_dict(bench, cell("rt", 256, 1))["targets"]]
    assert figures_of_pace == ["first_step_seconds"]
    json.dumps(to_dict(bench), allow_nan=False)


def test_the_chart_is_sorted_by_time_with_what_has_none_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    bench = on_gpu(monkeypatch, "gla", "lstm", "rt")
    times = {"lstm": 30.0, "rt": 10.0}
    bench.figures = {
        cell: figures(times[cell.implementation]) if cell.implementation in times else Figures(status="failed: x")
        for cell in bench.cells
    }
    plot(bench, tmp_path / "chart.png")
    for axes in drawn[0].axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rt", "lstm", "gla"]
        assert list(axes.containers[-1].lines[0].get_xdata()) == [pytest.approx(10), pytest.approx(30)]


def test_once_the_budget_is_spent_layers_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CHEAP_SECONDS", 0.0)
    cells = run(tmp_path, "--layers", own("Scaled"), "rt", *LENGTHS, "--budget", "1e-3")["cells"]
    assert [cell["status"] for cell in cells] == ["timed", "skipped: budget of 0.001 s spent"]


def test_no_figure_at_all_leaves_a_chart_without_marks(tmp_path: Path) -> None:
    cells = run(tmp_path, "--layers", own("Scaled"), *LENGTHS, "--limit", "1e-12")["cells"]
    assert [cell["status"] for cell in cells] == ["skipped: over 1e-12 s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "rnn"], "no mixer 'rnn': choose from transformer"),
        (["--layers"], "--layers is missing"),
        (["--layers", "rt", "--lengths", "16", "--runs", "1", "2"], "--together-at 32 is not among --lengths"),
        (["--layers", "rt", "--phases", "step"], "unknown option --phases"),
    ],
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "out", *arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_check_that_was_not_made_has_no_outcome() -> None:
    bench = LayersBench(parse([*TINY, "--layers", "rt", *LENGTHS]), CPU, "")
    assert bench.check_of(bench.cells[0]) == Check(error=None, problem=None)


@pytest.mark.gpu
def test_gpu(tmp_path: Path) -> None:
    shape = ["--width", "64", "--mlp-width", "64", "--batch-size", "5"]
    grid = ["--lengths", "16", "--together-at", "16", "--runs", "1", "3"]
    main(["diagnostics", "--layers", "rt", "gla", *grid, *shape, "--limit", "60", "--out", str(tmp_path)])
    cells = stored(tmp_path)["cells"]
    assert [(cell["status"], cell["compiled"]) for cell in cells] == [("timed", False)] * 2 + [("timed", True)] * 2
    assert all("rt fused" in cell["methods"] for cell in cells[:2])
    assert all({"rms_norm", "cross_entropy"} <= set(cell["methods"]) for cell in cells)
    assert all(cell["peak_gib"] > 0 for cell in cells)
