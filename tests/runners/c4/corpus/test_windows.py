"""Windows against slices of the concatenated tokens; ranks, epochs and resumes."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from runners.c4.corpus.prepare import Corpus
from runners.c4.corpus.shards import Manifest, Part, write_shard
from runners.c4.corpus.windows import Windows

SHARD = 49
T = 7
LENGTHS = (3, 95, 22, 5, 40, 10, 60, 60)
"""Of the documents: one begins with a shard and a window, another just after the end of a window.

The number of each is 3 times its place, as if others had been dropped.
"""
TOKENS_N = np.random.default_rng(0).integers(2**16, size=sum(LENGTHS)).astype(np.uint16)
STARTS = [0, *itertools.accumulate(LENGTHS)]


def corpus_of(folder: Path, asked: int = 10**9) -> Corpus:
    shards = []
    for begin in range(0, len(TOKENS_N), SHARD):
        end = min(begin + SHARD, len(TOKENS_N))
        rows = [(STARTS[n], 3 * n, 0) for n in range(len(LENGTHS)) if STARTS[n] < end and STARTS[n + 1] > begin]
        shards.append(write_shard(folder, f"train-{begin}", TOKENS_N[begin:end], np.array(rows), begin))
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


def test_in_order_each_token_but_the_first_is_a_target_once(corpus: Corpus) -> None:
    windows = Windows(corpus, "train", T, None)
    batches = [windows.batch(i, 1) for i in range(len(windows))]
    assert all(batch.dtype == np.int64 and batch.shape == (1, T + 1) for batch in batches)
    targets = np.concatenate([batch[0, 1:] for batch in batches])
    assert len(targets) > len(TOKENS_N) - 1 - T
    assert targets.tolist() == TOKENS_N[1 : 1 + len(targets)].tolist()
    assert all(batch[0, 0] == TOKENS_N[i * T] for i, batch in enumerate(batches))


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


@pytest.mark.parametrize("killed_at", [1, 9, 10, 23])
def test_after_a_resume_no_token_is_repeated_or_skipped(tmp_path: Path, killed_at: int) -> None:
    steps = range(30)
    uninterrupted = [Windows(corpus_of(tmp_path), "train", T, 1).batch(step, 4) for step in steps]
    assert len({str(batch) for batch in uninterrupted}) == len(steps)
    np.random.seed(0)  # noqa: NPY002  (and nothing depends on it)
    before, after = (Windows(corpus_of(tmp_path), "train", T, 1) for _ in range(2))
    resumed = [before.batch(step, 4) for step in steps[:killed_at]]
    resumed += [
        np.stack([after.batch(step, 4, rank, 2) for rank in range(2)], 1).reshape(4, -1) for step in steps[killed_at:]
    ]
    assert np.array_equal(np.stack(resumed), np.stack(uninterrupted))
    drawn = Counter(row for batch in resumed for row in rows_of(batch))
    epochs = 30 * 4 / len(after)
    assert set(drawn.values()) == {int(epochs), int(epochs) + 1}


def test_seeds_differ_and_the_global_generator_is_left_alone(corpus: Corpus) -> None:
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    one, same, other = (Windows(corpus, "train", T, seed).batch(0, 16) for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_documents_are_those_whose_tokens_are_in_the_batch(corpus: Corpus) -> None:
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    ordered, shuffled = Windows(corpus, "train", T, None), Windows(corpus, "train", T, 3)
    place = {window(i): i for i in range(len(ordered))}
    assert len(place) == len(ordered)
    for windows, size in itertools.product((ordered, shuffled), (1, 4)):
        for step in range(2 * len(windows) // size):
            owners = [n for row in rows_of(windows.batch(step, size)) for n in owner[place[row] * T :][: T + 1]]
            assert windows.documents(step, size) == [f"train/{3 * n}" for n in dict.fromkeys(owners)]


def test_a_run_sees_the_tokens_it_asked_for_even_if_there_are_more(tmp_path: Path) -> None:
    for asked in (T + 1, SHARD, 3 * SHARD + 1):
        windows = Windows(corpus_of(tmp_path, asked), "train", T, None)
        assert len(windows) == (asked - 1) // T
        assert rows_of(windows.batch(0, len(windows))) == [window(i) for i in range(len(windows))]


def test_a_window_as_long_as_the_split(corpus: Corpus) -> None:
    windows = Windows(corpus, "train", len(TOKENS_N) - 1, 0)
    assert len(windows) == 1
    assert windows.batch(3, 2).tolist() == [TOKENS_N.tolist()] * 2


@pytest.mark.parametrize(("split", "seq_len"), [("train", len(TOKENS_N)), ("validation", 1)])
def test_a_window_too_long_for_the_split(corpus: Corpus, split: str, seq_len: int) -> None:
    with pytest.raises(ValueError, match=rf"the {split} split has \d+ tokens, fewer than one window of .*--seq-len"):
        Windows(corpus, split, seq_len, 0)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_shared_out(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="batch size 6 is no multiple of 4 processes"):
        Windows(corpus, "train", T, 0).batch(0, 6, 1, 4)


def test_a_shard_that_vanished_is_named(corpus: Corpus) -> None:
    (corpus.folder / "train-98.documents.npy").unlink()
    with pytest.raises(ValueError, match=r"train-98.documents.npy is missing: delete the folder"):
        Windows(corpus, "train", T, 0)
