"""The files of reference language models: when their runs are stale, and what is damaged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners import provenance
from runners.c4.config import Config
from runners.c4.identity import run_code
from runners.c4.presets import PRESETS
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference import staleness
from runners.c4.reference.cells import Cell, write_cell
from runners.c4.reference.staleness import is_stale
from runners.c4.rehearsal import trajectory, unrehearsed_code
from runners.files import DamagedFileError, read_json
from tests.runners.c4.reference.tiny import TINY
from tests.runners.report.made_up import DIVERGED_RUN, LANGUAGE_MODEL, LANGUAGE_RUN


def model_of(code: str, losses: list[float]) -> Cell:
    """A model with one run, by what the run says about the code that trained it."""
    run = replace(LANGUAGE_RUN, code=code, unrehearsed_code=unrehearsed_code(), trajectory=losses)
    return replace(LANGUAGE_MODEL, runs=[run])


def test_runs_of_other_code_are_stale_only_if_they_were_trained_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")

    def cell(code: str, behaviour: Config) -> Cell:
        return model_of(code, trajectory(behaviour, {}))

    assert not is_stale(cell("other", config), config, {})
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    assert is_stale(cell("other", replace(config, final_lr_fraction=0.2)), config, {})
    assert not is_stale(cell(run_code(config), replace(config, beta2=0.96)), config, {})

    # The verdict is found once.
    monkeypatch.setattr(staleness, "trajectory", lambda *_: pytest.fail("rehearsed again"))
    assert is_stale(cell("other", replace(config, beta2=0.96)), config, {})
    monkeypatch.setattr(staleness, "trajectory", trajectory)

    rt = replace(config, mixer="rt")
    of_rt = model_of("other", trajectory(rt, {}))
    assert not is_stale(of_rt, rt, {})
    assert is_stale(of_rt, rt, {"block": 4})


@pytest.mark.parametrize(
    ("module", "stale"),
    [
        ("runners.c4.data.corpus", True),  # order of the data
        ("runners.c4.evaluation.evaluate", True),  # validation loss
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
    cell = model_of(run_code(config), trajectory(config, {}))
    source = provenance._source

    def edited(name: str) -> str | None:
        found = source(name)
        return found if found is None or name != module else found + "\nX = 1\n"

    assert source(module) is not None
    monkeypatch.setattr(provenance, "_source", edited)
    assert is_stale(cell, config, {}) is stale


def test_runs_that_do_not_name_the_code_of_their_evaluation_are_stale() -> None:
    config = replace(PRESETS["ranking"], **TINY, mixer="gla")
    (run,) = model_of(run_code(config), trajectory(config, {})).runs
    assert is_stale(replace(LANGUAGE_MODEL, runs=[replace(run, unrehearsed_code=None)]), config, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cell: 5, "it holds no named entries"),
        (lambda cell: {"my": "notes"}, "layer: field required"),
        (lambda cell: cell | {"corpus": {}}, "corpus: name: field required"),
        (lambda cell: cell | {"corpus": cell["corpus"] | {"name": 5}}, "corpus: name: input should be a valid string"),
        (lambda cell: cell | {"runs": "x"}, "runs: input should be a valid array, not 'x'"),
        (lambda cell: cell | {"runs": [5]}, "runs: 0: converged: it holds no named entries"),
        (
            lambda cell: cell | {"runs": [{**cell["runs"][0], "trajectory": None}]},
            "runs: 0: converged: trajectory: ",
        ),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "seconds": "x"}]}, "runs: 0: converged: seconds: input"),
        (
            lambda cell: cell | {"runs": [cell["runs"][1] | {"diverged_at": 1.5}]},
            "runs: 0: diverged: diverged_at: input",
        ),
        (lambda cell: cell | {"runs": [{**cell["runs"][0], "lr": 0.005}]}, "a run has the learning rate 0.005"),
    ],
)
def test_a_file_that_is_no_models_is_an_error(change: Any, reason: str, tmp_path: Path) -> None:
    model = replace(LANGUAGE_MODEL, runs=[LANGUAGE_RUN, DIVERGED_RUN])
    file = tmp_path / "transformer.json"
    write_cell(file, model)
    assert cells_of_layers.read_cell(file) == model
    file.write_text(json.dumps(change(read_json(file))))
    with pytest.raises(DamagedFileError) as raised:
        cells_of_layers.read_cell(file)
    assert f"transformer.json is damaged ({reason}" in str(raised.value)
    assert str(raised.value).endswith("): move it elsewhere, or delete it to train the model again")


def test_a_truncated_file_is_an_error_with_the_same_remedy(tmp_path: Path) -> None:
    file = tmp_path / "transformer.json"
    write_cell(file, LANGUAGE_MODEL)
    file.write_text(file.read_text()[:-5])
    with pytest.raises(DamagedFileError, match=r"\): move it elsewhere, or delete it to train the model again$"):
        cells_of_layers.read_cell(file)
