"""The benchmarks: what they store and show, what gets no speed, and what they refuse. No speed is asserted."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mixers.base import Shape
from mixers.decoding import LayerDecoder
from mixers.registry import MIXERS
from mixers.rt.dispatch import choose
from mixers.rt.layer import RecurrentTransformer
from runners.bench import diagnostics, layers, measure, pretraining
from runners.bench.__main__ import main
from runners.bench.measure import Case, Common, Implementation, Pass, Record, check, draw
from runners.bench.prepare import prepared
from runners.benchmarks import read_benchmarks
from runners.c4.step import ModelStepper

CPU = torch.device("cpu")
SHAPE = Shape(width=16, mlp_width=32)
SMALL = ["--device", "cpu", "--limit", "60"]  # a busy machine must not skip a case
DIAGNOSTICS = ["diagnostics", *SMALL, "--width", "16", "--heads", "2", "--mlp-width", "32", "--batch-size", "4"]
LAYERS = ["layers", *SMALL, "--width", "16", "--batch-size", "4", "--lengths", "16"]
QUICK = ["--implementations", *(name for name in diagnostics.IMPLEMENTATIONS["cpu"] if name != "rt-naive")]
PRETRAINING = ["pretraining", *SMALL, "--widths", "32", "--head-width", "16", "--models", "2", "32", "--seq-len", "6"]
PRETRAINING += ["--vocabulary", "50", "--batch-size", "4", "--batches", "2", "--decode-batches", "3", "--lengths"]
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
        self.matrix = nn.Parameter(torch.randn(shape.width, shape.width))

    def forward(self, x_BTD):
        return self.config.factor * (self.gain * x_BTD + self.closed * x_BTD.cumsum(1) + 0.1 * x_BTD @ self.matrix)

class Wrong(Scaled):
    @classmethod
    def plain_config(cls, config):
        return replace(config, factor=1.03)

class Broken(Scaled):
    def forward(self, x_BTD):
        raise RuntimeError("no such\\nkernel")
"""


