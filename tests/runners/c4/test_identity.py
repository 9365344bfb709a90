"""What makes two runs the same run, and which code decides a run's numbers."""

import pkgutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners import c4, provenance  # noqa: E402
from runners.c4 import identity  # noqa: E402
from runners.c4.checks import deciding  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.identity import run_folder  # noqa: E402
from tests.runners.c4.runs import configured, corpus_of, folder_of  # noqa: E402


def test_the_code_of_a_run_is_that_which_decides_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = provenance._source

    def code(changed: str) -> str:
        def with_more(name: str) -> str | None:
            found = source(name)
            return found if found is None or name != changed else found + "\nX = 1\n"

        monkeypatch.setattr(provenance, "_source", with_more)
        return identity.run_code(Config(mixer="gla"))

    ours = [module.name for module in pkgutil.walk_packages(c4.__path__, "runners.c4.")]
    others = [f"mixers.{name}" for name in ("gla", "lstm", "models", "base", "parts", "ops.numerics")]
    others += [f"runners.{name}" for name in ("device", "cli", "mad.training.loop")]
    unchanged = code("nothing")
    deciding = {
        f"runners.c4.{name}"
        for name in ("model", "parametrisation", "data.corpus", "distributed", "step", "loop", "evaluation.evaluate")
    }
    found = {name for name in [*ours, *others] if code(name) != unchanged}
    assert found == deciding | {
        "mixers.gla",
        "mixers.models",
        "mixers.base",
        "mixers.parts",
        "mixers.ops.numerics",
    }


def test_how_a_run_is_computed_makes_no_other_run_and_all_else_does(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    other = replace(config, recompute=True, data=(f"{texts}/",), micro_batch_size=1, checkpoint_every=7)
    assert folder_of(other) == folder_of(config)
    corpus = corpus_of(config).folder.name

    def name(**changes: Any) -> str:
        return run_folder(replace(config, **changes), {}, corpus).name

    changed = {field.name: another(getattr(config, field.name)) for field in fields(Config)}
    same = {option for option, value in changed.items() if name(**{option: value}) == name()}
    computed = {"device", "parallel", "micro_batch_size", "recompute", "checkpoint_every"}
    told_by_the_corpus = {"data", "tokenizer"}
    commanded = {"out", "search", "dry_run", "preset", "downstream"}
    commanded |= {"wandb", "wandb_project", "wandb_entity", "wandb_tags"}
    assert same == computed | told_by_the_corpus | commanded
    assert run_folder(config, {"heads": 1}, corpus).name != name()


def test_an_option_with_its_default_value_makes_no_other_run() -> None:
    config = Config(mixer="rt")
    assert deciding(config, {"block": 1, "qk_norm": np.True_}) == {}
    assert deciding(config, {"block": np.int64(4), "implementation": "tiled"}) == {
        "block": 4,
        "implementation": "tiled",
    }
    with pytest.raises(ValueError, match="block: Input should be a valid integer, not 'four'"):
        deciding(config, {"block": "four"})


def another(value: Any) -> Any:
    """Another value of an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Path | tuple):
        return value / "other" if isinstance(value, Path) else (*value, "other")
    return f"{value} other" if isinstance(value, str | None) else value + 1
