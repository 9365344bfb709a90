"""The reference language models: which runs follow which, what the files hold, and what ends leave."""

import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers.registry import variant_label
from runners.c4.checkpoints import StepRow
from runners.c4.config import PRESETS, Config
from runners.c4.costs import model_parameters
from runners.c4.progress import Progress
from runners.c4.reference import __main__ as reference
from runners.c4.reference import rows as subject
from runners.c4.reference.rows import EXPERIMENTS, FIRST, SEEDS, Place, chosen_rate, open_places
from runners.gpus import WORKER
from runners.records import Record, read_all, write_all
from tests.runners.c4.runs import TINY, Interruption, interrupt

FIRST_PLACES = [(rate, SEEDS[0]) for rate in FIRST]
STORED = read_all(reference.TRAINED_REFERENCE / "language-models" / "rt.jsonl")[0][1]
"""A shipped record."""


def run(rate: float, loss: float | None, seed: int = 0) -> Record:
    if loss is None:
        return replace(STORED, lr=rate, seed=seed, metrics={}, diverged_step=3)
    return replace(STORED, lr=rate, seed=seed, metrics={"validation": {"loss": loss}})


@pytest.mark.parametrize(
    ("losses", "more"),
    [
        ({3e-3: 3.0, 1e-2: 2.0, 3e-2: 2.5}, [(1e-2, 1)]),
        ({3e-3: 3.0, 1e-2: 2.0, 3e-2: 1.5, 1e-1: 1.6}, [(1e-1, 0), (3e-2, 1)]),
        (
            {3e-3: 1.0, 1e-2: 2.0, 3e-2: None, 1e-3: 0.9, 3e-4: 0.8, 1e-4: 0.7},
            [(1e-3, 0), (3e-4, 0), (1e-4, 0), (1e-4, 1)],
        ),
        (dict.fromkeys((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)), [(1e-3, 0), (3e-4, 0), (1e-4, 0)]),
    ],
    ids=["inside", "upper edge", "lower edge", "all diverge"],
)
def test_the_grid_grows_until_the_best_rate_is_inside(losses: dict[float, float | None], more: list[Place]) -> None:
    runs: list[Record] = []
    while places := open_places(runs):
        assert len(runs) > 2 or places == FIRST_PLACES[len(runs) :]  # none depends on the loss of another
        rate, seed = places[0]
        runs.append(run(rate, losses[rate], seed))
    assert [(done.lr, done.seed) for done in runs] == [*FIRST_PLACES, *more]


def test_the_first_seed_chooses_a_rate_at_which_no_seed_diverged() -> None:
    runs = [run(3e-3, 1.8), run(1e-2, 1.9), run(3e-2, 1.7), run(1e-1, 2.1), run(3e-2, 9.0, seed=1)]
    assert (chosen_rate(runs), open_places(runs)) == (3e-2, [])
    runs[-1] = run(3e-2, None, seed=1)
    assert chosen_rate(runs) == 3e-3

    # The next best rate is searched on its other side, and gets a second seed.
    assert open_places(runs) == [(1e-3, 0)]
    assert open_places([*runs, run(1e-3, 1.85)]) == [(3e-3, 1)]
    assert chosen_rate([run(1e-2, None)]) is None


def configs() -> dict[str, list[tuple[str, Config, dict[str, Any]]]]:
    """Name, configuration and options of each row, by folder."""
    found = defaultdict(list)
    for experiment in EXPERIMENTS.values():
        for name, row in experiment.rows.items():
            config = replace(PRESETS[experiment.preset], mixer=row.mixer, **row.settings)
            found[experiment.folder].append((name, config, dict(row.options)))
    return found


def test_each_file_is_one_model_and_those_of_30m_parameters_read_301m_tokens() -> None:
    for folder, models in configs().items():
        assert len({name for name, *_ in models}) == len({repr(model) for _, *model in models}) == len(models)
        for name, config, options in models if folder else ():
            parameters, tables = model_parameters(config, options, 8000)
            assert parameters - tables == pytest.approx(29.5e6, rel=0.03), name
            assert config.tokens == (107_675_648 if name == "rt-6-equal-time" else 301_465_600)
            assert (config.parametrisation == "authors") == name.endswith("-authors")


