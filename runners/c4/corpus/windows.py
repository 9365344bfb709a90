"""Batches of token windows, shuffled by a seed and divided among ranks.

A batch depends only on the seed and the step: no global generator is used, and no state is kept between calls. A run
that continues from step k therefore reads the same windows as a run from step 0, with any number of ranks.
"""

from functools import lru_cache, partial

import numpy as np

from runners.c4.corpus.prepare import Corpus
from runners.c4.corpus.shards import open_shard
from runners.c4.corpus.sources import Split


class Windows:
    """A split as windows of T+1 tokens that overlap by one: every token but the first is a target once per epoch.

    The windows of all epochs form one sequence, and batch k is its k-th piece; an epoch may end within a batch. Tokens
    at the end that do not fill a window are left out.

    Args:
        corpus: the corpus, from ``runners.c4.corpus.prepare.prepare``.
        split: name of the split.
        seq_len: T.
        seed: seed of the shuffled order, which differs between epochs; None keeps the order of the text.

    Raises:
        ValueError: a shard is missing or damaged, or the split has fewer than T+1 tokens.
    """

    def __init__(self, corpus: Corpus, split: Split, seq_len: int, seed: int | None) -> None:
        tokens = corpus.tokens(split)
        self._split = split
        self._seq_len = seq_len
        self._count = (tokens - 1) // seq_len
        corpus.check_window(split, seq_len)

        # A batch needs two orders if an epoch ends within it.
        self._order = lru_cache(maxsize=2)(partial(_order, self._count, seed))

        # The shards that the run uses, and the position in the split at which each shard ends.
        shards = corpus.manifest.splits[split].shards
        ends = np.cumsum([shard.tokens for shard in shards])
        used = np.searchsorted(ends, tokens) + 1
        self._ends = ends[:used]
        self._shards = [open_shard(corpus.folder, shard) for shard in shards[:used]]

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self._count

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return the windows of one rank: every ``world``-th window of batch ``step``.

        Args:
            step: index of the batch.
            batch_size: number of windows of the batch over all ranks.
            rank: index of this rank.
            world: number of ranks.

        Returns:
            Tokens (batch_size / world, T+1), int64.

        Raises:
            ValueError: ``batch_size`` is no multiple of ``world``.
        """
        if batch_size % world:
            raise ValueError(f"batch size {batch_size} is no multiple of {world} processes: change one of them")
        begins = self._begins(step, batch_size)[rank::world]
        return np.stack([self._read(begin) for begin in begins])

    def documents(self, step: int, batch_size: int) -> list[str]:
        """Return the documents ``split/number`` with tokens in batch ``step`` of all ranks, in the order of the batch.

        The number is the index of the document's line in the split's source files, counted over all files.
        """
        numbers = (n for begin in self._begins(step, batch_size) for n in self._document_numbers(begin))
        return [f"{self._split}/{number}" for number in dict.fromkeys(numbers)]

    def _begins(self, step: int, batch_size: int) -> list[int]:
        """Return the position in the split of each window of batch ``step``."""
        places = range(step * batch_size, (step + 1) * batch_size)
        return [int(self._order(place // self._count)[place % self._count]) * self._seq_len for place in places]

    def _pieces(self, begin: int) -> list[tuple[int, int, int]]:
        """Return the shards that hold the window at ``begin``, and the window's range of positions in each.

        Returns:
            Index of the shard, first position, and end position; positions count from the start of the split.
        """
        end = begin + self._seq_len + 1
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        borders = [begin, *self._ends[first:last].tolist(), end]
        return list(zip(range(first, last + 1), borders[:-1], borders[1:], strict=True))

    def _read(self, begin: int) -> np.ndarray:
        """Return the tokens (T+1,), int64, of the window at ``begin``."""
        pieces = []
        for shard, start, stop in self._pieces(begin):
            tokens_N, _documents_D3 = self._shards[shard]
            offset = int(self._ends[shard]) - len(tokens_N)
            pieces.append(tokens_N[start - offset : stop - offset])
        return np.concatenate(pieces, dtype=np.int64)

    def _document_numbers(self, begin: int) -> list[int]:
        """Return the numbers of the documents with tokens in the window at ``begin``."""
        numbers: list[int] = []
        # Rows are sorted by position. Take those from the document of the first token to the document of the last.
        for shard, start, stop in self._pieces(begin):
            _tokens_N, documents_D3 = self._shards[shard]
            first = np.searchsorted(documents_D3[:, 0], start, side="right") - 1
            last = np.searchsorted(documents_D3[:, 0], stop, side="left")
            numbers += documents_D3[first:last, 1].tolist()
        return numbers


def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return the indices of all windows (count,) in the order of an epoch."""
    return np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)
