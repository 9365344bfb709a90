"""Presets, and configurations made from them."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from mixers.options import converted
from runners.c4.config import Config
from runners.c4.data.tokenizer import file_beside
from runners.guidance import closest, flag_of, texts_of

PRESETS: dict[str, Config] = {
    "paper": Config(),
    "tiny": Config(
        layers=2,
        width=64,
        heads=4,
        seq_len=32,
        batch_size=8,
        steps=100,
        lr=1e-2,
        warmup_fraction=0.1,
        validation_tokens=2048,
        evaluations=4,
        checkpoint_every=20,
        preset="tiny",
    ),
    "ranking": Config(
        layers=4,
        width=256,
        heads=8,
        seq_len=512,
        batch_size=64,
        steps=4000,
        validation_tokens=2**19,
        preset="ranking",
    ),
    "30m": Config(
        layers=6,
        width=640,
        seq_len=512,
        batch_size=64,
        steps=9200,
        validation_tokens=2**19,
        preset="30m",
    ),
}
"""Defaults of each preset."""


def configure(preset: str, values: Mapping[str, Any]) -> Config:
    """Return a preset's configuration with other values, converted to the types of ``Config``.

    Args:
        preset: name of the preset.
        values: values by option. ``data`` takes one path or several; a real-valued option takes any number.

    Raises:
        ValueError: there is no such preset or option.
    """
    base = PRESETS[converted(Config, {"preset": preset})["preset"]]
    known = [field.name for field in fields(Config) if field.name not in ("preset", "dry_run")]
    if unknown := [name for name in values if name not in known]:
        flags, texts = {flag_of(name): name for name in known}, texts_of(Config)
        found = closest(flag_of(unknown[0]), {flag: texts.get(name, "") for flag, name in flags.items()})
        meant = f"did you mean {flags[found]}? The options are" if found else "the options are preset, mixer_options,"
        raise ValueError(f"unknown option {unknown[0]}: {meant} {', '.join(known)}")

    return replace(base, **converted(Config, {name: _plain(name, value) for name, value in values.items()}))


def with_tokenizer(config: Config, given: Collection[str]) -> Config:
    """Return the configuration with the tokenizer that ``convert`` has made with its data, unless another is given.

    Args:
        config: the configuration.
        given: options that are given.

    Raises:
        ValueError: the data have different tokenizers.
    """
    if "tokenizer" in given:
        return config
    folders = [path if path.is_dir() else path.parent for path in map(Path, config.data)]
    found: dict[bytes, Path] = {}
    for file in filter(Path.is_file, map(file_beside, folders)):
        found.setdefault(file.read_bytes(), file)
    if len(found) > 1:
        raise ValueError(
            f"the data have different tokenizers, {' and '.join(map(str, found.values()))}: give --tokenizer"
        )
    return replace(config, tokenizer=str(next(iter(found.values())))) if found else config


def _plain(name: str, value: Any) -> Any:
    """Return the value of an option with paths and lists in the form of its field."""
    if name == "out":
        return Path(value) if isinstance(value, str | PathLike) else value
    if isinstance(value, PathLike):
        value = fspath(value)
    if name == "data" and isinstance(value, str):
        return (value,)
    return tuple(map(_text, value)) if name in ("data", "wandb_tags") and isinstance(value, list | tuple) else value


def _text(value: Any) -> Any:
    return fspath(value) if isinstance(value, PathLike) else value
