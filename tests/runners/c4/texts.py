"""Texts in C4's format, and a tokenizer of their words."""

import gzip
import json
import random
from pathlib import Path

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "se") for b in ("n", "r", "s", "")]


def write_texts(folder: Path) -> None:
    """Write training and validation files into a folder, and ``tokenizer/tokenizer.json``."""
    import tokenizers  # of the extra pretraining

    dice = random.Random(0)
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