def own(name: str) -> str:
    return f"own_layers_of_a_bench:{name}"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Short checks and repeats; layers of a user's module."""
    monkeypatch.setattr(measure, "CHECK_LENGTH", 9)
    monkeypatch.setattr(measure, "REPEAT_MS", 1e-3)
    (tmp_path / "own_layers_of_a_bench.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for cached in (measure.oracle, measure.check, pretraining.check_decoding):
        cached.cache_clear()


def run(folder: Path, arguments: list[str], status: int = 0) -> Any:
    """Run a benchmark; return its record."""
    with pytest.raises(SystemExit, match=str(status)) if status else contextlib.nullcontext():
        main([*arguments, "--out", str(folder)])
    (path,) = (folder / "bench").iterdir()
    return json.loads(path.read_text())


def break_tiled(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply outputs and gradients of RT's tiled method."""
    right = RecurrentTransformer.forward

    def forward(self: RecurrentTransformer, x_BTD: Tensor) -> Tensor:
        return right(self, x_BTD) * (factor if self.config.implementation == "tiled" else 1)

    monkeypatch.setattr(RecurrentTransformer, "forward", forward)


PLACES: list[tuple[list[str], tuple[str, ...], list[tuple[Any, ...]]]] = [
    (
        [*DIAGNOSTICS, *QUICK, "--lengths", "16", "18", "20", "--phases", "forward", "step", "--runs", "2"],
        ("length", "phase", "runs", "implementation"),
        [(length, phase, 2, name) for length in (16, 18, 20) for phase in ("forward", "step") for name in QUICK[1:]],
    ),
    (
        [*LAYERS, "20", "24", "--layers", own("Scaled"), "transformer", "--runs", "2", "1"],
        ("length", "implementation", "runs", "width"),
        [(n, name, runs, 16) for n in (16, 20, 24) for name in ("transformer", own("Scaled")) for runs in (2, 1)],
    ),
    (
        [*PRETRAINING, "4", "6", "8", "--depths", "2", "--implementations", "rt-tiled", "gla"],
        ("phase", "layers", "batch_size", "length", "implementation", "width"),
        [
            *(
                (phase, 2, 2, length, name, 32)
                for length in (4, 6, 8)
                for phase in ("forward", "forward+backward")
                for name in ("rt-tiled", "gla")
            ),
            *(("training", 2, 4, 6, name, 32) for name in ("rt-tiled", "gla")),
            *(("decode", 2, 3, 6, f"{mixer}-static-cache", 32) for mixer in ("rt", "transformer")),
        ],
    ),
]


@pytest.mark.parametrize(("arguments", "names", "expected"), PLACES, ids=["diagnostics", "layers", "pretraining"])
def test_a_record_holds_every_figure_and_the_report_reads_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    names: tuple[str, ...],
    expected: list[tuple[Any, ...]],
) -> None:
    content = run(tmp_path, arguments)
    shown = capsys.readouterr().out
    assert content["complete"]
    assert content["benchmark"] == arguments[0]
    assert content["command"].startswith(f"python -m runners.bench {arguments[0]} --device cpu")
    assert content["device"].endswith("CPU")
    assert content["versions"]["torch"] == torch.__version__
    assert content["precision"] == "float32"
    assert content["options"]["repeats"] == 5
    assert content["elapsed_seconds"] > 0

    cells = content["cells"]
    assert [tuple(cell[name] for name in names) for cell in cells] == expected
    for cell in cells:
        assert (cell["status"], cell["repeats"], cell["peak_gib"]) == ("timed", 5, None)
        assert 0 < cell["min_ms"] <= cell["median_ms"] <= cell["max_ms"]
        assert cell["spread"] == pytest.approx((cell["max_ms"] - cell["min_ms"]) / cell["median_ms"])
        tokens = cell["batch_size"] * cell.get("runs", 1) * (1 if cell.get("phase") == "decode" else cell["length"])
        assert cell["tokens_per_second"] == pytest.approx(tokens / (1e-3 * cell["median_ms"]))
        assert cell["setup_seconds"] > 0
        assert 0 < cell["error"] < 1e-5
        assert f"{cell['median_ms']:.4g}" in shown
        assert ", ".join(cell.get("methods", [])) in shown
        at = {name: cell[name] for name in names} | {"implementation": "transformer"}
        theirs = [cell["median_ms"] / other["median_ms"] for other in cells if at.items() <= other.items()]
        assert cell["relative"] == (theirs[0] if theirs else None)
        assert len(theirs) == (arguments[0] != "pretraining")

    # What the report does with published records.
    shutil.move(tmp_path / "bench", tmp_path / "2026-12-01-bench")
    ((_, found),) = read_benchmarks(tmp_path).items()
    assert [cell["median_ms"] for cell in found["cells"]] == [cell["median_ms"] for cell in cells]


def test_steps_name_their_kernels_and_decoding_its_cache(tmp_path: Path) -> None:
    (step,) = run(tmp_path / "step", [*LAYERS, "--layers", "rt"])["cells"]
    assert f"rt {choose('auto', torch.zeros(1, 16, 16), 64, 16, 1)}" in step["methods"]
    assert step["compiled"] is False

    rt, transformer = run(tmp_path / "decode", [*PRETRAINING, "4", "--parts", "decode"])["cells"]
    pairs = 2 * 2 * 3 * 6 * 32 * 4  # keys and values of two layers, for three sequences of six positions, in float32
    assert (transformer["cache_bytes"], rt["cache_bytes"]) == (pairs, pairs + pairs // 6)
    assert rt["parameters"] == 2 * (12 * 32**2 + 4 * 32) + 2 * 128 * 32 + 32


# What gets no speed.


def test_no_speed_of_a_wrong_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_tiled(monkeypatch, 1.03)
    right = LayerDecoder.step
    monkeypatch.setattr(LayerDecoder, "step", lambda *arguments: 1.03 * right(*arguments))
    arguments = [
        [*DIAGNOSTICS, "--lengths", "16", "--implementations", "rt-tiled", "transformer"],
        [*LAYERS, "--layers", own("Wrong"), own("Scaled")],
        [*PRETRAINING, "4", "--implementations", "rt-tiled", "transformer"],
    ]
    for words in arguments:
        cells = run(tmp_path / words[0], words, status=1)["cells"]
        wrong = [cell for cell in cells if cell["implementation"] in ("rt-tiled", own("Wrong"))]
        wrong += [cell for cell in cells if cell.get("phase") == "decode"]
        for cell in cells:
            if cell in wrong:
                assert cell["status"].startswith("wrong: error ")
                assert cell["error"] > 0.01
                assert {cell[name] for name in measure.TIMES} == {None}
            else:
                assert cell["median_ms"] > 0
        shown = capsys.readouterr().out
        assert shown.count("wrong: error ") == len(wrong) > 0
        assert "nan" not in shown.lower()


@pytest.mark.parametrize("name", ["rt-naive", "rt-tiled", "transformer"])
def test_bfloat16_is_held_to_the_error_of_the_plain_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "product_precision", lambda device: "bfloat16")
    error, problem = check(diagnostics.IMPLEMENTATIONS["cpu"][name], SHAPE, 4, 2, CPU)
    assert problem is None
    assert 1e-4 < (error or 0.0) < 0.05


@pytest.mark.parametrize(("factor", "words"), [(1.03, "error 3."), (torch.nan, "error nan > ")])
def test_bfloat16_hides_neither_a_few_percent_nor_nan(
    factor: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "product_precision", lambda device: "bfloat16")
    break_tiled(monkeypatch, factor)
    error, problem = check(Implementation(mixer="rt", method="tiled"), SHAPE, 4, 2, CPU)
    assert words in str(problem)
    assert (error is None) == (factor != factor)


def test_parameters_that_hide_what_they_multiply_get_random_numbers() -> None:
    build = Implementation(mixer=own("Scaled")).build
    module, (x, dz, gain, closed, matrix) = draw(lambda: build(SHAPE, None, CPU), 2, 3, 5, 16, CPU)
    assert x.shape == dz.shape == (2, 3, 5, 16)
    assert (gain - 1).std() > 0.05
    assert closed.std() > 0.05
    assert not closed[0].equal(closed[1])
    assert matrix[0].equal(module.get_parameter("matrix"))


def case(name: str, run: Callable[[], object], finite: bool = True) -> Case:
    return Case({"length": 4, "implementation": name}, lambda: Pass(run, lambda: finite, 4), lambda: (1e-7, None))


def record(folder: Path, **options: Any) -> Record:
    return Record("diagnostics", Common(out=folder, **options), CPU, [])


def test_errors_stay_in_their_rows_and_the_record_is_whole_after_each_group(tmp_path: Path) -> None:
    calls: list[str] = []

    def failing(error: Exception, calls_before: int) -> Callable[[], None]:
        def run() -> None:
            calls.append(str(error))
            if calls.count(str(error)) > calls_before:
                raise error

        return run

    def crowded() -> None:
        calls.append("crowded")
        if calls.count("crowded") == 3:  # in the rounds
            raise torch.OutOfMemoryError("CUDA out of memory")

    made = record(tmp_path)
    rows = made.measure([
        case("broken", failing(RuntimeError("bad\nkernel"), 0)),
        case("large", failing(torch.OutOfMemoryError("CUDA out of memory"), 0)),
        case("crowded", crowded),
        case("late", failing(RuntimeError("later"), 4)),
        case("infinite", lambda: None, finite=False),
        case("sound", lambda: None),
    ])  # fmt: skip
    assert [row["status"] for row in rows] == [
        "failed: RuntimeError: bad kernel",
        "skipped: out of memory",
        "timed",
        "failed: RuntimeError: later",
        "wrong: not finite",
        "timed",
    ]
    assert [row["repeats"] for row in rows] == [None, None, 5, None, None, 5]
    stored = json.loads(made.path.read_text())
    assert (stored["cells"], stored["complete"]) == (rows, False)
    with pytest.raises(SystemExit, match="1"):
        made.finish()
    assert json.loads(made.path.read_text())["complete"]


def test_cases_take_turns_before_they_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEAT_MS", 0.0)  # one pass a repeat
    order: list[str] = []

    def checked() -> tuple[float, None]:
        order.append("!")
        return 0.0, None

    cases = [case(name, partial(order.append, name))._replace(check=checked) for name in "ab"]
    record(tmp_path).measure(cases)
    assert "".join(order) == "aabb" + 5 * "ab" + "!!"


def test_what_is_too_slow_or_has_no_kernel_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [*DIAGNOSTICS, "--lengths", "16", "--limit", "1e-12", "--phases", "forward"]
    assert {cell["status"] for cell in run(tmp_path, slow)["cells"]} == {"skipped: over 1e-12 s"}
    monkeypatch.setattr(measure, "product_precision", lambda device: "bfloat16")
    with pytest.raises(measure.Skipped, match="no kernel for this shape"):
        Implementation(mixer="rt", method="native").build(SHAPE, 2, CPU)


def test_a_model_that_lacks_memory_is_trained_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ModelStepper.step

    def failing(self: ModelStepper, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.micro > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, tokens_BT)

    monkeypatch.setattr(ModelStepper, "step", failing)
    arguments = [*PRETRAINING, "4", "--parts", "training", "--implementations", "transformer", "--recompute"]
    cells = run(tmp_path, arguments)["cells"]
    found = [(c["micro_batch_size"], c["recompute"], c["status"]) for c in cells]
    assert found == [(None, True, "skipped: out of memory"), (2, True, "timed")]


# What only a GPU does, with its functions replaced.


@pytest.mark.parametrize("writes", [True, False])
def test_a_graph_that_writes_nothing_is_wrong(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_device(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run if writes else lambda: None

    monkeypatch.setattr(measure, "captured", without_device)
    _, problem = check(Implementation(mixer="transformer", graph=True), SHAPE, 2, 2, CPU)
    assert (problem is None) == writes


def test_what_other_processes_cannot_do_is_left_to_this_one() -> None:
    implementation, sizes = Implementation(mixer="transformer"), {"batch": 2, "length": 4, "backward": False}
    works = partial(measure.random_pass, implementation, SHAPE, 2, None, CPU, **sizes)
    fails, ends = partial(divmod, 1, 0), partial(os._exit, 1)
    right, wrong = partial(check, implementation, SHAPE, 2, 2, CPU), partial(tuple, (0.5, "wrong"))
    places = [{"implementation": name, "length": length} for name, length in (("a", 4), ("a", 8), ("b", 8), ("b", 8))]
    functions: list[Any] = [(works, right), (fails, right), (works, fails), (works, wrong)]
    cases = [Case(place, *pair) for place, pair in zip(places, functions, strict=True)]
    found = prepared(cases, CPU)
    assert [case[:2] for case in found] == [case[:2] for case in cases]
    assert [(case.setup_seconds or 0) > 0 for case in found] == [True, False, True, True]
    assert found[0].check() == found[1].check()
    assert (found[0].check()[1], found[2].check, found[3].check()) == (None, fails, wrong())

    ending = [cases[0]._replace(build=ends)]
    assert prepared(ending, CPU) == ending


# Options.


def test_all_layers_are_the_registered_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(
        Record, "measure", lambda self, cases: measured.extend(c.place["implementation"] for c in cases)
    )
    monkeypatch.setattr(Record, "finish", lambda self: None)
    main([*LAYERS, "--layers", "all", "--width", "32", "--out", str(tmp_path)])
    assert measured == list(MIXERS)


def test_defaults_go_by_device() -> None:
    for module in (diagnostics, layers, pretraining):
        cpu, gpu = module.PRESETS["cpu"], module.PRESETS["cuda"]
        assert (
            measure.options_and_device(type(cpu), module.PRESETS, ["--device", "cpu"])[0].batch_size == cpu.batch_size
        )
        assert cpu.batch_size < gpu.batch_size


@pytest.mark.parametrize(
    ("words", "places", "heads"),
    [
        ("--width 128", [(128, 128, 1), (128, 128, 6), (128, 128, 30)], None),
        ("--width 256", [(32, 512, 1), (8, 2048, 1)], 4),
        ("--width 256 --lengths 128 --runs 2", [(128, 128, 2)], 4),
        ("--width 256 --batch-size 3 --head-width 32", [(3, 512, 1), (3, 2048, 1)], 8),
    ],
)
def test_defaults_of_a_gpu_go_by_width_and_what_is_typed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, places: list[tuple[int, int, int]], heads: int | None
) -> None:
    cases: list[Any] = []
    for presets in (layers.PRESETS, layers.WIDE):
        monkeypatch.setitem(presets, "cpu", presets["cuda"])
    monkeypatch.setattr(Record, "measure", lambda self, given: cases.extend(given))
    main(["layers", "--device", "cpu", *words.split(), "--layers", "transformer", "--out", str(tmp_path)])
    assert [tuple(case.place[name] for name in ("batch_size", "length", "runs")) for case in cases] == places
    assert {case.build.args[2] for case in cases} == {heads}
    assert [(case.build.args[-1], case.build.args[-2].config.length) for case in cases] == [y[:2] for y in places]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no benchmark 'speed': choose from diagnostics, layers, pretraining"),
        ([*DIAGNOSTICS, "--lengths", "33"], "length"),
        ([*DIAGNOSTICS, "--implementations", "rt-fused"], "no implementation 'rt-fused' on this device: choose from"),
        ([*DIAGNOSTICS, "--heads", "3"], "heads: 3 must divide the model width 16"),
        ([*LAYERS, "--head-width", "3"], "width 16 is no multiple of --head-width 3"),
        ([*LAYERS, "--layers", "nothing"], "no mixer 'nothing': choose from transformer"),
        ([*PRETRAINING, "4", "--widths", "100"], "width 100 is no multiple of --head-width 16"),
        ([*PRETRAINING, "4", "--implementations", "rt-wavefront-graph"], "rt-wavefront-graph needs a GPU"),
        ([*PRETRAINING, "4", "--implementations", "nothing"], "no mixer 'nothing'"),
    ],
)
def test_bad_input_is_one_line(ended: Callable[..., str], tmp_path: Path, arguments: list[str], message: str) -> None:
    error = ended(main, [*arguments, "--out", str(tmp_path / "out")])
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"runs": (1, 0)}, "--runs 0 must be more than 0"),
        ({"head_width": -1}, "--head-width -1 must be more than 0"),
        ({"limit": math.nan}, "--limit nan must be more than 0"),
        ({"repeats": 3}, "--repeats 3 must be at least 5"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers.Options(**values)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main([*LAYERS, "--layers", "rt", "--out", str(tmp_path / "file")])
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), str(tmp_path / "file") in printed.err) == ("", 1, True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        [
            "diagnostics",
            "--phases",
            "forward",
            "forward+backward",
            "step",
            "--lengths",
            "16",
            "--heads",
            "8",
            "--mlp-width",
            "256",
        ],
        ["layers", "--layers", "rt", "gla", "--lengths", "16", "--runs", "1", "3"],
        ["pretraining", "--widths", "128", "--depths", "1", "2", "--models", "2", "128", "--seq-len", "20"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_gpu(tmp_path: Path, arguments: list[str]) -> None:
    small = ["--width", "64", "--batch-size", "5", "--limit", "60"]
    if arguments[0] == "pretraining":
        small = ["--batch-size", "4", "--batches", "2", "--decode-batches", "3", "--vocabulary", "300"]
    cells = run(tmp_path, [*arguments, *small])["cells"]
    assert {cell["status"] for cell in cells} == {"timed"}
    assert all(cell["peak_gib"] > 0 for cell in cells)
    if arguments[0] == "layers":
        assert all("rt fused" in cell["methods"] for cell in cells[:2])
        assert [cell["compiled"] for cell in cells] == [False, False, True, True]
