"""Likelihoods under a language model: the validation loss, and log-probabilities of continuations after contexts."""

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
from runners.c4.config import Config
from runners.c4.corpus.windows import Windows
from runners.c4.model import token_losses

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOGIT_ROWS = 4096
"""Number of positions whose logits are in memory at a time: half a GiB with T5's vocabulary."""
HIDDEN = 2**27
"""Number of values in the hidden vectors of all windows that are evaluated together: half a GiB in float32."""


class Pair(NamedTuple):
    """The tokens of a context, at least one, and the tokens of its continuation, which the model predicts."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Likelihood of a continuation under a model.

    Attributes:
        log_probability: log-probability of the whole continuation, in nats.
        tokens: length of the continuation in tokens.
        greedy: whether each of its tokens is the most likely one.
    """

    log_probability: float
    tokens: int
    greedy: bool


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
        tokens: number of targets to read; a window that they fill only in part is left out.
        batch_size: largest number of windows per forward pass on one rank.
        device: device of the model.
        rank: index of this process among the processes that share the windows.
        world: number of these processes. All run the same number of forward passes, because sharded parameters are
            gathered in each.

    Returns:
        The mean over the windows of all ranks in nats per token, the same on each rank.

    Raises:
        ValueError: the tokens do not fill a window.
    """
    length = windows.batch(0, world, rank, world).shape[1] - 1
    count = min(tokens // length, len(windows))
    if count < 1:
        raise ValueError(
            f"{tokens} validation tokens in {len(windows)} windows of {length}: "
            f"give --validation-tokens {length} at least, and validation text that long"
        )

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


def encode_pair(tokenizer: "Tokenizer", context: str, continuation: str, end_of_text: int) -> Pair:
    """Encode a context and its continuation, split in the same place as in lm-evaluation-harness.

    The whole text is encoded, and the context's tokens are cut off. White space at the end of the context belongs to
    the continuation, because a tokenizer joins it to the next word.

    Args:
        tokenizer: the tokenizer.
        context: text of the context.
        continuation: text of the continuation.
        end_of_text: token used as the context if no token precedes the continuation, because the context is empty or
            shares its only token with the continuation. Training documents follow this token, too.

    Raises:
        ValueError: the continuation encodes to no token.
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
    """Return the likelihood of each pair's continuation after its context, in the order of ``pairs``.

    The model reads at most ``seq_len`` tokens at a time, so a longer context is cut on the left. A longer continuation
    is read in parts: each of its tokens is predicted once, and the last part has as much context as fits. A batch holds
    windows of similar length, padded on the right; causal models ignore the padding.

    Args:
        model: the model, on ``device``.
        pairs: contexts and continuations.
        batch_size: windows per forward pass.
        seq_len: largest number of tokens that the model reads at a time.
        device: device of the model.
    """
    # The longest windows come first, so that memory runs out in the first batch or not at all.
    parts = [(pair, *part) for pair, (context, rest) in enumerate(pairs) for part in _parts(context, rest, seq_len)]
    parts.sort(key=lambda part: len(part[1]), reverse=True)

    totals_P = torch.zeros(len(pairs), dtype=torch.float64)
    missed_P = torch.zeros(len(pairs), dtype=torch.int64)
    with evaluating(model, device):
        for start in range(0, len(parts), batch_size):
            owners, texts, counts = zip(*parts[start : start + batch_size], strict=True)
            tokens_BT = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)

            # Score the last tokens of each window before the padding.
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
    """Yield windows of at most ``seq_len + 1`` tokens, each with the number of tokens at its end to predict."""
    tokens, done = context + continuation, len(context)
    while done < len(tokens):
        end = min(done + seq_len, len(tokens))
        yield tokens[max(0, end - seq_len - 1) : end], end - done
        done = end


def _score(model: LanguageModel, tokens_BT: Tensor, scored_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Score the tokens of ``tokens_BT[:, 1:]`` that ``scored_BT`` selects.

    Returns:
        Their log-probabilities (N,) in float32, and whether each is the most likely token (N,).
    """
    hidden_ND = model.encode(tokens_BT[:, :-1])[scored_BT]
    target_N = tokens_BT[:, 1:][scored_BT]
    log_probabilities, greedy = [], []
    for hidden, target in zip(hidden_ND.split(LOGIT_ROWS), target_N.split(LOGIT_ROWS), strict=True):
        # Use float32: bfloat16 keeps two or three digits of a logit, too few to distinguish answers.
        with torch.autocast(tokens_BT.device.type, enabled=False):
            logits = model.readout(hidden.float())
        log_probabilities.append(-F.cross_entropy(logits, target, reduction="none"))
        greedy.append(logits.argmax(dim=-1) == target)

    return torch.cat(log_probabilities), torch.cat(greedy)
