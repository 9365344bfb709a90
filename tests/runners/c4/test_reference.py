"""The reference language models: which runs follow which, what a file holds, and what a kill leaves."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from filelock import FileLock

from mixers import MIXERS
from runners import verdicts
from runners.c4.checkpoints import load_model, newest
from runners.c4.config import Config
from runners.c4.corpus.windows import Windows
from runners.c4.evaluation.recall import count_bigrams, seen_before, split_recall
from runners.c4.identity import run_code, run_folder
from runners.c4.model import token_losses
from runners.c4.presets import PRESETS
from runners.c4.reference import __main__ as reference
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference import rehearsal
from runners.c4.reference.cells import chosen_rate, is_stale, next_place, runs_left, train_place
from runners.c4.reference.experiments import EXPERIMENTS
from runners.c4.reference.rehearsal import agree, trajectory
from runners.c4.train import train
from runners.files import DamagedFileError, read_json
from runners.gpus import WORKER
from runners.interrupt import StoppedError
from tests.runners.c4.runs import ALONE, At, Interruption, configured, corpus_of, interrupt

TINY: dict[str, Any] = {
    "width": 16,
    "heads": 2,
    "layers": 2,
    "seq_len": 12,
    "batch_size": 4,
    "steps": 4,
    "validation_tokens": 48,
    "evaluations": 2,
    "checkpoint_every": 2,
    "device": "cpu",
}


def run(rate: float, loss: float | None, seed: int = 0) -> dict[str, Any]:
    return {"lr": rate, "seed": seed, "validation_loss": loss}


def order_of(losses: dict[float, float | None]) -> list[tuple[float, int]]:
    """The runs of a layer whose losses depend on the learning rate as given."""
    runs: list[dict[str, Any]] = []
    while (place := next_place(runs)) is not None:
        runs.append(run(place[0], losses[place[0]], place[1]))
    return [(done["lr"], done["seed"]) for done in runs]


@pytest.fixture(autouse=True)
def verdicts_of_the_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "CACHE", tmp_path / "cache" / "verdicts.json")


FIRST = [(1e-3, 0), (3e-3, 0), (1e-2, 0)]


@pytest.mark.parametrize(
    ("losses", "more"),
    [
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: 2.5}, [(3e-3, 1)]),
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: 1.5, 3e-2: 1.6}, [(3e-2, 0), (1e-2, 1)]),
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: None, 3e-4: 0.9, 1e-4: 0.8}, [(3e-4, 0), (1e-4, 0), (1e-4, 1)]),
        (dict.fromkeys((0.0001, 0.0003, 0.001, 0.003, 0.01)), [(3e-4, 0), (1e-4, 0)]),
    ],
    ids=["inside", "upper edge", "lower edge", "all diverge"],
)
def test_the_grid_grows_until_the_best_rate_is_inside(
    losses: dict[float, float | None], more: list[tuple[float, int]]
) -> None:
    assert order_of(losses) == [*FIRST, *more]
    assert runs_left([]) == 4
    assert runs_left([run(1e-3, 2.0), run(3e-3, None)]) == 3  # 1e-2 and 3e-4, and a second seed


def test_the_second_seed_chooses_nothing() -> None:
    runs = [run(1e-3, 2.0), run(3e-3, 1.9), run(1e-2, 2.1), run(3e-3, 9.0, seed=1)]
    assert chosen_rate(runs) == 3e-3
    assert next_place(runs) is None
    assert runs_left(runs) == 0


def test_a_rate_at_which_the_second_seed_diverges_is_not_chosen() -> None:
    runs = [run(1e-3, 1.8), run(3e-3, 1.9), run(1e-2, 1.7), run(3e-2, 2.1), run(1e-2, None, seed=1)]
    assert chosen_rate(runs) == 1e-3
    assert runs_left(runs) == 2

    # The next best rate is searched on its other side, and gets a second seed.
    runs.append(run(3e-4, 1.85))
    assert next_place(runs[:-1]) == (3e-4, 0)
    assert next_place(runs) == (1e-3, 1)
    assert runs_left(runs) == 1

    # Where its second seed diverges as well, the third best one follows.
    runs.append(run(1e-3, None, seed=1))
    assert chosen_rate(runs) == 3e-4
    assert next_place(runs) == (1e-4, 0)


def fewest(runs: list[dict[str, Any]]) -> int:
    """The least number of runs left, over all ways in which each of them can end."""
    if (place := next_place(runs)) is None:
        return 0
    best = min((done["validation_loss"] for done in runs if done["validation_loss"] is not None), default=1.0)
    ends = (best / 2, 9.0, None)
    return 1 + min(fewest([*runs, run(place[0], loss, place[1])]) for loss in ends)


def histories(length: int) -> Iterator[list[dict[str, Any]]]:
    """Runs in their order, with all combinations of low, high and infinite losses."""
    for losses in product((1.0, 2.0, None), repeat=length):
        runs: list[dict[str, Any]] = []
        for loss in losses:
            if (place := next_place(runs)) is not None:
                runs.append(run(place[0], loss, place[1]))
        yield runs


def test_the_runs_left_are_the_least_that_are_possible() -> None:
    assert runs_left([run(1e-3, 2.0)]) == 3  # 3e-3, the best of all, with a second seed, and 1e-2
    for length in range(6):
        for runs in histories(length):
            assert runs_left(runs) == fewest(runs)


def slow_recall(rows: list[list[int]], text: list[int], rare: int) -> list[list[bool]]:
    """Recall tokens by their definition."""
    known = Counter(pairwise(text))
    found = []
    for row in rows:
        pairs = list(pairwise(row))
        found.append([pair in pairs[:t] and known[pair] <= rare for t, pair in enumerate(pairs)])
    return found


def test_recall_tokens_are_those_of_a_slow_solver() -> None:
    rng = np.random.default_rng(0)
    rows_NT, text_N = rng.integers(5, size=(40, 30)), rng.integers(5, size=150)
    keys_NT = rows_NT[:, :-1] * 5 + rows_NT[:, 1:]
    known, place_N = np.unique(keys_NT, return_inverse=True)
    counts = count_bigrams(iter(np.array_split(text_N, 7)), known, 5)
    found_NT = seen_before(keys_NT) & (counts[place_N.reshape(keys_NT.shape)] <= 6)
    assert found_NT.tolist() == slow_recall(rows_NT.tolist(), text_N.tolist(), rare=6)
    assert 0.1 < found_NT.mean() < 0.9


def test_a_bigram_that_no_training_text_has_is_rare() -> None:
    assert count_bigrams(iter([np.array([1, 2, 1, 2])]), np.array([5, 6, 12]), 4).tolist() == [0, 2, 0]


def test_the_two_losses_make_up_the_validation_loss(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, validation_tokens=300)
    corpus = corpus_of(config)
    result = train(config, {}, corpus, ALONE, [])
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    assert 0 < split.share < 0.5

    model, _ = load_model(next((tmp_path / "c4").iterdir()))
    recall, rest = split.losses(model, 7, torch.device("cpu"))
    assert split.share * recall + (1 - split.share) * rest == pytest.approx(result["validation_loss"], abs=1e-5)
    assert recall != pytest.approx(rest, abs=1e-3)

    # The recall tokens' own losses.
    tokens_NT = torch.from_numpy(windows.batch(0, len(split.recall_NT)))
    with torch.no_grad():
        losses_NT = token_losses(model, tokens_NT).numpy()
    assert losses_NT[split.recall_NT].mean() == pytest.approx(recall, abs=1e-5)


def test_the_losses_of_a_run_are_those_of_its_last_step(texts: Path, tmp_path: Path) -> None:
    """An earlier checkpoint takes the place of a damaged one only in training."""
    config = configured(texts, tmp_path, lr=1e-3)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])

    last = newest(run_folder(config, {}, corpus))
    assert last is not None
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"step-00000008.safetensors is damaged"):
        train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])


def test_runs_of_other_code_are_stale_only_if_they_were_trained_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")

    def cell(code: str, behaviour: Config) -> dict[str, Any]:
        return {"runs": [{"code": code, "trajectory": trajectory(behaviour, {})}]}

    assert not is_stale(cell("other", config), config, {})
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    assert is_stale(cell("other", replace(config, final_lr_fraction=0.2)), config, {})
    assert not is_stale(cell(run_code(config), replace(config, beta2=0.96)), config, {})

    # The verdict is found once.
    monkeypatch.setattr(cells_of_layers, "trajectory", lambda *_: pytest.fail("rehearsed again"))
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    monkeypatch.setattr(cells_of_layers, "trajectory", trajectory)

    rt = replace(config, mixer="rt")
    assert not is_stale({"runs": [{"code": "other", "trajectory": trajectory(rt, {})}]}, rt, {})
    assert is_stale({"runs": [{"code": "other", "trajectory": trajectory(rt, {})}]}, rt, {"block": 4})


PARTS = [(name, *item) for name, row in EXPERIMENTS["ranking"].rows.items() for item in row.options.items()]


@pytest.mark.parametrize(("name", "option", "part"), PARTS)
def test_a_rehearsal_shows_what_parts_of_a_sequence_do(
    name: str, option: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half and with twice the part, sequences of the same length have other losses."""
    config = replace(EXPERIMENTS["ranking"].config(name), width=16, heads=2)
    length = rehearsal.length(config, {option: part})
    assert 2 * part < length < 3 * part
    monkeypatch.setattr(rehearsal, "length", lambda *_: length)
    here, half, twice = (trajectory(config, {option: n}) for n in (part, part // 2, 2 * part))
    assert not agree(here, half)
    assert not agree(here, twice)


@pytest.mark.parametrize("name", ["transformer", "mamba2", "rt"])
def test_a_layer_without_parts_is_rehearsed_on_20_tokens(name: str) -> None:
    """As when the runs in ``results`` were stored."""
    assert rehearsal.length(EXPERIMENTS["ranking"].config(name), {}) == 20


def test_the_stored_runs_of_the_transformer_are_not_stale() -> None:
    cell = cells_of_layers.read_cell(cells_of_layers.SHIPPED / cells_of_layers.NAME / "transformer.json")
    assert cell is not None
    now = trajectory(EXPERIMENTS["ranking"].config("transformer"), {})
    assert all(agree(done["trajectory"], now) for done in cell["runs"])


@pytest.fixture
def command(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains two layers in a tiny setting, at three learning rates and no others."""
    monkeypatch.setattr(cells_of_layers, "RATES", cells_of_layers.FIRST)
    monkeypatch.setitem(PRESETS, "ranking", replace(PRESETS["ranking"], **TINY))
    places = ["--folder", str(tmp_path / "cells"), "--out", str(tmp_path / "out")]
    return ["--data", str(texts), "--rows", "gla", "transformer", *places]


def cell_of(tmp_path: Path, layer: str) -> dict[str, Any]:
    return read_json(tmp_path / "cells" / f"{layer}.json")


def test_the_files_hold_every_run_and_the_same_command_trains_nothing_more(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.main([*command, "--dry-run"])
    assert not (tmp_path / "cells").exists()
    assert not (tmp_path / "out").exists()
    assert "to train: at least 8 runs of 192 tokens" in capsys.readouterr().out

    reference.main(command)
    for layer, family in (("gla", "linear attention"), ("transformer", "attention")):
        cell = cell_of(tmp_path, layer)
        assert (cell["complete"], cell["family"], cell["options"]["heads"]) == (True, family, 2)
        assert [(done["lr"], done["seed"]) for done in cell["runs"]][:3] == FIRST
        assert cell["runs"][-1]["seed"] == 1
        assert cell["runs"][-1]["lr"] == cell["chosen"] == chosen_rate(cell["runs"])
        for done in cell["runs"]:
            assert done["curve"][-1][0] == 4
            assert done["curve"][-1][2] == pytest.approx(done["validation_loss"], rel=1e-4)
            share = cell["corpus"]["recall_share"]
            both = share * done["recall_loss"] + (1 - share) * done["rest_loss"]
            assert both == pytest.approx(done["validation_loss"], abs=1e-5)

    # The files alone say that nothing is missing.
    monkeypatch.setattr(reference, "train_models", lambda *_: pytest.fail("trains again"))
    capsys.readouterr()
    reference.main(command)
    assert capsys.readouterr().out.startswith("2 of 2 models are finished")


def test_a_killed_command_continues_from_the_files_and_the_checkpoint(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the third run of a layer: the first two are not trained again, the third goes on from step 2."""
    whole = [*command[:4], *command[5:-3], str(tmp_path / "whole"), "--out", str(tmp_path / "out of whole")]
    reference.main(whole)
    seen: list[tuple[str, int]] = []
    kill = True

    class Watching(At):
        def __init__(self, *_: object) -> None:
            self.name = ""

        def started(self, name: str, description: dict[str, Any], row: Any) -> None:
            self.name = name

        def stepped(self, row: Any) -> None:
            seen.append((self.name.partition("-lr")[2].partition("-")[0], row.step))
            if kill and len(seen) == 11:
                interrupt()

        def close(self) -> None: ...

    monkeypatch.setattr(reference, "Bar", Watching)
    with pytest.raises(Interruption):
        reference.main([*command[:4], *command[5:]])
    assert [done["lr"] for done in cell_of(tmp_path, "gla")["runs"]] == [1e-3, 3e-3]

    kill = False
    del seen[:]
    reference.main([*command[:4], *command[5:]])
    assert seen[0] == ("0.01", 3)
    again, expected = cell_of(tmp_path, "gla"), read_json(tmp_path / "whole" / "gla.json")
    for done, other in zip(again["runs"], expected["runs"], strict=True):
        assert {**done, "seconds": 0, "tokens_per_second": 0} == {**other, "seconds": 0, "tokens_per_second": 0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cell: 5, "it holds no named entries"),
        (lambda cell: {"my": "notes"}, "it lacks 'options'"),
        (lambda cell: cell | {"runs": "x"}, "'runs' is 'x'"),
        (lambda cell: cell | {"runs": [5]}, "it holds no named entries"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "trajectory": None}]}, "'trajectory' is 'None'"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "validation_loss": "3"}]}, "'validation_loss' is '3'"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "lr": 0.005}]}, "a run has the learning rate 0.005"),
    ],
)
def test_a_file_that_is_no_models_is_an_error(change: Any, reason: str, tmp_path: Path) -> None:
    stored = read_json(cells_of_layers.SHIPPED / cells_of_layers.NAME / "transformer.json")
    assert stored is not None
    file = tmp_path / "transformer.json"
    file.write_text(json.dumps(change(stored)))
    with pytest.raises(DamagedFileError) as raised:
        cells_of_layers.read_cell(file)
    assert f"transformer.json is damaged ({reason}" in str(raised.value)
    assert str(raised.value).endswith("): move it elsewhere, or delete it to train the model again")


