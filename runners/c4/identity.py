"""Identity of a run: the name of its folder, the description in its files, and the version of its code."""

from dataclasses import asdict
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from mixers.registry import find_mixer
from runners.c4.config import Config
from runners.provenance import code_version

INCIDENTAL = (
    *("device", "out", "wandb", "checkpoint_every", "search", "dry_run", "preset", "parallel", "micro_batch_size"),
    *("recompute", "data", "tokenizer", "downstream", "wandb_project", "wandb_entity", "wandb_tags"),
)
"""Options that do not change a run's identity: where and how it is computed and evaluated.

``data`` and ``tokenizer`` are among them because the hash of the corpus covers both.
"""
DECIDING = tuple(
    f"runners.c4.{name}"
    for name in ("model", "parametrisation", "data.corpus", "distributed", "step", "loop", "evaluation.evaluate")
)
"""Modules that decide a run's numbers; they count without their imports, for example those of the command line."""


def run_folder(config: Config, options: dict[str, Any], corpus: str) -> Path:
    """Return the folder of a run's files; another configuration or corpus has another folder.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        corpus: name of the folder of the run's corpus.
    """
    # The digest identifies the run; the rest of the name describes it to a reader.
    values = {name: value for name, value in asdict(config).items() if name not in INCIDENTAL}
    identity = [values, options, corpus]
    digest = sha256(dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]

    kind = f"{config.mixer}-{config.shape().width}x{config.layers}".replace(":", ".")
    kind += "-authors" if config.parametrisation == "authors" else ""
    return config.out / "c4" / f"{kind}-lr{config.lr:g}-beta{config.beta2:g}-seed{config.seed}-{digest}"


def describe_run(config: Config, options: dict[str, Any], corpus: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON-able description of a run with the version of its code; every checkpoint contains it.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        corpus: facts about the corpus.
    """
    as_json = {"data": list(config.data), "out": str(config.out), "wandb_tags": list(config.wandb_tags)}
    values = {**asdict(config), **as_json}
    return {"config": values, "mixer_options": options, "corpus": corpus, "code": run_code(config)}


def config_of(described: dict[str, Any]) -> Config:
    """Return the configuration in the description of a run.

    Raises:
        KeyError: a setting is missing.
        TypeError: there is one that this version does not have.
    """
    values = described["config"]
    return Config(**{**values, "data": tuple(values["data"]), "out": Path(values["out"])})


def run_code(config: Config) -> str:
    """Return the hash of the code that decides a run's numbers: layer, backbone, training and evaluation."""
    return code_version(find_mixer(config.mixer), "mixers.models", "mixers.ops.numerics", alone=DECIDING)
