"""The benchmark of language-model layers: what it covers, stores, derives and refuses to time. No speed is asserted."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from mixers.base import State
from mixers.decoding import LayerDecoder
from mixers.ops.norm import rms_norm
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.bench import accuracy, preparation, scheduler
from runners.bench.__main__ import main
from runners.bench.accuracy import Oracle, check_implementation
from runners.bench.cells import Figures
from runners.bench.clock import Clock
from runners.bench.implementations import Setting
from runners.bench.pretraining.bench import PretrainingBench
from runners.bench.pretraining.cells import PretrainingCell, layer_cells
from runners.bench.pretraining.implementations import DECODERS, LAYERS
from runners.bench.pretraining.options import PRESETS, model_config, parse
from runners.bench.pretraining.record import cell_to_dict, sweeps
from runners.bench.pretraining.report import print_tables
from runners.bench.pretraining.targets import Target
from runners.bench.pretraining.work import CachedDecodeWork, DecodeWork, TrainingWork
from runners.c4.reference.experiments import EXPERIMENTS

CPU = torch.device("cpu")
SETTING = Setting(width=32, heads=2, mlp_width=64, batch_size=2)
SHAPE = ["--widths", "32", "--head-width", "16", "--model-width", "32", "--vocabulary", "50", "--layers", "2"]
GRID = ["--batches", "2", "--batch-size", "4", "--length", "4", "--lengths", "4", "6", "--decode-batches", "3"]
PATIENT = ["--limit", "60", "--budget", "600"]  # a busy machine must not skip a cell
TINY = ["pretraining", "--device", "cpu", "--stack", "2", *SHAPE, *GRID, *PATIENT]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHECK_LENGTHS", (5,))
    monkeypatch.setattr(preparation, "SECONDS_A_REPEAT", 1e-4)


def measure(folder: Path, *arguments: str) -> Any:
    main([*TINY, *arguments, "--out", str(folder)])
    return stored(folder)


def stored(folder: Path) -> Any:
    (path,) = (folder / "bench").glob("*.json")
    assert path.name.startswith("pretraining-")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


def places(cells: Sequence[Any]) -> list[Any]:
    names = ("phase", "layers", "width", "batch_size", "length", "implementation")
    return [tuple(cell[name] for name in names) for cell in cells]


def test_another_setting_has_a_record_of_its_own(tmp_path: Path) -> None:
    main([*TINY, "--out", str(tmp_path)])
    main([*TINY, "--out", str(tmp_path)])
    main([*TINY, "--parts", "decode", "--out", str(tmp_path)])
    assert len([*(tmp_path / "bench").glob("*.json")]) == 2


def test_everything_measured_is_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, shown = measure(tmp_path), capsys.readouterr().out
    assert content["complete"]
    cells = content["cells"]
    assert places(cells) == [
        *((phase, 1, 32, batch, 4, name) for batch in (4, 2) for phase in PASSES for name in BOTH),
        ("training", 2, 32, 4, 4, "transformer"),
        *((phase, 2, 32, batch, 4, "transformer") for batch in (4, 2) for phase in PASSES),
        ("decode", 2, 32, 3, 4, "rt-step"),
        ("decode", 4, 32, 3, 4, "transformer-step"),
        ("training", 2, 32, 4, 4, "rt-tiled"),
        *((phase, 1, 32, batch, 6, name) for batch in (2, 4) for phase in PASSES for name in BOTH),
    ]
    for cell in cells:
        assert cell["status"] == "timed"
        assert cell["repeats"] == 5
        assert 0 < cell["error"] <= 1e-5
        tokens = cell["batch_size"] * (1 if cell["phase"] == "decode" else cell["length"])
        assert cell["tokens_per_second"] == pytest.approx(tokens / (1e-3 * cell["median_ms"]))
        if cell["phase"] in PASSES:
            assert cell["layer_ms"] == pytest.approx(cell["median_ms"] / cell["layers"])
        assert cell["setup_seconds"] > 0
        assert cell["share_of_peak"] is cell["peak_gib"] is None  # not known of a CPU
        assert cell["targets"] == []
        assert f"{cell['median_ms']:.4g}" in shown
    trained = {cell["implementation"]: cell for cell in cells if cell["phase"] == "training"}
    speeds = [trained[name]["tokens_per_second"] for name in BOTH]
    assert trained["transformer"]["of_transformer"] == 1
    assert trained["rt-tiled"]["of_transformer"] == pytest.approx(speeds[0] / speeds[1])
    for cell in cells:
        if cell["phase"] == "decode":
            assert cell["cache_bytes"] == cell["layers"] * 2 * 3 * 4 * 32 * 4  # float32 keys and values
            layer = 4 * 32**2 + 2 * 4 * 32**2 + 4 * 32
            assert cell["parameters"] == cell["layers"] * layer + 2 * 128 * 32 + 32
    for row in content["lengths"]:
        short, long = (
            next(
                cell["median_ms"]
                for cell in cells
                if (cell["layers"], cell["length"], *(cell[k] for k in KEYS)) == (1, n, *(row[k] for k in KEYS))
            )
            for n in (4, 6)
        )
        assert row["quadratic_share"] == pytest.approx({"4": 1.0, "6": long / (1.5 * short)})
    assert len(content["lengths"]) == 8


BOTH = ("rt-tiled", "transformer")
PASSES = ("forward", "forward+backward")
KEYS = ("phase", "batch_size", "implementation")


def test_what_is_measured_by_default_on_a_gpu() -> None:
    cells = list(layer_cells(PRESETS["cuda"], list(LAYERS)))
    assert len(set(cells)) == len(cells)
    found = {
        name: {(c.phase, c.width, c.batch_size, c.length) for c in cells if c.implementation == name} for name in LAYERS
    }
    both = [(1024, 512, 512), (1024, 32, 512), (1408, 512, 512), (2048, 512, 512)]
    both += [(1024, 32, n) for n in (128, 256, 512, 1024, 2048, 4096)]
    both += [(1024, 512, n) for n in (128, 256, 512, 1024)]
    wanted = {(phase, *place) for phase in PASSES for place in both}
    wanted |= {("forward", 1024, batch, 512) for batch in (32, 128, 512, 2048)}
    for name in ("rt-tiled-graph", "rt-wavefront-graph", "transformer", "transformer-compiled"):
        assert found[name] == wanted
    for name in ("rt-tiled", "rt-wavefront"):
        assert found[name] == {place for place in wanted if (place[1], place[3]) == (1024, 512)}


def test_models_of_the_paper() -> None:
    bench = PretrainingBench(PRESETS["cuda"], CPU, "")
    decoded = {(c.implementation, c.layers, c.width) for c in bench.cells if c.phase == "decode"}
    transformers = {("transformer-step", 24, 1024), ("transformer-step", 12, 1408)}
    assert decoded == {("rt-step", 12, 1408), ("rt-step", 6, 2048)} | transformers


def cell(phase: Any, name: str, batch: int = 4, length: int = 6, **more: Any) -> PretrainingCell:
    width = more.pop("width", 32)
    return PretrainingCell(phase=phase, width=width, batch_size=batch, length=length, implementation=name, **more)


def test_operations() -> None:
    bench = PretrainingBench(parse(TINY[1:]), CPU, "")
    assert bench.operations(cell("forward", "rt-tiled")) == 24 * (28 * 32**2 + 2 * 6 * 32)
    assert bench.operations(cell("forward+backward", "transformer")) == 3 * 24 * (24 * 32**2 + 2 * 6 * 32)
    bench.peak = 1e9
    ideal = bench.ideal_seconds(cell("forward", "rt-tiled"))
    assert ideal == pytest.approx(24 * (28 * 32**2 + 2 * 6 * 32) / 1e9)
    training = bench.operations(cell("training", "rt-tiled", length=4, layers=2))
    layers, readout = 2 * (28 * 32**2 + 2 * 4 * 32), 2 * 32 * 128
    assert training == pytest.approx(16 * 3 * (layers + readout), rel=0.02)


def test_targets_are_those_of_our_implementation_on_the_gpu() -> None:
    bench = PretrainingBench(PRESETS["cuda"], CPU, "")
    bench.implementations = LAYERS
    place = cell("forward+backward", "rt-wavefront-graph", 512, 512, width=1408)
    assert bench.targets(place) == []
    bench.clock.cuda = True
    assert bench.targets(place) == [Target("layer_ms", 105.0)]
    (stack,) = bench.targets(cell("forward", "rt-wavefront-graph", 512, 512, width=1024, layers=12))
    assert stack == Target("layer_ms", 18.0)
    assert bench.targets(cell("forward", "rt-wavefront-graph", 32, 1024, width=1024)) == []
    assert bench.targets(cell("forward", "rt-tiled-graph", 512, 512, width=1024)) == []
    training = cell("training", "rt-wavefront-graph", 512, 512, width=2048, layers=6)
    assert bench.targets(training)[0] == Target("tokens_per_second", 170e3, at_least=True)
    (memory,) = bench.targets(replace(training, width=1408, layers=12, recompute=True))
    assert memory == Target("peak_gib", 48.0)
    assert bench.targets(replace(training, recompute=True)) == []
    key = place.implementation, bench.setting(place)
    bench.checks[key] = accuracy.Check(error=1e-3, problem=None, first_seconds=2.0)
    bench.figures[place] = Figures(seconds=[0.1, 0.2, 0.11], setup_seconds=3.0)
    shown = cell_to_dict(bench, place)
    assert shown["setup_seconds"] == 5.0
    assert shown["targets"] == [{"figure": "layer_ms", "at_most": 105.0, "met": False}]
    for n in (128, 512, 2048, 4096):
        at = cell("forward", "rt-wavefront-graph", 32, n, width=1024)
        bench.figures[at] = Figures(seconds=[1e-3 * n * (2.0 if n == 4096 else 1.0)])
    (row,) = sweeps(bench)
    assert row["quadratic_share"] == pytest.approx({128: 1, 512: 1, 2048: 1, 4096: 2})
    assert row["targets"] == [{"figure": "quadratic_share", "at_most": 1.3, "met": True}]


def test_lengths_that_are_all_beyond_the_target_s_are_shown_without_a_judgement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = PretrainingBench(PRESETS["cuda"], CPU, "")
    bench.implementations, bench.clock.cuda, bench.cells = LAYERS, True, []
    for n in (3072, 4096):
        at = cell("forward", "rt-wavefront-graph", 32, n, width=1024)
        bench.figures[at] = Figures(seconds=[1e-6 * n**2])
    (row,) = sweeps(bench)
    assert row["targets"] == [{"figure": "quadratic_share", "at_most": 1.3, "met": None}]
    print_tables(bench, Console(width=120))
    shown = capsys.readouterr().out
    assert "1.33" in shown
    assert "missed" not in shown


def test_a_narrow_terminal_takes_nothing_from_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    bench = PretrainingBench(PRESETS["cuda"], CPU, "")
    bench.implementations, bench.clock.cuda, bench.peak = LAYERS | DECODERS, True, 989e12
    places = [
        cell("forward+backward", name, 512, 512, width=1024, layers=12)
        for name in ("rt-wavefront-graph", "transformer")
    ]
    places += [cell("training", name, 512, 512, width=2048, layers=6) for name in ("rt-wavefront-graph", "transformer")]
    places += [cell("decode", name, 64, 512, width=2048, layers=6) for name in ("rt-step-graph", "rt-step")]
    bench.cells = places
    for place in places:
        bench.checks[place.implementation, bench.setting(place)] = accuracy.Check(error=1e-2, problem=None)
        bench.figures[place] = Figures(status="skipped: out of memory")
    for place in places[::2]:
        facts = {"parameters": 434 * 10**6, "cache_bytes": 2**32}
        bench.figures[place] = Figures(seconds=[1.5, 1.51], peak_gib=121.5, setup_seconds=12.5, facts=facts)
    shown = []
    for width in (80, 1000):
        print_tables(bench, Console(width=width))
        shown.append(capsys.readouterr().out.replace("─", "").split())
    assert shown[0] == shown[1]
    assert shown[0].count("skipped:") == 3


def test_no_speed_of_a_wrong_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, step = RecurrentTransformer.forward, Transformer.step

    def forward(self: RecurrentTransformer, x_BTD: Tensor) -> Tensor:
        return right(self, x_BTD) * (1.03 if self.config.implementation == "tiled" else 1.0)

    def wrong_step(self: Transformer, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        z_BD, after = step(self, x_BD, state)
        return 1.03 * z_BD, after

    monkeypatch.setattr(RecurrentTransformer, "forward", forward)
    monkeypatch.setattr(Transformer, "step", wrong_step)
    with pytest.raises(SystemExit) as stop:
        measure(tmp_path, "--lengths", "4")
    assert stop.value.code == 1
    for found in stored(tmp_path)["cells"]:
        if found["implementation"] in ("rt-tiled", "transformer-step"):
            assert found["status"].startswith("wrong: error ")
            assert found["median_ms"] is found["tokens_per_second"] is None
        else:
            assert found["median_ms"] > 0


@pytest.mark.parametrize(
    "name", ["rt-wavefront", "transformer-compiled", *(n for n, i in DECODERS.items() if not i.graph)]
)
def test_implementations_pass_their_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "rt-wavefront":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("needs TRITON_INTERPRET=1")
        monkeypatch.setattr("mixers.rt.wavefront.schedule.group_size", lambda layers, sequences: 16)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    outcome = check_implementation(
        (LAYERS | DECODERS)[name], Oracle(SETTING, autocast=False, runs=1, wide=True), Clock(CPU)
    )
    assert outcome.problem is None
    assert outcome.error is not None
    assert 0 < outcome.error < 1e-5


@pytest.mark.parametrize("name", [name for name, i in DECODERS.items() if i.form == "static-cache"])
def test_decoders_with_a_static_cache_pass_their_check(name: str) -> None:
    """On a CPU they run in plain PyTorch; the check compares outputs alone, as they have no gradients."""
    outcome = check_implementation(
        replace(DECODERS[name], graph=False), Oracle(SETTING, autocast=False, runs=1, wide=True), Clock(CPU)
    )
    assert outcome.problem is None
    assert outcome.error is not None
    assert 0 < outcome.error < 1e-5


def test_a_wrong_decoder_with_a_static_cache_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LayerDecoder.step
    monkeypatch.setattr(LayerDecoder, "step", lambda *arguments: 1.03 * right(*arguments))
    wrong = replace(DECODERS["rt-static-cache-graph"], graph=False)
    outcome = check_implementation(wrong, Oracle(SETTING, autocast=False, runs=1, wide=True), Clock(CPU))
    assert (outcome.problem or "").startswith("error 3.")


def test_a_pass_with_a_static_cache_decodes_the_position_after_all_others() -> None:
    bench = PretrainingBench(parse(TINY[1:]), CPU, "")
    bench.implementations = DECODERS
    for name in ("rt", "transformer"):
        work = bench.build(cell("decode", f"{name}-static-cache-graph", 3, 6, layers=2))
        by_steps = bench.build(cell("decode", f"{name}-step", 3, 6, layers=2))
        assert isinstance(work, CachedDecodeWork)
        assert isinstance(by_steps, DecodeWork)
        of_rt = 2 * 2 * 3 * 32 * 4 * (name == "rt")  # a pair of each sequence in each layer
        assert work.facts == {**by_steps.facts, "cache_bytes": by_steps.facts["cache_bytes"] + of_rt}

        # The same pairs in both forms.
        for layer, state in zip(work.decoder.layers, by_steps.states, strict=True):
            assert state["k"].shape == (3, 5, 32)
            written = layer.cache_2BJD[:, :, :5]
            if layer.last_2BD is not None:
                assert layer.weights.k_norm_D is not None
                written[0, :, 4] = rms_norm(layer.last_2BD[0], layer.weights.k_norm_D)
                written[1, :, 4] = layer.last_2BD[1]
            state["k"], state["v"] = written.clone()
            layer.cache_2BJD[:, :, 4 if layer.last_2BD is not None else 5 :] = torch.nan
        work.run_eagerly()
        by_steps.run_eagerly()
        assert torch.allclose(work.decoder.logits_BV, by_steps.logits_BV, rtol=0, atol=1e-5)
        work.run_eagerly()  # at the same position, or the cache would be full
        assert work.is_finite()


@pytest.mark.parametrize("recompute", [False, True])
def test_training_steps_train(recompute: bool) -> None:
    options = parse(TINY[1:])
    bench = PretrainingBench(options, CPU, "")
    work = bench.build(cell("training", "rt-tiled", length=4, layers=2, micro_batch_size=2, recompute=recompute))
    assert isinstance(work, TrainingWork)
    for group in work.stepper.optimizer.param_groups:
        group["lr"] = 1e-2
    losses = []
    for _ in range(5):
        work.run_eagerly()
        losses.append(float(work.loss))
    assert losses[0] == pytest.approx(torch.tensor(50.0).log().item(), abs=2.0)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_what_does_not_fit_is_trained_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_eagerly = TrainingWork.run_eagerly

    def failing(self: TrainingWork) -> None:
        if self.stepper.micro == 4 and self.config.mixer == "rt":
            raise torch.OutOfMemoryError("CUDA out of memory")
        run_eagerly(self)

    monkeypatch.setattr(TrainingWork, "run_eagerly", failing)
    cells = measure(tmp_path, "--parts", "training")["cells"]
    assert [(c["implementation"], c["micro_batch_size"], c["status"]) for c in cells] == [
        ("transformer", None, "timed"),
        ("rt-tiled", None, "skipped: out of memory"),
        ("rt-tiled", 2, "timed"),
    ]


def test_the_budget_ends_what_is_not_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CHEAP_SECONDS", 0.0)
    arguments = ["--parts", "layers", "training", "--implementations", "rt-tiled", "--budget", "1e-3"]
    statuses = [c["status"] for c in measure(tmp_path, *arguments)["cells"]]
    assert statuses == ["timed", *["skipped: budget of 0.001 s spent"] * 8]


def test_models_of_30m_are_those_of_the_experiments() -> None:
    options = parse(["--device", "cpu", "--size", "30m", "--layers", "3", "6", "--parts", "decode"])
    for experiment, name, layers in (
        ("variants", "rt-3", 3),
        ("transition", "rt-6", 6),
        ("transition", "transformer-12", 12),
    ):
        shape = EXPERIMENTS[experiment].config(name).shape()
        assert model_config(options, DECODERS["rt-step"], layers, 1).shape() == shape


@pytest.mark.parametrize(("size", "layers"), [("30m", (3, 6, 12)), ("150m", (6, 12)), ("300m", (6, 12, 24))])
def test_a_size_without_such_a_model_names_those_it_has(size: str, layers: tuple[int, ...]) -> None:
    known = ", ".join(map(str, layers))
    with pytest.raises(
        ValueError, match=f"no {size} model of 4 layers, only of {known}: choose one, or give --model-w"
    ):
        parse(["--device", "cpu", "--size", size, "--layers", "4", "--parts", "training"])
    parse(["--device", "cpu", "--size", size, "--layers", "4", "--parts", "training", "--model-width", "64"])


@pytest.mark.parametrize(("parts", "lacking"), [("training", 7), ("decode", 48)])
def test_models_that_the_paper_lacks_need_a_width(parts: str, lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "cpu", PRESETS["cuda"])
    layers = str(lacking // 2 if parts == "decode" else lacking)
    arguments = ["--device", "cpu", "--layers", layers, "--implementations", "transformer", "--parts"]
    parse([*arguments, "layers"])
    with pytest.raises(ValueError, match=f"no 300m model of {lacking} layers"):
        parse([*arguments, parts])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_gpu(tmp_path: Path) -> None:
    grid = ["--batches", "2", "--batch-size", "4", "--length", "20", "--lengths", "20", "33", "--decode-batches", "3"]
    shape = ["--widths", "128", "--model-width", "128", "--layers", "2", "--stack", "2", "--vocabulary", "300"]
    limits = ["--limit", "60", "--budget", "500"]
    main(["pretraining", "--device", "cuda", *shape, *grid, *limits, "--out", str(tmp_path)])
    cells = stored(tmp_path)["cells"]
    assert {c["implementation"] for c in cells} == LAYERS.keys() | DECODERS.keys()
    for found in cells:
        assert found["status"] == "timed"
        assert found["peak_gib"] > 0
