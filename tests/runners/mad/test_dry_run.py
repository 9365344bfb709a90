"""What --dry-run says of a command, and that it leaves no trace."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mixers import MIXERS
from mixers.base import Layer
from mixers.costs import operations
from mixers.transformer import Transformer
from runners.interrupt import StoppedError
from runners.mad import __main__ as mad
from runners.mad import dry_run as dry_run_module
from runners.mad import duration
from runners.mad.dry_run import forecast
from runners.mad.duration import Clock
from runners.mad.experiment import Experiment
from runners.mad.search import identity
from runners.mad.training.protocol import Run
from runners.mad.training.step import Stepper
from tasks import TASKS
from tests.runners.mad.commands import planned

TINY = [
    *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--evaluations", "1", "--steps", "3"),
]
COMMAND = ["--task", "in-context-recall", "--mixer.heads", "2", *TINY]
GRID = [Run(lr=1e-3, weight_decay=0.0, seed=0)]
pytestmark = pytest.mark.usefixtures("wide_terminal")


class GPUOnly(Transformer):
    """A layer that runs on a GPU alone, and has no step form."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA is needed")

    def step(self, *_: Any) -> Any:
        raise NotImplementedError


class Reading(Transformer):
    """A layer that reads a value of its input, as one run alone may."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD) * x_BTD[0, 0, 0].item()


class Adding(Transformer):
    """A layer that adds into a tensor without the axis of runs."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x_BTD.shape).add_(super().forward(x_BTD))


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, list[str]], str]]:
    """Cells of the table by task or mixer, and the last line but that of the time."""

    def run(*arguments: str) -> tuple[dict[str, list[str]], str]:
        capsys.readouterr()
        mad.main([*arguments, "--dry-run"])
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
        return {name: cells for name, *cells in rows}, [line for line in lines if not line.startswith("time: ")][-1]

    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("storage", [None, "sqlite:///{}/studies.db?timeout=5"])
@pytest.mark.usefixtures("undiagnosed")
def test_it_says_what_is_left_to_do_and_writes_nothing(
    dry_run: Callable[..., Any], tmp_path: Path, storage: str | None
) -> None:
    command = [*COMMAND, "--out", str(tmp_path / "out"), "--weight-decay", "0"]
    command += [] if storage is None else ["--storage", storage.format(tmp_path)]
    grid = ["--mixer", "transformer", "linear-attention", "--lr", "1e-4", "1e-3", "--seeds", "3"]
    rows, last = dry_run(*command, *grid)
    assert not any(tmp_path.iterdir())
    assert [rows[name][:2] for name in ("transformer", "linear-attention")] == [["0 / 6", "3"]] * 2
    assert last.startswith("0 of 12 runs are finished")
    mad.main([*command, "--mixer", "transformer", "--lr", "1e-3", "--seeds", "2"])
    before = contents(tmp_path)
    rows, last = dry_run(*command, *grid)
    assert contents(tmp_path) == before
    assert [rows[name][:2] for name in ("transformer", "linear-attention")] == [["2 / 6", "3"], ["0 / 6", "3"]]
    assert last.startswith("2 of 12 runs are finished")


@pytest.mark.usefixtures("undiagnosed")
def test_of_a_finished_command_it_announces_nothing_more(dry_run: Callable[..., Any], tmp_path: Path) -> None:
    command = [*COMMAND, "--mixer", "transformer", "--lr", "1e-3", "--weight-decay", "0", "--out", str(tmp_path)]
    command += ["--seeds", "2", "--seeds-of", "chosen"]
    assert dry_run(*command)[1].startswith("then the chosen point of each experiment is repeated with 1 more seed")
    mad.main(command)
    assert dry_run(*command)[1] == "all runs are finished"


@pytest.mark.usefixtures("undiagnosed")
def test_it_refuses_a_results_folder_that_the_command_itself_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = ["--storage", f"sqlite:///{tmp_path}/studies.db"]
    command = [*COMMAND, *storage, "--mixer", "transformer", "--lr", "1e-3", "--weight-decay", "0", "--out"]
    mad.main([*command, str(tmp_path / "out")])
    for words in ([], ["--dry-run"]):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            mad.main([*command, str(tmp_path / "other"), *words])
        printed = capsys.readouterr()
        assert printed.err.endswith(f"belongs to the results folder {tmp_path}/out: give --out {tmp_path}/out\n")
        assert "finished" not in printed.out


