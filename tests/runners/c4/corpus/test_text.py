"""Bytes per token against the text that the targets of all windows make up."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from runners.c4.corpus import text
from runners.c4.corpus.convert import train_tokenizer
from runners.c4.corpus.prepare import prepare
from runners.c4.corpus.text import bytes_per_token
from runners.c4.corpus.windows import Windows

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

SHORT = ["a b c d e f g h i j", "k l m n"]
LONG = ["immediately thereafter notwithstanding"] * 3


@pytest.mark.parametrize(("piece", "seq_len"), [(2**18, 7), (21, 7), (1, 5), (30, 4)])
def test_every_target_counts_once_whatever_the_size_of_a_piece(
    piece: int, seq_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", piece)
    for split, documents in {"train": ["other text"], "validation": SHORT + LONG}.items():
        lines = (json.dumps({"text": document}) + "\n" for document in documents)
        (tmp_path / f"{split}.json").write_text("".join(lines))
    tokenizer = train_tokenizer(LONG * 9, 300)
    tokenizer.save(str(tmp_path / "tokenizer"))
    files = [str(file) for file in tmp_path.glob("*.json")]
    corpus = prepare(tmp_path, files, str(tmp_path / "tokenizer"), 1, 10**6, Console(file=io.StringIO()))
    windows = Windows(corpus, "validation", seq_len, None)

    # Each token of a byte-level BPE is a sequence of bytes, one letter of the BPE's alphabet a byte.
    encoded = [[*tokenizer.encode(document).tokens, ""] for document in SHORT + LONG]
    targets = [token for tokens in encoded for token in tokens][1 : 1 + len(windows) * seq_len]
    assert len(targets) == corpus.targets("validation", seq_len)
    expected = sum(map(len, targets)) / len(targets)
    assert bytes_per_token(windows, seq_len, tokenizer) == expected
    assert expected > 1.5 * sum(map(len, targets[:20])) / 20  # the beginning is no sample of the whole
