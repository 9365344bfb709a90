"""Mean number of bytes of text per token, which converts nats per token into bits per byte."""

from typing import TYPE_CHECKING

from runners.c4.corpus.windows import Windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE = 2**18
"""Largest number of tokens that are decoded."""


def bytes_per_token(windows: Windows, seq_len: int, tokenizer: "Tokenizer") -> float | None:
    """Return the mean number of UTF-8 bytes per target token; end-of-text counts as zero bytes.

    The first tokens are decoded, so characters that the tokenizer drops do not count. None if the text is empty.

    Args:
        windows: a split, in the order of the text.
        seq_len: targets per window.
        tokenizer: the tokenizer that made the tokens.
    """
    count = min(len(windows), max(1, SAMPLE // seq_len))
    targets_NT = windows.batch(0, count)[:, 1:]
    text = tokenizer.decode(targets_NT.reshape(-1).tolist(), skip_special_tokens=True)
    return len(text.encode()) / targets_NT.size or None