@pytest.mark.usefixtures("undiagnosed")
def test_it_says_what_stopped_runs_have_saved(
    dry_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "trajectory", lambda *_: [])  # its steps are none of the command's
    command = [*COMMAND, "--mixer", "transformer", "--lr", "1e-3", "--out", str(tmp_path)]
    _, before = dry_run(*command)
    run, taken = Stepper.run, []

    def stop_after_two(self: Stepper, epoch: int, steps: int) -> None:
        run(self, epoch, steps)
        taken.append(steps)
        if sum(taken) == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Stepper, "run", stop_after_two)
    with pytest.raises(StoppedError):
        mad.main(command)
    rows, last = dry_run(*command)
    assert rows["transformer"][:2] == ["0 / 2", "3"]
    whole = float(before.split()[-2])
    start = "0 of 2 runs are finished; of the others 4 of 6 steps are saved, the rest takes "
    assert last.startswith(start)
    assert float(last.removeprefix(start).split()[0]) == pytest.approx(whole / 3, rel=0.01)
    mad.main(command)
    assert dry_run(*command)[1] == "all runs are finished"


@pytest.mark.parametrize(("seeds", "words"), [("2", "1 more seed, up to 2 runs"), ("5", "4 more seeds, up to 8 runs")])
def test_it_says_with_how_many_seeds_the_chosen_point_is_repeated(
    dry_run: Callable[..., Any], tmp_path: Path, seeds: str, words: str
) -> None:
    command = [*COMMAND, "--mixer", "transformer", "linear-attention", "--lr", "1e-3", "--out", str(tmp_path)]
    rows, last = dry_run(*command, "--seeds", seeds, "--seeds-of", "chosen")
    assert [rows[name][0] for name in ("transformer", "linear-attention")] == ["0 / 2", "0 / 2"]
    counted = "which count in the time but not in the FLOPs"
    assert last == f"then the chosen point of each experiment is repeated with {words}, {counted}"


def test_a_storage_that_could_not_be_made_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        mad.main([*COMMAND, "--mixer", "rt", "--storage", f"sqlite:///{tmp_path}/none/studies.db", "--dry-run"])
    assert f"there is no folder {tmp_path}/none" in " ".join(capsys.readouterr().err.split())


def test_figures_are_those_of_formulas(dry_run: Callable[..., Any], tmp_path: Path) -> None:
    names = ["--mixer", "transformer", "--lr", "1e-3", "1e-4", "--weight-decay", "0", "--layers", "2"]
    rows, last = dry_run(*COMMAND, *names, "--out", str(tmp_path))
    layer, vocabulary = 4 * 16**2 + 2 * 16 * 32, 16
    parameters = 2 * (layer + 4 * 16) + 16 + 2 * vocabulary * 16
    step = 3 * 16 * (2 * (16 * 2 * layer + 4 * 16**2 * 16) + 16 * 2 * vocabulary * 16)
    assert rows["transformer-2-layers"][:5] == [
        "0 / 2",
        "3",
        f"{parameters / 1e3:.2f}k",
        f"{2 * 2 * 16 * 16 / 1e3:.2f}k",
        f"{step / 1e6:.2f}M",
    ]
    assert last == f"0 of 2 runs are finished; the others take {2 * 3 * step:.3g} FLOPs"


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("task", ["in-context-recall", "compression"])
def test_figures_are_those_of_the_model_that_is_trained(mixer: str, task: str, tmp_path: Path) -> None:
    values = ["--mixer.implementation", "naive", "--mixer.block", "3"] if mixer == "rt" else []
    (experiment,) = planned(["--mixer", mixer, "--task", task, *values, *TINY])[1]
    model, found = experiment.build().requires_grad_(False), forecast(experiment, GRID, None, tmp_path)
    assert found.flops == 3 * 16 * operations(model, torch.zeros(1, 16, dtype=torch.long))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (found.finished, found.steps) == (0, 3)


