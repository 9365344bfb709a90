"""Fixtures of the tests of pretraining."""

import gzip
import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from matplotlib.figure import Figure

from runners.c4 import costs
from runners.c4.config import Config
from runners.c4.data import corpus, sources
from runners.c4.model import layer_of


@pytest.fixture(autouse=True)
def digests_of_the_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DIGESTS", tmp_path / "cache" / "text-digests.json")


@pytest.fixture(scope="module", autouse=True)
def savefig() -> Iterator[Callable[..., None]]:
    """What draws a figure; without ``drawn``, figures are composed and their files are empty."""
    original = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())
        yield original


@pytest.fixture(scope="session")
def figures() -> dict[tuple[type, str], dict[str, Any]]:
    """Figures of models, which hundreds of runs of a few models share."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def cheap_runs(figures: dict[tuple[type, str], dict[str, Any]]) -> Iterator[None]:
    """Runs count the operations of a model once for all, and collect no garbage between them without a GPU."""

    def facts(config: Config, options: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        layer, settings = layer_of(config, options)
        key = layer, f"{settings} {config.shape()} {config.layers} {config.seq_len} {vocab_size}"
        if key not in figures:
            figures[key] = costs.known_figures(config, options, vocab_size)
        return dict(figures[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runners.c4.train.known_figures", facts)
        if not torch.cuda.is_available():
            patch.setattr("gc.collect", lambda: 0)
        yield


@pytest.fixture
def drawn(savefig: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn."""
    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Count a text's bytes in pieces of 2^11 tokens: a run reads a whole piece even if its text has 100 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", 2**11)
        yield


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Cut off the network; return the list of hosts looked up. Caches are ``hub`` and ``datasets`` in ``tmp_path``."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra pretraining")
    datasets = pytest.importorskip("datasets", reason="needs the extra pretraining")
    hosts: list[object] = []

    def find(host: object, *_: object, **__: object) -> NoReturn:
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return hosts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of C4-format files and a tokenizer of its words."""
    pytest.importorskip("datasets", reason="needs the extra pretraining")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")
    folder = tmp_path_factory.mktemp("texts")
    dice = random.Random(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "se") for b in ("n", "r", "s", "")]
    documents = [" ".join(dice.choices(words, k=dice.randint(5, 60))) for _ in range(120)]
    for name, part in {"train.0": documents[:60], "train.1": documents[60:100], "validation": documents[100:]}.items():
        lines = "".join(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in part)
        (folder / f"c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "</s>"])
    tokenizer.train_from_iterator(documents, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder
