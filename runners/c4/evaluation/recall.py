"""The validation loss in two parts: tokens that the text before them tells, and the rest.

A *recall token* completes a bigram that stood before in the same window and is rare in training, so that the model must
have read it there (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 3: "AR hits"). They call a bigram rare that
training shows at most 1,250 times, which makes 6.4% of the tokens of the Pile recall tokens. Their models read ten
billion tokens; the same share of fewer tokens is a smaller count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mixers.models import LanguageModel
from runners.c4.corpus.prepare import Corpus
from runners.c4.corpus.shards import open_shard
from runners.c4.corpus.windows import Windows
from runners.c4.evaluation.evaluate import evaluating
from runners.c4.model import token_losses

RARE = 1250 / 10e9
"""Largest share of the training tokens that a rare bigram completes."""


@dataclass(frozen=True, kw_only=True)
class RecallSplit:
    """Which targets of the first validation windows are recall tokens.

    Attributes:
        windows: the validation split in order.
        recall_NT: for each target of N windows whether it is a recall token.
        rare: occurrences in the training split up to which a bigram is rare.
    """

    windows: Windows
    recall_NT: NDArray[np.bool_]
    rare: int

    @property
    def share(self) -> float:
        """Share of the targets that are recall tokens."""
        return float(self.recall_NT.mean())

    def losses(self, model: LanguageModel, batch_size: int, device: torch.device) -> tuple[float, float]:
        """Return the mean cross-entropy of the recall tokens and of the rest, in nats a token.

        Args:
            model: the model, on ``device``.
            batch_size: windows of one forward pass.
            device: where the model is.
        """
        count = len(self.recall_NT)
        sums, of_all = np.zeros(2), np.zeros(2)
        with evaluating(model, device):
            for step in range(-(-count // batch_size)):
                tokens_BT = torch.from_numpy(self.windows.batch(step, batch_size)).to(device)
                recall_BT = self.recall_NT[step * batch_size : (step + 1) * batch_size]
                losses_BT = token_losses(model, tokens_BT)[: len(recall_BT)].double().cpu().numpy()
                for part, chosen_BT in enumerate((recall_BT, ~recall_BT)):
                    sums[part] += losses_BT[chosen_BT].sum()
                    of_all[part] += chosen_BT.sum()

        recall, rest = (sums / np.maximum(of_all, 1)).tolist()
        return recall, rest


def split_recall(corpus: Corpus, windows: Windows, tokens: int, seq_len: int) -> RecallSplit:
    """Find the recall tokens among the first ``tokens`` validation targets.

    Args:
        corpus: the corpus; its training split tells which bigrams are rare.
        windows: its validation split in order (built with seed None).
        tokens: number of targets; a window that they do not fill is left out.
        seq_len: targets of a window.
    """
    vocab_size = corpus.manifest.vocab_size
    windows_NT = windows.batch(0, min(tokens // seq_len, len(windows)))
    keys_NT = windows_NT[:, :-1] * vocab_size + windows_NT[:, 1:]

    rare = max(1, int(RARE * corpus.tokens("train")))
    known, place_NT = np.unique(keys_NT, return_inverse=True)
    counts = count_bigrams(_training_pieces(corpus), known, vocab_size)
    is_rare_NT = counts[place_NT.reshape(keys_NT.shape)] <= rare
    return RecallSplit(windows=windows, recall_NT=seen_before(keys_NT) & is_rare_NT, rare=rare)


def seen_before(keys_NT: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each key whether its row has it at an earlier place."""
    order_NT = np.argsort(keys_NT, axis=1, kind="stable")
    sorted_NT = np.take_along_axis(keys_NT, order_NT, axis=1)
    again_NT = np.zeros(keys_NT.shape, np.bool_)
    again_NT[:, 1:] = sorted_NT[:, 1:] == sorted_NT[:, :-1]

    found_NT = np.empty_like(again_NT)
    np.put_along_axis(found_NT, order_NT, again_NT, axis=1)
    return found_NT


def count_bigrams(pieces: Iterator[NDArray[np.int64]], known: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return how often each of the sorted keys ``known`` is a bigram in pieces of text, borders between them included.

    The key of tokens a, b is ``a * vocab_size + b``.
    """
    counts = np.zeros(len(known), np.int64)
    last = np.empty(0, np.int64)
    for piece in pieces:
        tokens_N = np.concatenate([last, piece])
        keys_N = tokens_N[:-1] * vocab_size + tokens_N[1:]
        place_N = np.minimum(np.searchsorted(known, keys_N), len(known) - 1)
        counts += np.bincount(place_N[known[place_N] == keys_N], minlength=len(known))
        last = tokens_N[-1:]
    return counts


def _training_pieces(corpus: Corpus) -> Iterator[NDArray[np.int64]]:
    """Yield the training tokens that the run uses, a shard at a time."""
    left = corpus.tokens("train")
    for shard in corpus.manifest.splits["train"].shards:
        yield open_shard(corpus.folder, shard)[0][:left].astype(np.int64)
        left = max(0, left - shard.tokens)
