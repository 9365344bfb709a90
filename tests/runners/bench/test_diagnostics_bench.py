"""The benchmark: what it stores, what it refuses to time, what it refuses on the command line. No speed is asserted."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from mixers.rt.layer import RecurrentTransformer
from runners.bench import accuracy, preparation, scheduler
from runners.bench.__main__ import main
from runners.bench.accuracy import Check, Oracle, check_implementation
from runners.bench.cells import Figures
from runners.bench.clock import Clock
from runners.bench.diagnostics.bench import DiagnosticsBench, DiagnosticsCell
from runners.bench.diagnostics.options import IMPLEMENTATIONS, PRESETS, parse
from runners.bench.diagnostics.record import points
from runners.bench.diagnostics.report import plot
from runners.bench.implementations import Setting
from runners.bench.pretraining.implementations import LAYERS
from runners.bench.scaling import fit_exponent
from runners.bench.scheduler import Scheduler
from runners.bench.work import LayerWork

CPU = torch.device("cpu")
SHAPE = ["--width", "16", "--heads", "2", "--mlp-width", "32", "--batch-size", "4"]
PATIENT = ["--limit", "60", "--budget", "600"]  # a busy machine must not skip a cell
TINY = ["diagnostics", "--device", "cpu", *SHAPE, *PATIENT]
WIDE = ["pretraining", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHECK_LENGTHS", (9,))
    monkeypatch.setattr(preparation, "SECONDS_A_REPEAT", 1e-4)


def break_tiled(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply outputs and gradients of the tiled method."""
    right = RecurrentTransformer.forward

    def forward(self: RecurrentTransformer, x_BTD: Tensor) -> Tensor:
        z_BTD = right(self, x_BTD)
        return factor * z_BTD if self.config.implementation == "tiled" else z_BTD

    monkeypatch.setattr(RecurrentTransformer, "forward", forward)


def stored(folder: Path) -> Any:
    (path,) = (folder / "bench").glob("*.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {p.suffix for p in path.parent.iterdir()} == {".json", ".png"}
    return json.loads(path.read_text())


def test_everything_measured_is_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--lengths", "16", "20", "--runs", "2", "1", "--together-at", "16"]
    main([*TINY, *grid, "--implementations", "transformer", "rt-tiled", "--out", str(tmp_path)])
    content, shown = stored(tmp_path), capsys.readouterr().out
    assert content["complete"]
    assert content["command"].startswith("python -m runners.bench diagnostics --device cpu")
    assert content["device"].endswith("CPU")
    assert content["versions"]["torch"] == torch.__version__
    assert content["precision"] == "float32"
    places = [(cell["length"], cell["runs"], cell["phase"], cell["implementation"]) for cell in content["cells"]]
    assert places == [
        (length, runs, phase, name)
        for length, runs in ((16, 1), (16, 2), (20, 1))
        for phase in ("forward", "forward+backward", "step")
        for name in ("rt-tiled", "transformer")
    ]
    for cell in content["cells"]:
        assert cell["status"] == "timed"
        assert cell["repeats"] == 5
        assert 0 < cell["min_ms"] <= cell["median_ms"] <= cell["max_ms"]
        assert 0 < cell["error"] <= 1e-5
        assert cell["peak_gib"] is cell["target_ms"] is cell["target_met"] is None
        assert f"{cell['median_ms']:.3f}" in shown
    assert len(content["exponents"]) == 6
    assert {fit["exponent"] for fit in content["exponents"]} == {None}  # nothing is fitted to two lengths


def test_little_memory_is_not_shown_as_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "peak_gib", lambda *_: 0.00123)
    main([*TINY, "--lengths", "16", "--phases", "forward", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count(" 0.00123 ") == 4


def test_the_table_fits_80_columns_and_has_none_for_memory_that_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*TINY, "--lengths", "16", "--implementations", "rt-naive", "--limit", "1e-12", "--out", str(tmp_path)])
    table = capsys.readouterr().out.partition("stored in")[0]
    assert "GiB" not in table
    assert table.count("skipped: over 1e-12 s") == 3
    assert max(map(len, table.splitlines())) <= 80


def test_a_narrow_terminal_takes_no_figure_from_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    main([*WIDE, "--parts", "layers", "--stack", "1", "--lengths", "16", "--out", str(tmp_path)])
    table = capsys.readouterr().out.partition("stored in")[0]
    assert "GiB" not in table
    assert "…" not in table
    for cell in stored(tmp_path)["cells"]:
        assert f"{cell['error']:.1e}" in table


