"""Load tokenizers, and read from them what a corpus and a model need."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizer
else:
    Tokenizer = Any  # the package is optional

END_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names of the end-of-text token, in order of preference."""


def file_beside(texts: Path) -> Path:
    """Return the place of the tokenizer that ``python -m runners.c4 convert`` makes in a folder of texts.

    It has a folder of its own, because every JSON file in the folder of the texts would be read as text.
    """
    return texts / "tokenizer" / "tokenizer.json"


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer that neither truncates nor pads, and reads a special token that a text spells as text.

    Every program that reads text loads its tokenizer here, so that it reads texts as a model was trained on them.

    Args:
        name: a ``tokenizer.json`` file, or a name on the Hugging Face hub.

    Raises:
        ValueError: there is no such file or name, there is no network, or the file holds no tokenizer.
    """
    try:
        import tokenizers

        is_file = name.endswith(".json") or Path(name).exists()
        loader = tokenizers.Tokenizer.from_file if is_file else tokenizers.Tokenizer.from_pretrained
        tokenizer = loader(name)
    except Exception as error:  # the library raises plain Exception, and the network's errors have no common base
        missing = isinstance(error, ImportError)
        advice = "pip install -e '.[pretraining]'" if missing else "give --tokenizer a tokenizer.json, as convert makes"
        raise ValueError(f"no tokenizer {name!r} ({error}): {advice}") from error

    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one, which may exceed the tokenizer's own count of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the token that follows each document.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for token in END_OF_TEXT:
        if token in special:
            return special[token]
    raise ValueError(
        f"the tokenizer has no end-of-text token: give another one, or add one of {', '.join(END_OF_TEXT)} to its "
        "added_tokens as a special token"
    )
