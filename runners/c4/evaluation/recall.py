"""The validation loss in two parts: the loss of recall tokens, and the loss of all other tokens.

A *recall token* completes a bigram that occurred earlier in the same window and is rare in the training data, so that
the model must recall it from the window (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 3: "AR hits"). In that
paper a bigram is rare if it occurs at most 1,250 times in training; 6.4% of the tokens of the Pile are then recall
tokens. Their models read ten billion tokens. Here the limit is the same share of the training tokens.
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
    """The recall tokens among the targets of the first validation windows.

    Attributes:
        windows: the validation split, in the order of the text.
        recall_NT: whether each target of N windows is a recall token.
        rare: largest count in the training split of a rare bigram.
    """

    windows: Windows
    recall_NT: NDArray[np.bool_]
    rare: int

    @property
    def share(self) -> float:
        """Share of recall tokens among the targets."""
        return float(self.recall_NT.mean())

    def losses(self, model: LanguageModel, batch_size: int, device: torch.device) -> tuple[float, float]:
        """Return the mean cross-entropy of the recall tokens and of the other tokens, in nats per token.

        Args:
            model: the model, on ``device``.
            batch_size: largest number of windows per forward pass.
            device: device of the model.
        """
        count = len(self.recall_NT)
        batch_size = min(batch_size, count)
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
        corpus: the corpus; bigrams are counted in its training split.
        windows: its validation split in the order of the text (built with seed None).
        tokens: number of targets; a window that they fill only in part is left out.
        seq_len: targets per window.
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
    """Return for each key whether it also occurs earlier in its row."""
    order_NT = np.argsort(keys_NT, axis=1, kind="stable")
    sorted_NT = np.take_along_axis(keys_NT, order_NT, axis=1)
    again_NT = np.zeros(keys_NT.shape, np.bool_)
    again_NT[:, 1:] = sorted_NT[:, 1:] == sorted_NT[:, :-1]

    found_NT = np.empty_like(again_NT)
    np.put_along_axis(found_NT, order_NT, again_NT, axis=1)
    return found_NT


def count_bigrams(pieces: Iterator[NDArray[np.int64]], known: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return how often each of the sorted keys ``known`` occurs as a bigram of a text, which is given in pieces.

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
    """Yield the training tokens that the run uses, one shard at a time."""
    left = corpus.tokens("train")
    for shard in corpus.manifest.splits["train"].shards:
        yield open_shard(corpus.folder, shard)[0][:left].astype(np.int64)
        left = max(0, left - shard.tokens)