def test_every_number_of_runs_is_drawn_and_the_legend_lies_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self) or path.write_bytes(b"\x89PNG"))
    grid = ["--lengths", "16", "20", "--runs", "1", "2", "--together-at", "16", "--phases", "forward"]
    main([*TINY, *grid, "--implementations", "rt-tiled", "transformer", "--out", str(tmp_path)])
    (figure,) = figures
    (axes,) = figure.axes
    drawn = [(list(bars.lines[0].get_xdata()), bars.lines[0].get_marker()) for bars in axes.containers]
    assert drawn == [*[([16, 20], "o")] * 2, ([], "o"), *[([16], "s")] * 2, ([], "s")]
    labels = [text.get_text().partition(":")[0] for text in axes.get_legend().get_texts()]
    assert labels == ["RT tiled", "Transformer", "R = 1", "R = 2"]
    FigureCanvasAgg(figure).draw()
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


def test_each_of_many_numbers_of_runs_has_a_mark_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    grid = ["--lengths", "16", "--together-at", "16", "--phases", "step", "--runs", *map(str, range(1, 14))]
    bench = DiagnosticsBench(parse([*TINY[1:], *grid, "--implementations", "rt-tiled"]), CPU, "")
    bench.figures = {cell: Figures(seconds=[1e-3 * cell.runs]) for cell in bench.cells}
    plot(bench, tmp_path / "chart.png")
    (axes,) = figures[0].axes
    drawn = [(list(bars.lines[0].get_ydata()), bars.lines[0].get_marker()) for bars in axes.containers]
    marks = [mark for times, mark in drawn if times]
    assert [times for times, _ in drawn if times] == [[pytest.approx(runs)] for runs in range(1, 14)]
    assert len(set(marks)) == 13
    assert [mark for times, mark in drawn if not times] == marks  # in the legend


