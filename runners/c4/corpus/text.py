"""Bytes of text that a token stands for, which turn nats a token into bits a byte."""

from typing import TYPE_CHECKING

from runners.c4.corpus.windows import Windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE = 2**18
"""Tokens that are decoded, at most."""


def bytes_per_token(windows: Windows, seq_len: int, tokenizer: "Tokenizer") -> float | None:
    """Return the mean UTF-8 bytes of the text of a target token; end-of-text stands for none.

    The text is decoded from the first tokens, so it lacks what the tokenizer does not keep. None if it is empty.

    Args:
        windows: a split, in the order of the text.
        seq_len: targets of a window.
        tokenizer: the tokenizer of its tokens.
    """
    count = min(len(windows), max(1, SAMPLE // seq_len))
    targets_NT = windows.batch(0, count)[:, 1:]
    text = tokenizer.decode(targets_NT.reshape(-1).tolist(), skip_special_tokens=True)
    return len(text.encode()) / targets_NT.size or None
