"""Mean number of bytes of text per token, which converts nats per token into bits per byte."""

import math
from typing import TYPE_CHECKING

from runners.c4.corpus.windows import Windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 2**18
"""Number of tokens that are decoded together, to limit memory."""


def bytes_per_token(windows: Windows, seq_len: int, tokenizer: "Tokenizer") -> float | None:
    """Return the mean number of UTF-8 bytes per target token of a split; end-of-text counts as zero bytes.

    All targets of ``windows`` count, which are those that an evaluation reads. The tokens are decoded, so characters
    that the tokenizer drops do not count. A space or character at the border of two pieces of ``PIECE`` tokens may be
    counted wrongly by a few bytes. None if the text is empty.

    Args:
        windows: a split, in the order of the text.
        seq_len: targets per window.
        tokenizer: the tokenizer that made the tokens.
    """
    together = max(1, PIECE // seq_len)
    size = 0
    for step in range(math.ceil(len(windows) / together)):
        left = len(windows) - step * together  # the last piece goes on with the first windows
        targets_NT = windows.batch(step, together)[:left, 1:]
        text = tokenizer.decode(targets_NT.reshape(-1).tolist(), skip_special_tokens=True)
        size += len(text.encode())
    return size / (len(windows) * seq_len) or None
