"""Windows against slices of the concatenated tokens; ranks, epochs and resumes; bytes of text per token."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from runners.c4.data import corpus as module
from runners.c4.data.convert import train_tokenizer
from runners.c4.data.corpus import Corpus, Manifest, Part, Windows, bytes_per_token, write_shard

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

SHARD = 49
T = 7
LENGTHS = (3, 95, 22, 5, 40, 10, 60, 60)
"""Of the documents: one begins with a shard and a window, another just after the end of a window.

The number of each is 3 times its place, as if others had been dropped.
"""
TOKENS_N = np.random.default_rng(0).integers(2**16, size=sum(LENGTHS)).astype(np.uint16)
STARTS = [0, *itertools.accumulate(LENGTHS)]


def corpus_of(folder: Path, asked: int = 10**9, tokens_N: np.ndarray = TOKENS_N) -> Corpus:
    shards = []
    for begin in range(0, len(tokens_N), SHARD):
        end = min(begin + SHARD, len(tokens_N))
        rows = [(STARTS[n], 3 * n, 0) for n in range(len(LENGTHS)) if STARTS[n] < end and STARTS[n + 1] > begin]
        documents_D3 = np.array(rows, np.int64).reshape(-1, 3)
        shards.append(write_shard(folder, f"train-{begin}", tokens_N[begin:end], documents_D3))
    splits = {"train": Part(shards=tuple(shards)), "validation": Part()}
    manifest = Manifest(tokenizer="", vocab_size=2**16, end_of_text=0, sources={}, splits=splits)
    return Corpus(folder=folder, manifest=manifest, asked={"train": asked, "validation": 0})


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path)


def window(i: int) -> tuple[int, ...]:
    return tuple(TOKENS_N[i * T : i * T + T + 1].tolist())


def rows_of(batch: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tolist()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_out_each_batch_and_an_epoch_has_each_window_once(corpus: Corpus, world: int) -> None:
    windows = Windows(corpus, "train", T, 5)
    seen: list[tuple[int, ...]] = []
    for step in range(len(windows) // 4):
        parts = [windows.batch(step, 4, rank, world) for rank in range(world)]
        assert all(part.shape == (4 // world, T + 1) for part in parts)
        together = np.stack(parts, axis=1).reshape(4, T + 1)
        assert rows_of(together) == rows_of(windows.batch(step, 4))
        seen += rows_of(together)
    rest = rows_of(windows.batch(len(windows) // 4, 4))[: len(windows) % 4]
    assert len(windows) % 4  # an epoch ends within a batch
    assert Counter(seen + rest) == Counter(window(i) for i in range(len(windows)))


def test_the_sequence_of_windows_does_not_depend_on_the_batch_size(corpus: Corpus) -> None:
    windows = Windows(corpus, "train", T, 5)
    count = 3 * len(windows)
    one_by_one = [row for step in range(count) for row in rows_of(windows.batch(step, 1))]
    epochs = [one_by_one[i : i + len(windows)] for i in range(0, count, len(windows))]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert rows_of(windows.batch(0, count)) == one_by_one
    assert [row for step in range(count // 6) for row in rows_of(windows.batch(step, 6))] == one_by_one[
        : count // 6 * 6
    ]


@pytest.mark.parametrize("asked", [T + 1, SHARD, 3 * SHARD + 1, 10**9])
def test_a_run_sees_the_tokens_it_asked_for_even_if_there_are_more(tmp_path: Path, asked: int) -> None:
    windows = Windows(corpus_of(tmp_path, asked), "train", T, None)
    assert len(windows) == (min(asked, len(TOKENS_N)) - 1) // T
    assert corpus_of(tmp_path, asked).targets("train", T) == len(windows) * T
    assert rows_of(windows.batch(0, len(windows))) == [window(i) for i in range(len(windows))]


@pytest.mark.parametrize(("piece", "seq_len", "word"), [(2**18, 7, "Übermaß"), (21, 7, "a"), (1, 5, "a"), (16, 4, "a")])
def test_the_bytes_of_every_target_count_once_whatever_the_size_of_a_piece(
    piece: int, seq_len: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    documents = [f"{word} b c d e f g h i j", "k l m n", *["immediately thereafter notwithstanding"] * 3]
    tokenizer = train_tokenizer(documents * 9, 300)

    # Each token of a byte-level BPE is a sequence of bytes, one letter of the BPE's alphabet a byte.
    ids = [i for document in documents for i in [*tokenizer.encode(document).ids, tokenizer.token_to_id("</s>")]]
    sizes = [len(tokenizer.id_to_token(i)) if tokenizer.id_to_token(i) != "</s>" else 0 for i in ids]
    windows = Windows(corpus_of(tmp_path, tokens_N=np.array(ids)), "train", seq_len, None)
    count = len(windows) * seq_len
    assert bytes_per_token(windows, seq_len, tokenizer) == sum(sizes[1 : 1 + count]) / count