def test_the_longest_names_stay_whole_at_80_columns(
    dry_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(duration, "time_step", lambda *_: 1000.0)  # timing full sizes takes a minute
    task, mixer = max(TASKS, key=len), max(MIXERS, key=len)
    rows, _ = dry_run("--task", task, "--mixer", mixer, "rt", "--out", str(tmp_path))
    assert list(rows) == [task, mixer, "rt"]
    assert not any(rows[task])
    assert all(all(rows[name][:6]) for name in (mixer, "rt"))


def test_what_cannot_be_counted_is_a_question_mark_and_tried_where_it_would_be_trained(
    dry_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(MIXERS, "gpu-only", GPUOnly)
    command = [*COMMAND, "--mixer", "gpu-only", "transformer", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="CUDA is needed"):
        dry_run(*command)
    assert capsys.readouterr().out == ""

    # As on a machine with a GPU.
    tried = []

    def try_layers(experiments: Sequence[Experiment], device: torch.device) -> None:
        tried.append((device.type, [experiment.mixer for experiment in experiments]))
        if device.type == "cpu":
            raise RuntimeError("CUDA is needed")

    monkeypatch.setattr(dry_run_module, "try_layers", try_layers)
    monkeypatch.setattr(mad, "_clock", lambda options: Clock([torch.device("cuda")], 6))
    rows, last = dry_run(*command)
    assert tried == [("cpu", ["gpu-only", "transformer"]), ("cuda", ["gpu-only", "transformer"])]
    assert rows["gpu-only"][3:] == ["?", "?", "?"]  # and no column of times on a GPU, of which none is known
    assert last == "0 of 12 runs are finished; the others take ? FLOPs"


def test_what_cannot_be_counted_is_said_once_for_all_tasks(
    dry_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stepless(Transformer):
        def step(self, *_: Any) -> Any:
            raise NotImplementedError("no step form")

    monkeypatch.setitem(MIXERS, "stepless", Stepless)
    tasks = ["--task", "in-context-recall", "mqar", "--task.train-examples", "64", "--batch-size", "16"]
    tasks += ["--task.length", "64", "--task.eval-examples", "30", "--width", "16", "--mlp-width", "32"]
    dry_run(*tasks, "--mixer", "stepless", "--out", str(tmp_path))
    assert caplog.messages == ["state of Stepless not counted: no step form"]


def test_a_damaged_store_is_one_clear_line(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "studies.journal"
    path.write_text('{"op_code":6,"half\n{"op_code":6}\n')
    assert f"{path} is damaged" in refused(*COMMAND, "--mixer", "rt", "--dry-run", "--storage", str(path))


def test_a_folder_as_the_store_is_one_clear_line(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused(*COMMAND, "--mixer", "rt", "--dry-run", "--storage", str(tmp_path))
    assert f"storage {tmp_path} is a folder" in message


@pytest.mark.parametrize("layer", [Reading, Adding])
def test_a_layer_that_cannot_be_trained_with_others_fails_as_it_would_in_training(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, layer: type[Layer]
) -> None:
    """Nor is the other layer trained first."""
    monkeypatch.setitem(MIXERS, "lonely", layer)
    command = [*COMMAND, "--mixer", "transformer", "lonely"]
    in_training, in_dry_run = refused(*command), refused(*command, "--dry-run")
    assert in_dry_run == in_training
    assert f"{__file__}:" in in_training
    assert f", in {layer.__name__}.forward(x_BTD (1, 16, 16)): " in in_training


def test_it_says_where_a_layer_has_no_recurrence(dry_run: Callable[..., Any], tmp_path: Path) -> None:
    """The task has 16 tokens."""
    for segment, said in (("15", False), ("16", True)):
        mixers = ["--mixer", "transformer", "rmt", "--mixer.segment", segment]
        rows, _ = dry_run(*COMMAND, *mixers, "--lr", "1e-3", "--out", str(tmp_path))
        assert ("no recurrence at this length" in rows) == said