def test_a_folder_that_is_a_file_is_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cells").write_text("")
    with pytest.raises(SystemExit) as stopped:
        reference.main(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: --folder {tmp_path / 'cells'} is a file: name a folder\n"
    assert not (tmp_path / "out").exists()


def test_a_layer_that_another_process_trains_is_left_to_it(command: list[str], tmp_path: Path) -> None:
    locks = tmp_path / "out" / "locks"
    locks.mkdir(parents=True)
    with FileLock(locks / "gla"):
        reference.main(command)
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["transformer.json"]


def test_a_layer_that_fails_leaves_the_others_to_train(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_of_all = cells_of_layers.train

    def train_but_gla(config: Config, *others: Any) -> dict[str, Any]:
        if config.mixer == "gla":
            raise RuntimeError("CUDA error: no such\nkernel")
        return train_of_all(config, *others)

    monkeypatch.setattr(cells_of_layers, "train", train_but_gla)
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    with pytest.raises(SystemExit, match="1"):
        reference.main(command)
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["transformer.json"]
    assert cell_of(tmp_path, "transformer")["complete"]
    line, end = capsys.readouterr().err.splitlines()
    said, _, traceback = line.partition("; traceback: ")
    assert said == "gla stopped: RuntimeError: CUDA error: no such kernel"
    assert end == "not finished: gla (failed, or trained by other processes)"
    assert "in train_but_gla" in Path(traceback).read_text()
    Path(traceback).unlink()


def test_a_layer_that_is_not_finite_before_any_training_has_no_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No learning rate helps it, so it is not a layer that diverged at every one."""
    monkeypatch.setattr("runners.c4.step.Stepper.step", lambda self, tokens: (torch.tensor(torch.nan),) * 2)
    with pytest.raises(SystemExit, match="1"):
        reference.main(command)
    assert not (tmp_path / "cells").exists()
    error = capsys.readouterr().err
    assert error.count("is not finite before any training: correct the layer") == 2
    assert "not finished: gla, transformer (failed" in error


def test_an_orderly_stop_in_one_layer_stops_all(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*others: object) -> None:
        raise StoppedError(3, [])

    monkeypatch.setattr(cells_of_layers, "train", stop)
    with pytest.raises(StoppedError):
        reference.main(command)
    assert not (tmp_path / "cells").exists()


def test_on_several_gpus_one_process_per_gpu_takes_layers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(reference, "run_on_all_gpus", lambda *call: started.append(call))
    with pytest.raises(SystemExit, match="1"):  # as one of them has failed
        reference.main(command)
    ((module, arguments, began),) = started
    assert (module, arguments) == ("runners.c4.reference", command)
    assert began == pytest.approx(time.monotonic(), abs=60)
    assert capsys.readouterr().out.startswith("0 of 2 models are finished")
    assert not (tmp_path / "out").exists()

    # Such a process trains on its GPU, and does not repeat what is said already.
    trained = []
    monkeypatch.setenv(WORKER, "1")
    monkeypatch.setattr(reference, "train_models", lambda models, *_: trained.extend(models) or True)
    reference.main(command)
    assert [model.name for model in trained] == ["gla", "transformer"]
    assert capsys.readouterr().out == ""


def test_torchrun_is_refused_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes would share each collective call, and each would train another layer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        reference.main(command)
    line = "error: run this command without torchrun: it starts one process per GPU by itself\n"
    assert capsys.readouterr().err == line
    assert not (tmp_path / "out").exists()


def of_another_corpus(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"corpus": cell["corpus"] | {"name": "0123456789abcdef"}}


def of_other_settings(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"config": cell["config"] | {"steps": 5}}


def stale(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"runs": [{**done, "code": "other", "trajectory": [1.0]} for done in cell["runs"]]}


def unfinished(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"runs": cell["runs"][:1]}


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file of a finished Transformer."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_of_layers, "RATES", cells_of_layers.FIRST)
        patch.setitem(PRESETS, "ranking", replace(PRESETS["ranking"], **TINY))
        places = ["--folder", str(folder / "cells"), "--out", str(folder / "out")]
        reference.main(["--data", str(texts), "--rows", "transformer", *places])
    return cell_of(folder, "transformer")


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["training", "dry run"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((unfinished, of_another_corpus), "is of another corpus: delete it to train the model again, or give another"),
        ((unfinished, of_other_settings), "is of other settings: delete it to train the model again, or give another"),
        ((of_another_corpus,), "is of another corpus: delete it"),
        ((unfinished, stale), "is unfinished, and its runs were trained by code that trains differently: delete it"),
    ],
    ids=["another corpus", "other settings", "another corpus, finished", "stale"],
)
def test_a_file_that_runs_cannot_be_added_to_is_refused_before_any_training(
    changes: Sequence[Any],
    message: str,
    dry_run: list[str],
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Although another layer comes before it."""
    file = tmp_path / "cells" / "transformer.json"
    file.parent.mkdir()
    file.write_text(json.dumps(reduce(lambda cell, change: change(cell), changes, trained)))
    with pytest.raises(SystemExit, match="2"):
        reference.main([*command, *dry_run])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file} {message}")
    assert not (tmp_path / "out").exists()


def test_a_finished_layer_of_other_code_is_named_and_not_trained_again(
    trained: dict[str, Any], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cells" / "transformer.json"
    file.parent.mkdir()
    file.write_text(json.dumps(stale(trained)))
    reference.main([*command[:3], "transformer", *command[5:]])
    assert "stale: transformer was trained by code that trains differently" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_stale_file_that_another_process_has_just_written_gets_no_runs(
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "cells" / "transformer.json"
    text = json.dumps(unfinished(stale(trained)))
    prepare = reference.corpus_of

    def write_meanwhile(*arguments: Any) -> Any:
        file.parent.mkdir()
        file.write_text(text)
        return prepare(*arguments)

    monkeypatch.setattr(reference, "corpus_of", write_meanwhile)
    with pytest.raises(SystemExit, match="1"):
        reference.main([*command[:3], "transformer", *command[5:]])
    assert "transformer.json is unfinished, and its runs were trained by code" in capsys.readouterr().err
    assert file.read_text() == text


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_longer_sequence_has_as_many_parts_as_in_the_tasks(mixer: str) -> None:
    """Blocks of one position, RT's, are no parts."""
    experiment, config = EXPERIMENTS["ranking"], MIXERS[mixer].Config()
    lengths = {name: getattr(config, name, 1) for name in ("window", "segment", "chunk", "block")}
    parts = {name: 128 / length for name, length in lengths.items() if length > 1}
    options = experiment.rows[mixer].options
    assert {name: experiment.config(mixer).seq_len / options[name] for name in options} == parts


def test_a_variant_of_rt_is_trained_with_its_options(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells_of_layers, "RATES", cells_of_layers.FIRST)
    monkeypatch.setitem(PRESETS, "30m", replace(PRESETS["30m"], **TINY))
    name, places = "rt-6-no-persistent-norm-authors", ["--folder", str(tmp_path / "cells"), "--out", str(tmp_path)]
    command = ["--data", str(texts), "--experiment", "variants-authors", "--rows", name, *places]
    reference.main(command)
    file = tmp_path / "cells" / "rt-against-transformer" / f"{name}.json"
    cell = read_json(file)
    assert (cell["layer"], cell["complete"], cell["config"]["parametrisation"]) == ("rt", True, "authors")
    assert cell["options"]["persistent_norm"] is False
    model, _ = load_model(next(path for path in (tmp_path / "c4").iterdir() if path.name.startswith("rt-16x2-authors")))
    assert [layer.config.persistent_norm for layer in model.stack] == [False, False]

    # The dry run names what is missing of the whole experiment.
    capsys.readouterr()
    reference.main([*command[:4], *places, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1 of 8 models are finished in {file.parent}"
    assert f"finished: {name}" in lines
    assert "missing: rt-3-authors, 4 runs at least" in lines

    # A file of other options is not added to.
    other = {**cell["options"], "persistent_norm": True}
    file.write_text(json.dumps({**cell, "options": other, "runs": cell["runs"][:1]}))
    with pytest.raises(SystemExit) as stopped:
        reference.main(command)
    assert stopped.value.code == 2
    assert f"{name}.json is of other settings: delete it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "tokenizer", "message"),
    [
        ("transformr", True, "error: no row 'transformr' in ranking: choose from transformer"),
        ("gla", False, "tokenizer.json: give --data a folder that python -m runners.c4 convert made"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    layer: str, tokenizer: bool, message: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts"
    shutil.copytree(command[1], data, ignore=None if tokenizer else shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SystemExit) as stopped:
        reference.main(["--data", str(data), "--rows", layer, *command[5:]])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.glob("[co]*")) == []
