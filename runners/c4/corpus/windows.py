"""Batches of token windows: shuffled by seed, shared out to ranks, a function of the step alone.

Nothing is drawn from a global generator and nothing is remembered between calls, so a run that goes on from step k
reads what a run from step 0 would have read there, with any number of ranks.
"""

from functools import lru_cache, partial

import numpy as np

from runners.c4.corpus.prepare import Corpus
from runners.c4.corpus.shards import open_shard
from runners.c4.corpus.sources import Split


class Windows:
    """A split as windows of T+1 tokens that overlap by one: every token but the first is a target once an epoch.

    The windows of all epochs form one sequence, and batch k is the k-th piece of it; an epoch may end within a batch.
    Tokens at the end that fill no window are left out.

    Args:
        corpus: what ``data.prepare`` returned.
        split: which split.
        seq_len: T.
        seed: of the order, which is another one in each epoch; None for the order of the text.

    Raises:
        ValueError: a shard is missing or damaged, or the split has fewer than T+1 tokens.
    """

    def __init__(self, corpus: Corpus, split: Split, seq_len: int, seed: int | None) -> None:
        tokens = corpus.tokens(split)
        self._split, self._seq_len = split, seq_len
        self._count = (tokens - 1) // seq_len
        if self._count < 1:
            raise ValueError(
                f"the {split} split has {tokens:,} tokens, fewer than one window of {seq_len + 1:,}: lower --seq-len "
                "or give more --data"
            )
        self._order = lru_cache(maxsize=2)(partial(_order, self._count, seed))  # an epoch may end within a batch
        ends = np.cumsum([shard.tokens for shard in corpus.manifest.splits[split].shards])
        used = np.searchsorted(ends, tokens) + 1
        self._ends = ends[:used]
        self._shards = [open_shard(corpus.folder, shard) for shard in corpus.manifest.splits[split].shards[:used]]

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._count

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Tokens (batch_size / world, T+1), int64, of one rank: every ``world``-th window of batch ``step``.

        Raises:
            ValueError: ``batch_size`` is no multiple of ``world``.
        """
        if batch_size % world:
            raise ValueError(f"batch size {batch_size} is no multiple of {world} processes: change one of them")
        begins = self._begins(step, batch_size)[rank::world]
        return np.stack([self._read(begin) for begin in begins])

    def documents(self, step: int, batch_size: int) -> list[str]:
        """Documents ``split/number`` with tokens in batch ``step``, all ranks together, in the order of the batch.

        The number is that of the line in the sequence of the split's source files, from 0.
        """
        numbers = (n for begin in self._begins(step, batch_size) for n in self._document_numbers(begin))
        return [f"{self._split}/{number}" for number in dict.fromkeys(numbers)]

    def _begins(self, step: int, batch_size: int) -> list[int]:
        """Position in the split of each window of batch ``step``."""
        places = range(step * batch_size, (step + 1) * batch_size)
        return [int(self._order(place // self._count)[place % self._count]) * self._seq_len for place in places]

    def _pieces(self, begin: int) -> list[tuple[int, int, int]]:
        """Shards that the window at ``begin`` is in, with the range of positions within the split in each."""
        end = begin + self._seq_len + 1
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        borders = [begin, *self._ends[first:last].tolist(), end]
        return list(zip(range(first, last + 1), borders[:-1], borders[1:], strict=True))

    def _read(self, begin: int) -> np.ndarray:
        pieces = []
        for shard, start, stop in self._pieces(begin):
            tokens_N, _documents_D3 = self._shards[shard]
            offset = int(self._ends[shard]) - len(tokens_N)
            pieces.append(tokens_N[start - offset : stop - offset])
        return np.concatenate(pieces, dtype=np.int64)

    def _document_numbers(self, begin: int) -> list[int]:
        numbers: list[int] = []
        for shard, start, stop in self._pieces(begin):
            _tokens_N, documents_D3 = self._shards[shard]
            first = np.searchsorted(documents_D3[:, 0], start, side="right") - 1
            last = np.searchsorted(documents_D3[:, 0], stop, side="left")
            numbers += documents_D3[first:last, 1].tolist()
        return numbers


def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """Numbers of all windows in the order of an epoch."""
    return np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)
