"""Fixtures of the tests of pretraining."""

import gzip
import json
import random
import socket
from pathlib import Path
from typing import NoReturn

import pytest

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "se") for b in ("n", "r", "s", "")]


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
    folder, dice = tmp_path_factory.mktemp("texts"), random.Random(0)
    documents = [" ".join(dice.choices(WORDS, k=dice.randint(5, 60))) for _ in range(120)]
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
