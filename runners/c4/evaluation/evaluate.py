"""The losses of a language model: of validation text, and of recall tokens and others apart.

A *recall token* completes a bigram that occurred earlier in the same window and is rare in the training data, so that
the model must recall it from the window (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 3: "AR hits"). In that
paper a bigram is rare if it occurs at most 1,250 times in training; 6.4% of the tokens of the Pile are then recall
tokens. Their models read ten billion tokens. Here the limit is the same share of the training tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from mixers.models import LanguageModel
from mixers.ops.numerics import product_autocast
from runners.c4.config import Config
from runners.c4.data.corpus import Corpus, Windows, open_shard
from runners.c4.model import token_losses

HIDDEN = 2**27
"""Number of values in the hidden vectors of all windows that are evaluated together: half a GiB in float32."""

RARE = 1250 / 10e9
"""Largest share of the training tokens that a rare bigram completes."""


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Turn off gradients and put the model in evaluation mode; matrix products keep the precision of training."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), product_autocast(device):
            yield
    finally:
        model.train(training)


def windows_together(config: Config, device: torch.device, world_size: int = 1) -> int:
    """Return how many windows to evaluate in a forward pass: at least as many as a process trains in one.

    On a GPU, evaluation runs without CUDA graphs, so fewer and larger passes launch fewer kernels. Only the activations
    of one layer are in memory at a time, where a training step without recomputation keeps those of all layers.
    On a CPU, larger passes are slower for most layers.

    Args:
        config: configuration of the run.
        device: where the model is evaluated.
        world_size: number of processes.
    """
    trained = config.sequences_at_once(world_size)
    if config.recompute or device.type == "cpu":
        return trained
    return max(trained, min(config.layers * trained, HIDDEN // (config.seq_len * config.shape().width)))


def validation_loss(
    model: LanguageModel,
    windows: Windows,
    tokens: int,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> float:
    """Return the mean cross-entropy over the first windows of a split.

    Args:
        model: the model, on ``device``.
        windows: the split in the order of the text (built with seed None).
        tokens: number of targets to read, one window at least; a window that they fill only in part is left out.
        batch_size: largest number of windows per forward pass on one rank.
        device: device of the model.
        rank: index of this process among the processes that share the windows.
        world: number of these processes. All run the same number of forward passes, because sharded parameters are
            gathered in each.

    Returns:
        The mean over the windows of all ranks in nats per token, the same on each rank.
    """
    length = windows.batch(0, world, rank, world).shape[1] - 1
    count = min(tokens // length, len(windows))

    # No rank reads a whole batch where its share of the windows is less.
    together = min(batch_size, math.ceil(count / world)) * world

    # Sum of the losses, and their number; windows that only fill the last batch have weight zero.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model, device):
        for step in range(math.ceil(count / together)):
            tokens_BT = torch.from_numpy(windows.batch(step, together, rank, world)).to(device)
            number_B = step * together + rank + world * torch.arange(len(tokens_BT), device=device)
            losses_BT = token_losses(model, tokens_BT)[number_B < count].double()
            sums += torch.stack([losses_BT.sum(), losses_BT.new_tensor(losses_BT.numel())])

    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def log_spaced(steps: int, evaluations: int) -> list[int]:
    """Return the steps at which a run of ``steps`` is evaluated, evenly spaced in the logarithm.

    There are ``evaluations`` of them, or ``steps`` if that is less. At the start, even spacing would repeat whole
    numbers. There, consecutive numbers are used instead, and the remaining steps are spaced evenly.

    >>> log_spaced(1000, 4), log_spaced(100, 8), log_spaced(3, 12)
    ([1, 10, 100, 1000], [1, 2, 4, 8, 15, 28, 53, 100], [1, 2, 3])
    """
    points = [1] if min(evaluations, steps) > 1 else [steps]
    for left in range(min(evaluations, steps) - 1, 0, -1):
        last = points[-1]
        points.append(max(last + 1, round(last * (steps / last) ** (1 / left))))
    return points


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
        parts = []
        with evaluating(model, device):
            for step in range(math.ceil(count / batch_size)):
                tokens_BT = torch.from_numpy(self.windows.batch(step, batch_size)).to(device)
                parts.append(token_losses(model, tokens_BT).double().cpu().numpy())

        losses_NT = np.concatenate(parts)[:count]  # the last batch goes on with the first windows
        recall, rest = (float(losses_NT[of].sum() / max(1, of.sum())) for of in (self.recall_NT, ~self.recall_NT))
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
    shards = (open_shard(corpus.folder, shard)[0] for shard in corpus.manifest.splits["train"].shards)
    counts = count_bigrams(shards, corpus.tokens("train"), known, vocab_size)
    is_rare_NT = counts[place_NT.reshape(keys_NT.shape)] <= rare
    seen_before_NT = np.stack([pd.Series(keys_T).duplicated() for keys_T in keys_NT])
    return RecallSplit(windows=windows, recall_NT=seen_before_NT & is_rare_NT, rare=rare)


def count_bigrams(
    pieces: Iterator[NDArray[np.integer]], left: int, known: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int64]:
    """Return how often each of the sorted keys ``known`` occurs as a bigram among the first tokens of a text.

    Args:
        pieces: tokens of the text, one piece after another.
        left: number of tokens to read.
        known: keys; the key of tokens a, b is ``a * vocab_size + b``.
        vocab_size: one more than the largest token.
    """
    counts = np.zeros(len(known), np.int64)
    last = np.empty(0, np.int64)
    for piece in pieces:
        tokens_N = np.concatenate([last, piece[:left]], dtype=np.int64)
        left -= min(left, len(piece))
        keys_N = tokens_N[:-1] * vocab_size + tokens_N[1:]
        place_N = np.minimum(np.searchsorted(known, keys_N), len(known) - 1)
        counts += np.bincount(place_N[known[place_N] == keys_N], minlength=len(known))
        last = tokens_N[-1:]
    return counts
