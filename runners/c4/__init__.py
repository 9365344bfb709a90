"""Pretraining of language models, as the command ``python -m runners.c4`` and as Python functions.

from runners.c4 import load_model, pretrain

result = pretrain("rt", preset="tiny", data="my_texts")
result.validation_loss
pandas.DataFrame(result.curve())
model, tokenizer = load_model(result.folder)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.c4.export import load_model
    from runners.c4.pretraining import Result, pretrain

__all__ = ["Result", "load_model", "pretrain"]

_MODULES = {
    "Result": "runners.c4.pretraining",
    "load_model": "runners.c4.export",
    "pretrain": "runners.c4.pretraining",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, because its module is slow to import.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
