"""What a language model makes of text: the validation loss, and the log-probability of continuations of contexts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.models import LanguageModel
from mixers.ops.numerics import product_autocast
from runners.c4.corpus.windows import Windows
from runners.c4.model import token_losses

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOGIT_ROWS = 4096
"""Positions whose logits are in memory at a time: half a GiB at T5's vocabulary."""


class Pair(NamedTuple):
    """Tokens that are given, at least one, and those that are to be predicted after them."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What a model gives to a continuation.

    Attributes:
        log_probability: of the whole continuation, nats.
        tokens: length of the continuation.
        greedy: whether each of its tokens is the likeliest one.
    """

    log_probability: float
    tokens: int
    greedy: bool


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """No gradients, the model in evaluation mode; products are in the precision of training."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), product_autocast(device):
            yield
    finally:
        model.train(training)


def validation_loss(
    model: LanguageModel,
    windows: Windows,
    tokens: int,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> float:
    """Mean cross-entropy in nats per token over the windows that the first ``tokens`` targets of a split fill.

    Args:
        model: what is evaluated.
        windows: the split in order (built with seed None).
        tokens: how many targets to read; a window that they do not fill is left out.
        batch_size: windows of one forward pass on one rank.
        device: where the model is.
        rank: number of this process among those that share the windows.
        world: how many share them; each makes as many forward passes as every other, as sharded parameters need.

    Returns:
        The mean over the windows of all ranks, the same on each.

    Raises:
        ValueError: not one window is filled.
    """
    together = batch_size * world
    length = windows.batch(0, together, rank, world).shape[1] - 1
    count = min(tokens // length, len(windows))
    if count < 1:
        raise ValueError(
            f"{tokens} validation tokens in {len(windows)} windows of {length}: "
            f"give --validation-tokens {length} at least, and validation text that long"
        )
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
    """Steps at which a run of ``steps`` is evaluated: ``evaluations`` of them or all, evenly spaced in the logarithm.

    Whole numbers crowd at the start; there each follows the one before, and the rest is spaced anew.

    >>> log_spaced(1000, 4), log_spaced(100, 8), log_spaced(3, 12)
    ([1, 10, 100, 1000], [1, 2, 4, 8, 15, 28, 53, 100], [1, 2, 3])
    """
    points = [1] if min(evaluations, steps) > 1 else [steps]
    for left in range(min(evaluations, steps) - 1, 0, -1):
        last = points[-1]
        points.append(max(last + 1, round(last * (steps / last) ** (1 / left))))
    return points


def encode_pair(tokenizer: "Tokenizer", context: str, continuation: str, end_of_text: int) -> Pair:
    """Tokens of a context and of its continuation, split where lm-evaluation-harness splits them.

    The text is encoded whole and the context's tokens are taken off; white space that ends the context goes to the
    continuation first, for a tokenizer joins it to the next word. Without a token before the continuation (no context,
    or one that shares its only token with it), ``end_of_text`` stands there, as at the start of a training document.

    Raises:
        ValueError: the tokenizer makes no token of the continuation.
    """
    given = tokenizer.encode(context.rstrip(), add_special_tokens=False).ids
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    if whole == given:
        raise ValueError(f"the tokenizer makes no token of {continuation!r} after {context[-40:]!r}: give another one")
    split = min(len(given), len(whole) - 1)
    return Pair(whole[:split] or [end_of_text], whole[split:])


def log_likelihoods(
    model: LanguageModel, pairs: Sequence[Pair], batch_size: int, seq_len: int, device: torch.device
) -> list[Likelihood]:
    """Likelihood of each pair's continuation after its context, in the order of ``pairs``.

    The model reads at most ``seq_len`` tokens at a time, those just before what it predicts: a context that is too long
    is cut on the left. A longer continuation is read in parts, each of its tokens predicted once, the last part with
    as much context as fits. Batches hold windows of like length, padded on the right, which no causal model notices.
    """
    parts = [(pair, *part) for pair, (context, rest) in enumerate(pairs) for part in _parts(context, rest, seq_len)]
    parts.sort(key=lambda part: len(part[1]), reverse=True)  # memory is short at once or never
    totals_P = torch.zeros(len(pairs), dtype=torch.float64)
    missed_P = torch.zeros(len(pairs), dtype=torch.int64)
    with evaluating(model, device):
        for start in range(0, len(parts), batch_size):
            owners, texts, counts = zip(*parts[start : start + batch_size], strict=True)
            tokens_BT = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
            end_B1 = torch.tensor([len(text) for text in texts])[:, None]
            position_T = torch.arange(1, tokens_BT.shape[1])
            scored_BT = (position_T < end_B1) & (position_T >= end_B1 - torch.tensor(counts)[:, None])
            log_probability_N, greedy_N = _score(model, tokens_BT.to(device), scored_BT.to(device))
            owner_N = torch.tensor(owners)[scored_BT.nonzero()[:, 0]]
            totals_P.index_add_(0, owner_N, log_probability_N.double().cpu())
            missed_P.index_add_(0, owner_N, (~greedy_N).long().cpu())
    results = zip(pairs, totals_P.tolist(), missed_P.tolist(), strict=True)
    return [
        Likelihood(log_probability=total, tokens=len(pair.continuation), greedy=missed == 0)
        for pair, total, missed in results
    ]


def _parts(context: list[int], continuation: list[int], seq_len: int) -> Iterator[tuple[list[int], int]]:
    """Windows of at most ``seq_len + 1`` tokens and how many at the end of each are predicted."""
    tokens, done = context + continuation, len(context)
    while done < len(tokens):
        end = min(done + seq_len, len(tokens))
        yield tokens[max(0, end - seq_len - 1) : end], end - done
        done = end


def _score(model: LanguageModel, tokens_BT: Tensor, scored_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) float32 of the scored tokens of ``tokens_BT[:, 1:]``; whether each is the likeliest."""
    hidden_ND = model.encode(tokens_BT[:, :-1])[scored_BT]
    target_N = tokens_BT[:, 1:][scored_BT]
    log_probabilities, greedy = [], []
    for hidden, target in zip(hidden_ND.split(LOGIT_ROWS), target_N.split(LOGIT_ROWS), strict=True):
        # bfloat16 keeps two or three digits of a logit, too few to tell answers apart
        with torch.autocast(tokens_BT.device.type, enabled=False):
            logits = model.readout(hidden.float())
        log_probabilities.append(-F.cross_entropy(logits, target, reduction="none"))
        greedy.append(logits.argmax(dim=-1) == target)
    return torch.cat(log_probabilities), torch.cat(greedy)
