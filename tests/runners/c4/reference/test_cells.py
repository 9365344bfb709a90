"""The runs of a reference language model: their losses, when they are stale, and damaged files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners import provenance
from runners.c4.checkpoints import load_model, newest
from runners.c4.config import Config
from runners.c4.corpus.windows import Windows
from runners.c4.evaluation.gradients import SEQUENCES, sizes_by_distance
from runners.c4.evaluation.recall import split_recall
from runners.c4.identity import run_code, run_folder
from runners.c4.presets import PRESETS
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference import staleness
from runners.c4.reference.cells import train_place
from runners.c4.reference.rehearsal import trajectory, unrehearsed_code
from runners.c4.reference.staleness import is_stale
from runners.files import DamagedFileError
from tests.runners.c4.reference.tiny import TINY
from tests.runners.c4.runs import ALONE, configured, corpus_of
from tests.runners.report.made_up import LANGUAGE_MODEL, LANGUAGE_RUN


def test_the_gradients_of_a_run_are_those_of_its_last_model_on_validation_text(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e-3, seed=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    done = train_place((1e-3, 1), config, {}, corpus, split, ALONE, [])

    model, _ = load_model(run_folder(config, {}, corpus.folder.name))
    assert len(windows) < SEQUENCES
    tokens_ST = torch.from_numpy(windows.batch(0, len(windows)))
    found = sizes_by_distance(model, tokens_ST, ALONE.device)
    assert done["gradient"] == found.gradient
    assert done["gradient_half_width"] == found.half_width


def test_a_single_window_has_no_gradients(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their interval would be no number, which the file could not hold."""
    config = configured(texts, tmp_path, lr=1e-3, seed=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.seq_len, config.seq_len)
    monkeypatch.setattr(Windows, "__len__", lambda self: 1)
    done = train_place((1e-3, 1), config, {}, corpus, split, ALONE, [])
    assert "gradient" not in done
    assert math.isfinite(done["validation_loss"])


def test_the_losses_of_a_run_are_those_of_its_last_step(texts: Path, tmp_path: Path) -> None:
    """An earlier checkpoint takes the place of a damaged one only in training."""
    config = configured(texts, tmp_path, lr=1e-3)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])

    last = newest(run_folder(config, {}, corpus.folder.name))
    assert last is not None
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"step-00000008.safetensors is damaged"):
        train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])


def test_a_validation_loss_that_is_not_finite_after_the_first_step_is_divergence(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, warmup_fraction=0.0, steps=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    done = train_place((1e30, 0), config, {}, corpus, split, ALONE, [])
    assert (done["validation_loss"], done["diverged_at"]) == (None, 1)


def run_of(code: str, losses: list[float]) -> dict[str, Any]:
    """What a run says about the code that trained it."""
    return {"code": code, "unrehearsed_code": unrehearsed_code(), "trajectory": losses}


def test_runs_of_other_code_are_stale_only_if_they_were_trained_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")

    def cell(code: str, behaviour: Config) -> dict[str, Any]:
        return {"runs": [run_of(code, trajectory(behaviour, {}))]}

    assert not is_stale(cell("other", config), config, {})
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    assert is_stale(cell("other", replace(config, final_lr_fraction=0.2)), config, {})
    assert not is_stale(cell(run_code(config), replace(config, beta2=0.96)), config, {})

    # The verdict is found once.
    monkeypatch.setattr(staleness, "trajectory", lambda *_: pytest.fail("rehearsed again"))
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    monkeypatch.setattr(staleness, "trajectory", trajectory)

    rt = replace(config, mixer="rt")
    of_rt = {"runs": [run_of("other", trajectory(rt, {}))]}
    assert not is_stale(of_rt, rt, {})
    assert is_stale(of_rt, rt, {"block": 4})


@pytest.mark.parametrize(
    ("module", "stale"),
    [
        ("runners.c4.corpus.windows", True),  # order of the data
        ("runners.c4.corpus.text", True),  # bytes per token
        ("runners.c4.evaluation.evaluate", True),  # validation loss
        ("runners.c4.evaluation.recall", True),  # limit of recall tokens
        ("runners.c4.loop", True),
        ("runners.c4.step", True),  # schedule and optimizer
        ("runners.c4.model", True),
        ("runners.c4.parametrisation", True),
        ("runners.c4.distributed", True),  # CUDA graphs
        ("mixers.ops.numerics", True),  # bfloat16
        ("mixers.gla", False),  # the rehearsal shows that it trains as before
        ("mixers.models", False),
        ("runners.c4.charts", False),
        ("runners.c4.watchers", False),
        ("runners.c4.cost", False),
        ("runners.c4.checkpoints", False),
        ("runners.c4.reference.__main__", False),
        ("runners.progress", False),
    ],
)
def test_an_edit_makes_runs_stale_where_no_rehearsal_shows_what_it_does(
    module: str, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")
    cell = {"runs": [run_of(run_code(config), trajectory(config, {}))]}
    source = provenance._source

    def edited(name: str) -> str | None:
        found = source(name)
        return found if found is None or name != module else found + "\nX = 1\n"

    assert source(module) is not None
    monkeypatch.setattr(provenance, "_source", edited)
    assert is_stale(cell, config, {}) is stale


def test_runs_that_do_not_name_the_code_of_their_evaluation_are_stale() -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")
    run = run_of(run_code(config), trajectory(config, {}))
    del run["unrehearsed_code"]
    assert is_stale({"runs": [run]}, config, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cell: 5, "it holds no named entries"),
        (lambda cell: {"my": "notes"}, "it lacks 'options'"),
        (lambda cell: cell | {"corpus": {}}, "it lacks 'name'"),
        (lambda cell: cell | {"corpus": {"name": 5}}, "'name' is '5'"),
        (lambda cell: cell | {"runs": "x"}, "'runs' is 'x'"),
        (lambda cell: cell | {"runs": [5]}, "it holds no named entries"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "trajectory": None}]}, "'trajectory' is 'None'"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "validation_loss": "3"}]}, "'validation_loss' is '3'"),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "lr": 0.005}]}, "a run has the learning rate 0.005"),
    ],
)
def test_a_file_that_is_no_models_is_an_error(change: Any, reason: str, tmp_path: Path) -> None:
    stored = {**LANGUAGE_MODEL, "runs": [{**LANGUAGE_RUN}]}
    file = tmp_path / "transformer.json"
    file.write_text(json.dumps(stored))
    assert cells_of_layers.read_cell(file) == stored
    file.write_text(json.dumps(change(stored)))
    with pytest.raises(DamagedFileError) as raised:
        cells_of_layers.read_cell(file)
    assert f"transformer.json is damaged ({reason}" in str(raised.value)
    assert str(raised.value).endswith("): move it elsewhere, or delete it to train the model again")


def test_a_truncated_file_is_an_error_with_the_same_remedy(tmp_path: Path) -> None:
    file = tmp_path / "transformer.json"
    file.write_text(json.dumps(LANGUAGE_MODEL)[:-5])
    with pytest.raises(DamagedFileError, match=r"\): move it elsewhere, or delete it to train the model again$"):
        cells_of_layers.read_cell(file)