@pytest.mark.parametrize(
    ("benchmark", "names"), [("diagnostics", IMPLEMENTATIONS["cuda"] | IMPLEMENTATIONS["cpu"]), ("pretraining", LAYERS)]
)
def test_help_names_the_implementations(
    benchmark: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([benchmark, "--device", "cpu", "--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").replace(";", " ").split()
    assert names.keys() <= set(words)


def test_fitted_exponent() -> None:
    lengths = [32, 64, 128, 1024]
    assert fit_exponent(lengths, [3e-4 * n**1.5 for n in lengths]) == pytest.approx(1.5)
    assert fit_exponent(lengths[:2], [5.0, 5.0]) == pytest.approx(0.0, abs=1e-9)


def test_no_speed_of_a_wrong_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_tiled(monkeypatch, 1.03)
    with pytest.raises(SystemExit) as stop:
        main([*TINY, "--lengths", "16", "--implementations", "rt-tiled", "transformer", "--out", str(tmp_path)])
    assert stop.value.code == 1
    cells = stored(tmp_path)["cells"]
    wrong = [cell for cell in cells if cell["implementation"] == "rt-tiled"]
    assert len(wrong) == 3
    for cell in wrong:
        assert cell["status"].startswith("wrong: error ")
        assert "> 1.0e-05" in cell["status"]
        assert cell["median_ms"] is cell["min_ms"] is cell["max_ms"] is None
        assert cell["error"] > 0.02
    assert all(cell["median_ms"] > 0 for cell in cells if cell["implementation"] != "rt-tiled")
    # Without a terminal, each step is a line; the table follows.
    lines = [line for line in capsys.readouterr().out.splitlines() if "RT tiled" in line]
    steps = [line for line in lines if " of 6: " in line]
    assert steps[0] == "0 of 6: checking RT tiled"
    rows = lines[len(steps) :]
    assert len(rows) == 3
    assert all("wrong: error" in row for row in rows)


def bfloat16_check(name: str) -> Check:
    setting = Setting(width=32, heads=4, mlp_width=64, batch_size=4)
    return check_implementation(IMPLEMENTATIONS["cpu"][name], Oracle(setting, autocast=True), Clock(CPU))


@pytest.mark.parametrize("name", ["rt-naive", "rt-tiled", "transformer"])
def test_bfloat16_errors_are_those_of_the_oracle_in_bfloat16(name: str) -> None:
    outcome = bfloat16_check(name)
    assert outcome.problem is None
    assert outcome.error is not None
    assert 1e-4 < outcome.error < 0.05


def test_bfloat16_does_not_hide_an_error_of_a_few_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tiled(monkeypatch, 1.03)
    assert "error" in str(bfloat16_check("rt-tiled").problem)


def test_numbers_that_are_not_finite_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tiled(monkeypatch, torch.nan)
    outcome = bfloat16_check("rt-tiled")
    assert outcome.error is None
    assert "error nan > " in str(outcome.problem)


def test_what_is_too_slow_is_skipped_with_its_longer_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    prepare = preparation.prepare
    monkeypatch.setattr(scheduler, "prepare", lambda *a: prepared.append(a) or prepare(*a))  # type: ignore[func-returns-value]
    main([*TINY, "--lengths", "16", "32", "--implementations", "rt-naive", "--limit", "1e-9", "--out", str(tmp_path)])
    cells = stored(tmp_path)["cells"]
    assert [cell["status"] for cell in cells] == ["skipped: over 1e-09 s"] * 6
    assert len(prepared) == 1


def test_a_chart_of_several_numbers_of_runs_has_room_for_nothing(tmp_path: Path) -> None:
    grid = ["--lengths", "16", "--together-at", "16", "--runs", "1", "2", "--implementations", "rt-naive"]
    main([*TINY, *grid, "--limit", "1e-9", "--out", str(tmp_path)])
    assert [cell["median_ms"] for cell in stored(tmp_path)["cells"]] == [None] * 6


def test_the_budget_ends_what_is_not_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CHEAP_SECONDS", 0.0)
    arguments = ["--lengths", "16", "32", "--phases", "forward", "--implementations", "rt-tiled", "--budget", "1e-3"]
    main([*TINY, *arguments, "--out", str(tmp_path)])
    assert [cell["status"] for cell in stored(tmp_path)["cells"]] == ["timed", "skipped: budget of 0.001 s spent"]


def test_what_needs_more_than_the_rest_of_the_budget_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {16: 0.0, 32: 1e6}
    monkeypatch.setattr(DiagnosticsBench, "expected_total", lambda self, cell: expected[cell.length])
    arguments = ["--lengths", "16", "32", "--phases", "forward", "--implementations", "rt-tiled", "--budget", "1e5"]
    main([*TINY, *arguments, "--out", str(tmp_path)])
    reason = "skipped: needs more than is left of the budget of 100000 s"
    assert [cell["status"] for cell in stored(tmp_path)["cells"]] == ["timed", reason]


def test_the_budget_ends_the_repeats_of_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lengths", "16", "--phases", "forward", "--implementations", "rt-tiled", "transformer"]
    main([*TINY, *arguments, "--budget", "1e-3", "--repeats", "1000000", "--out", str(tmp_path)])
    assert [(cell["status"], cell["repeats"]) for cell in stored(tmp_path)["cells"]] == [("timed", 5)] * 2
    cut = "--budget 0.001 was spent: 2 of 2 figures have fewer than 1,000,000 repeats, at least 5: raise --budget"
    assert cut in capsys.readouterr().out.splitlines()


def test_what_is_left_of_the_budget_is_shared_by_the_cells_that_are_left() -> None:
    grid = ["--lengths", "16", "20", "--phases", "forward", "--implementations", "rt-tiled", "transformer"]
    bench = DiagnosticsBench(parse([*TINY[1:], *grid, "--budget", "100"]), CPU, "")
    timing = Scheduler(bench, lambda description: None, lambda: None)
    assert timing._end_of_share(2) - bench.started == pytest.approx(50.0, abs=5.0)
    bench.figures = dict.fromkeys(bench.cells[:2], Figures(seconds=[1.0]))
    assert timing._end_of_share(2) - bench.started == pytest.approx(100.0, abs=5.0)


def test_after_an_interruption_objects_are_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are frozen to the end make libraries print what was never freed."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "check_implementation", interrupt)
    bench = DiagnosticsBench(parse([*TINY[1:], "--lengths", "16", "--implementations", "rt-tiled"]), CPU, "")
    with pytest.raises(KeyboardInterrupt):
        Scheduler(bench, lambda description: None, lambda: None).run()
    assert gc.get_freeze_count() == 0


def test_lengths_with_every_number_of_runs_come_first() -> None:
    grid = ["--lengths", "16", "20", "24", "--runs", "1", "2", "--together-at", "20", "--phases", "forward"]
    bench = DiagnosticsBench(parse([*TINY[1:], *grid, "--implementations", "rt-tiled"]), CPU, "")
    Scheduler(bench, lambda description: None, lambda: None).run()
    assert [(cell.length, cell.runs) for cell in bench.figures] == [(20, 1), (20, 2), (16, 1), (24, 1)]
    assert [(cell.length, cell.runs) for cell in bench.cells] == [(16, 1), (20, 1), (20, 2), (24, 1)]
    lengths = [length for length, _ in points(bench, "forward", "rt-tiled", 1)]
    assert lengths == [16, 20, 24]


def test_only_what_goes_from_position_to_position_is_expected_to_take_longer_on_longer_inputs() -> None:
    bench = DiagnosticsBench(parse(TINY[1:]), CPU, "")
    bench.implementations = IMPLEMENTATIONS["cuda"]
    short, long = (
        {
            name: DiagnosticsCell(phase="step", length=length, runs=1, implementation=name)
            for name in bench.implementations
        }
        for length in (32, 1024)
    )
    bench.warm_ups = dict.fromkeys(short.values(), 0.006)  # nearly all of it launches
    expected = {name: bench.expected_pass(cell) / 0.006 for name, cell in long.items()}
    assert expected == {"rt-naive": 32, "rt-tiled": 32, "rt-tiled-graph": 32, "rt-fused": 1, "transformer": 1}


def test_lack_of_memory_and_errors_stay_in_their_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_eagerly = LayerWork.run_eagerly

    def failing(self: LayerWork) -> None:
        run_eagerly(self)
        if self.backward and self.x_RBTD.shape[2] == 16:
            method = getattr(self.layer.config, "implementation", None)
            if method == "naive":
                raise torch.OutOfMemoryError("CUDA out of memory")
            if method == "tiled":
                raise RuntimeError("bad\nkernel")

    monkeypatch.setattr(LayerWork, "run_eagerly", failing)
    with pytest.raises(SystemExit) as stop:
        main([*TINY, "--lengths", "16", "20", "--phases", "forward+backward", "--out", str(tmp_path)])
    assert stop.value.code == 1
    statuses = [cell["status"] for cell in stored(tmp_path)["cells"]]
    assert statuses == ["skipped: out of memory", "failed: RuntimeError: bad kernel", *["timed"] * 6]


def test_what_lacked_memory_beside_others_is_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_eagerly, calls = LayerWork.run_eagerly, []

    def failing_at_first(self: LayerWork) -> None:
        if self.x_RBTD.shape[2] == 16 and getattr(self.layer.config, "implementation", None) == "naive":
            calls.append(self)
            if len(calls) == 4:  # in the rounds, after two passes of warming up
                raise torch.OutOfMemoryError("CUDA out of memory")
        run_eagerly(self)

    monkeypatch.setattr(LayerWork, "run_eagerly", failing_at_first)
    main([*TINY, "--lengths", "16", "--phases", "forward", "--out", str(tmp_path)])
    assert [(cell["status"], cell["repeats"]) for cell in stored(tmp_path)["cells"]] == [("timed", 5)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no benchmark 'speed': choose from diagnostics, pretraining"),
        ([*TINY, "--sped", "1"], "unknown option --sped"),
        ([*TINY, "--lengths", "x"], "--lengths"),
        ([*TINY, "--lengths", "33"], "length"),
        ([*TINY, "--lengths"], "--lengths is missing"),
        ([*TINY, "--runs", "0"], "--runs 0 must be at least 1"),
        ([*TINY, "--repeats", "3"], "--repeats 3 must be at least 5"),
        ([*TINY, "--limit", "nan"], "--limit nan must be a number of seconds above 0"),
        (
            [*TINY, "--implementations", "rt-fused"],
            "no implementation 'rt-fused' on this device: choose from rt-naive",
        ),
        ([*TINY, "--phases", "sideways"], "--phases"),
        ([*TINY, "--heads", "3"], "heads: 3 must divide the model width 16"),
        ([*TINY, "--batch-size", "20000"], "batch size 20000 is larger than"),
        ([*TINY, "--runs", "1", "6", "--lengths", "64"], "--together-at 128: none of these is among --lengths"),
        ([*TINY, "--device"], "--device"),
        ([*TINY, "--device", "tpu"], "--device"),
        ([*WIDE, "--parts", "some"], "--parts"),
        ([*WIDE, "--widths", "100"], "width 100 is no multiple of --head-width 64"),
        ([*WIDE, "--lengths", "0"], "--lengths 0 must be at least 1"),
        ([*WIDE, "--decode-batches"], "--decode-batches is missing"),
        ([*WIDE, "--implementations", "rt-wavefront-graph"], "no implementation 'rt-wavefront-graph' on this device"),
        ([*WIDE, "--repeats", "4"], "--repeats 4 must be at least 5"),
    ],
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_defaults_go_by_device() -> None:
    options = parse(["--device", "cpu"])
    assert (options.batch_size, options.lengths, options.runs) == (8, (32, 64, 128, 256), (1,))
    gpu = PRESETS["cuda"]
    assert (gpu.batch_size, gpu.lengths, gpu.runs) == (128, (32, 64, 128, 256, 512, 1024), (1, 6, 30, 90))


@pytest.mark.gpu
def test_gpu(tmp_path: Path) -> None:
    grid = ["--lengths", "16", "32", "--runs", "1", "3", "--together-at", "32", "--limit", "60"]
    shape = ["--width", "64", "--heads", "8", "--mlp-width", "64", "--batch-size", "5"]
    main(["diagnostics", "--device", "cuda", *grid, *shape, "--out", str(tmp_path)])
    content = stored(tmp_path)
    assert {cell["implementation"] for cell in content["cells"]} == set(IMPLEMENTATIONS["cuda"])
    for cell in content["cells"]:
        assert cell["status"] == "timed"
        assert cell["peak_gib"] > 0