WITHOUT = {"fox", "path", "mlstm", "kda", "gdn2", "deltaproduct", "mamba3", "slstm", "m2rnn"}
"""Layers that are not trained as language models yet."""


def test_the_shipped_records_are_those_of_the_rows() -> None:
    """All are finished but the variants in the authors' parametrisation, and those of a text read once."""
    for folder, models in configs().items():
        for name, config, options in models:
            file = reference.TRAINED_REFERENCE / "language-models" / folder / f"{name}.jsonl"
            if not file.exists():
                assert name in WITHOUT or name in EXPERIMENTS["variants-authors"].rows or folder == "read-once"
                continue
            model = reference.Model(name=name, config=config, options=options, file=file)
            assert folder == "read-once" or open_places(model.records()) == []
            for record in model.records():
                assert (record.study, record.layer) == (name, variant_label(config.mixer, options, 1))
                known = {key: getattr(record, key) for key in reference.settings_of(config, options)}
                known |= {"settings": 0, "mixer_config": vars(reference.layer_of(config, {})[1]) | record.mixer_config}
                assert known == reference.settings_of(config, options) | {"settings": 0}


# The command.
@pytest.fixture
def command(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains two layers in a tiny setting, at three learning rates and no others."""
    monkeypatch.setattr(subject, "RATES", FIRST)
    for preset in ("ranking", "30m"):
        tiny = replace(PRESETS[preset], **TINY, evaluations=2, checkpoint_every=2)
        monkeypatch.setitem(PRESETS, preset, tiny)
    places = ["--folder", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    return ["--data", str(texts), *places, "--rows", "gla", "transformer"]


def of(tmp_path: Path, name: str) -> list[Record]:
    file = tmp_path / "models" / f"{name}.jsonl"
    return [record for _, record in read_all(file)] if file.exists() else []


def left(tmp_path: Path) -> list[str]:
    """Folders of runs that are not deleted."""
    return [path.name for path in (tmp_path / "out" / reference.RUNS / "c4").glob("*")]


def begun_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs whose training begins or goes on from now on."""
    begun: list[str] = []
    began = Progress.began
    monkeypatch.setattr(Progress, "began", lambda self, name, *rest: (begun.append(name), began(self, name, *rest)))
    return begun


def test_the_files_hold_every_run_and_the_same_command_trains_nothing_more(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.main([*command, "--dry-run"])
    assert not (tmp_path / "models").exists()
    assert not (tmp_path / "out").exists()
    runs = "lr 0.003 seed 0, lr 0.01 seed 0, lr 0.03 seed 0"
    assert f"missing: gla, {runs}; a run takes about " in capsys.readouterr().out

    reference.main(command)
    for layer, family in (("gla", "linear attention"), ("transformer", "attention")):
        records = of(tmp_path, layer)
        assert {(record.study, record.family, record.mixer_config["heads"]) for record in records} == {
            (layer, family, 2)
        }
        assert [(done.lr, done.seed) for done in records][:3] == FIRST_PLACES
        assert (records[-1].lr, records[-1].seed, open_places(records)) == (chosen_rate(records), 1, [])
        for done in records:
            validation = done.metrics["validation"]
            share, loss = done.task_config["recall_share"], validation["loss"] or 0.0
            assert done.curve["step"][-1] == 4
            assert done.curve["loss"][-1] == pytest.approx(loss, rel=1e-4)
            both = share * (validation["recall_loss"] or 0.0) + (1 - share) * (validation["rest_loss"] or 0.0)
            assert both == pytest.approx(loss, abs=1e-5)

            # The seeds of the best rate alone are measured for their gradients.
            gradient = done.gradient or {"norm": [], "half_width": []}
            assert len(gradient["norm"]) == len(gradient["half_width"]) == done.seed * 12

    # A run of the user's own in the same results folder is another, and nothing remains of these runs.
    assert [path.name for path in (tmp_path / "out").iterdir()] == [reference.RUNS]
    assert left(tmp_path) == []
    monkeypatch.setattr(reference, "train_models", lambda *_: pytest.fail("trains again"))
    capsys.readouterr()
    reference.main(command)
    assert capsys.readouterr().out.startswith("2 of 2 models are finished")


def test_a_killed_command_continues_from_the_files_and_the_checkpoint(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the third run of a layer: the first two are not trained again, the third goes on from step 2."""
    command = [*command[:-2], "transformer"]
    places = ["--folder", str(tmp_path / "whole"), "--out", str(tmp_path / "out of whole")]
    reference.main([*command, *places])
    steps: list[int] = []
    stepped = Progress.stepped

    def watched(self: Progress, row: StepRow) -> None:
        stepped(self, row)
        steps.append(row.step)
        if len(steps) == 11:
            interrupt()

    monkeypatch.setattr(Progress, "stepped", watched)
    with pytest.raises(Interruption):
        reference.main(command)
    assert [done.lr for done in of(tmp_path, "transformer")] == [3e-3, 1e-2]
    reference.main(command)
    assert steps[11] == 3
    expected = [record for _, record in read_all(tmp_path / "whole" / "transformer.jsonl")]
    for done, other in zip(of(tmp_path, "transformer"), expected, strict=True):
        assert (done.lr, done.seed, done.metrics, done.curve) == (other.lr, other.seed, other.metrics, other.curve)


def test_a_run_keeps_its_checkpoints_until_its_record_is_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*command[:-2], "transformer"]
    with monkeypatch.context() as patch:
        patch.setattr(reference, "discard", lambda *_: interrupt())
        with pytest.raises(Interruption):
            reference.main(command)
    assert len(left(tmp_path)) == 1

    # The same command deletes them, and trains the other runs alone.
    begun = begun_runs(monkeypatch)
    reference.main(command)
    assert ["-lr0.003-" in run for run in begun] == [False] * 3
    assert (len(of(tmp_path, "transformer")), left(tmp_path)) == (4, [])


def test_a_layer_that_fails_leaves_the_others_to_train(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = reference.train

    def train_but_gla(config: Config, *others: Any) -> Record:
        if config.mixer == "gla":
            raise RuntimeError("CUDA error: no such\nkernel")
        return train(config, *others)

    monkeypatch.setattr(reference, "train", train_but_gla)
    with pytest.raises(SystemExit, match="1"):
        reference.main(command)
    assert (len(of(tmp_path, "gla")), len(of(tmp_path, "transformer"))) == (0, 4)
    out, error = capsys.readouterr()
    assert "RuntimeError: CUDA error: no such kernel" in error
    assert "not finished: gla (failed, or trained by other processes)" in out


def test_a_run_that_another_process_trains_is_left_to_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    with FileLock(tmp_path / "models" / ".transformer-lr0.01-seed0.lock"):
        reference.main([*command[:-2], "transformer"])
    assert [done.lr for done in of(tmp_path, "transformer")] == [3e-3, 3e-2]
    assert "not finished: transformer (failed, or trained by other processes)" in capsys.readouterr().out


def test_a_run_that_ended_before_it_was_locked_is_not_trained(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has trained it since the file was read."""
    reference.main([*command[:-2], "transformer"])
    whole = of(tmp_path, "transformer")
    write_all(tmp_path / "models" / "transformer.jsonl", whole[:2])
    begun, records = begun_runs(monkeypatch), reference.Model.records
    calls = iter([2, 2, 2, 2])
    monkeypatch.setattr(reference.Model, "records", lambda self: records(self)[: next(calls, None)])
    write_all(tmp_path / "models" / "transformer.jsonl", whole)
    reference.main([*command[:-2], "transformer"])
    assert begun == []
    assert of(tmp_path, "transformer") == whole


def test_on_several_gpus_one_process_per_gpu_takes_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(reference, "run_on_all_gpus", lambda *call: started.append(call))
    with pytest.raises(SystemExit, match="1"):  # as one of them has failed
        reference.main(command)
    assert started == [("runners.c4.reference", command)]
    assert capsys.readouterr().out.startswith("0 of 2 models are finished")
    assert not (tmp_path / "out").exists()

    # Such a process trains on its GPU, and does not repeat what is said already.
    monkeypatch.setenv(WORKER, "1")
    monkeypatch.setattr(reference, "train_models", lambda models: len(models) == 2)
    reference.main(command)
    assert capsys.readouterr().out == ""


REFUSED: dict[str, Callable[[Record], dict[str, Any]]] = {
    "is of other settings: give another --folder, or delete it to train again": lambda _: {"steps": 5},
    "is of other settings: give another --folder": lambda done: {"mixer_config": {**done.mixer_config, "heads": 4}},
    "is of another text: give yours a --folder of its": lambda done: {
        "task_config": {**done.task_config, "name": "other"}
    },
}


def test_a_file_that_runs_cannot_be_added_to_is_refused_before_any_training(
    command: list[str], tmp_path: Path, ended: Callable[..., str]
) -> None:
    reference.main([*command[:-2], "transformer"])
    done = of(tmp_path, "transformer")[0]
    shutil.rmtree(tmp_path / "out")
    file = tmp_path / "models" / "transformer.jsonl"
    for message, changes in REFUSED.items():
        write_all(file, [replace(done, **changes(done))])
        for further in ([], ["--dry-run"]):
            error = ended(reference.main, [*command, *further])  # although another layer comes before it
            assert error.startswith(f"error: {file} {message}")
        assert not (tmp_path / "out").exists()


def test_a_variant_of_rt_is_trained_with_its_options(command: list[str], tmp_path: Path) -> None:
    name = "rt-6-no-persistent-norm-authors"
    command = [*command[:-3], "--experiment", "variants-authors"]
    reference.main([*command, "--rows", name])
    records = of(tmp_path, f"rt-against-transformer/{name}")
    assert open_places(records) == []
    for record in records:
        assert (record.layer, record.settings["parametrisation"]) == ("rt-no-persistent-norm", "authors")
        assert record.mixer_config["persistent_norm"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "transformr"], "no row 'transformr': choose from transformer, sliding-attention"),
        (["--rows", "my_layer:Mine", "--experiment", "transition"], "no row 'my_layer:Mine': choose from rt-6, "),
        (["--data", "{}"], "tokenizer.json: give --data a folder that python -m runners.c4 convert made"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    words: list[str], message: str, command: list[str], tmp_path: Path, ended: Callable[..., str]
) -> None:
    bare = shutil.copytree(command[1], tmp_path / "texts", ignore=shutil.ignore_patterns("tokenizer*"))
    assert message in ended(reference.main, [*command[:-3], *(word.format(bare) for word in words)])
    assert not (tmp_path / "out").exists()


def test_torchrun_is_refused_in_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, ended: Callable[..., str]
) -> None:
    """Its processes would share each collective call, and each would train another layer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ended(reference.main, command).startswith("error: run this command without torchrun")


OWN = """
from torch import nn
class Shifted(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Linear(dim, dim)
    def forward(self, x):
        return self.weight(nn.functional.pad(x, (0, 0, 1, -1)))
class Peeking(Shifted):
    def forward(self, x):
        return self.weight(nn.functional.pad(x, (0, 0, -1, 1)))
"""


def test_a_layer_of_the_users_own_is_trained_as_the_others(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., str]
) -> None:
    (tmp_path / "layer_of_ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "layer_of_ones_own", raising=False)
    reference.main([*command[:-2], "layer_of_ones_own:Shifted"])
    records = of(tmp_path, "layer_of_ones_own.Shifted")
    assert {(record.mixer, record.family) for record in records} == {("layer_of_ones_own:Shifted", "other")}
    assert open_places(records) == []

    error = ended(reference.main, [*command[:-2], "layer_of_ones_own:Peeking"])
    assert "'layer_of_ones_own:Peeking' is not causal" in error
