"""Load tokenizers, and read from them what a corpus and a model need."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from runners.c4.corpus.sources import first_line, hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names of the end-of-text token, in order of preference."""


def file_beside(texts: Path) -> Path:
    """Return the place of the tokenizer that ``python -m runners.c4 convert`` makes in a folder of texts.

    It has a folder of its own, because every JSON file in the folder of the texts would be read as text.
    """
    return texts / "tokenizer" / "tokenizer.json"


def load_tokenizer(name: str) -> "Tokenizer":
    """Load a tokenizer that neither truncates nor pads.

    Args:
        name: a ``tokenizer.json`` file, or a name on the Hugging Face hub.

    Raises:
        ValueError: there is no such file or name, there is no network, or the file holds no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("tokenising needs the package tokenizers: pip install -e '.[pretraining]'") from error

    # Do not look up on the hub a name that can only be a file.
    is_file = Path(name).is_file()
    if not is_file and (name.endswith(".json") or Path(name).is_dir()):
        raise ValueError(f"no tokenizer file {name}: give --tokenizer a tokenizer.json or a name on the hub")

    try:
        if is_file:
            tokenizer = Tokenizer.from_file(name)
        else:
            with hub():
                tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception, and the network's errors have no common base
        where, more = ("file", "") if is_file else ("on the hub, or no network", ", and --data too without a network")
        raise ValueError(
            f"no tokenizer {name!r} {where} ({first_line(error)}): give --tokenizer a tokenizer.json file, such as "
            f"python -m runners.c4 convert makes{more}"
        ) from error

    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(tokenizer: "Tokenizer") -> str:
    """Return the hash of a tokenizer's whole definition, the same from a file and from the hub."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def vocab_size(tokenizer: "Tokenizer") -> int:
    """Return the largest token id plus one, which may exceed the tokenizer's own count of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text(tokenizer: "Tokenizer") -> int:
    """Return the id of the token that follows each document.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = [special[token] for token in END_OF_TEXT if token in special]

    if not found:
        raise ValueError(
            f"the tokenizer has no end-of-text token: give another one, or add one of {', '.join(END_OF_TEXT)} to its "
            "added_tokens as a special token"
        )
    return found[0]
