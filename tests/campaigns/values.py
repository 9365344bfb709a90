"""Values for options, most of them bad, generated from the options' own types."""

import math
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

WORDS = st.sampled_from(
    ["", " ", "-", "--", "nan", "inf", "None", "True", "1e3", "0x10", "1_0", "٣", "½", "a b", "'", "\n"]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40) | WORDS
EDGES = [0, 1, 2, 3, 7, -1, 31, 63, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**6, 10**9, 10**12, 10**30]
NUMBERS = st.sampled_from(EDGES) | st.integers(-3, 70) | st.integers()
FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]) | st.floats()
PATHS = st.sampled_from(
    [
        "",
        ".",
        "..",
        "a/b/c",
        "file",
        "file/below",
        "folder",
        "folder/",
        "/dev/null",
        "/proc/none",
        "x" * 300,
        "ü",
        "-x",
        "~",
    ]
)
"""``file`` and ``folder`` are there."""


def words_of(kind: Any) -> SearchStrategy[list[str]]:
    """Return lists of words to stand behind an option of a type: mostly of that type, sometimes any text."""
    return _typed(kind) | st.lists(TEXT, max_size=2)


def _typed(kind: Any) -> SearchStrategy[list[str]]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _typed(inner[0])
    if origin in (Union, types.UnionType):
        return st.one_of([_typed(choice) for choice in inner if choice is not type(None)])
    if origin is Literal:
        return st.sampled_from([[str(value)] for value in inner])
    if origin in (tuple, list, Sequence):
        return st.lists(_typed(inner[0]), max_size=3).map(lambda lists: [word for words in lists for word in words])
    if kind is bool:
        return st.sampled_from([[], ["True"], ["False"], ["yes"]])

    simple = {int: NUMBERS, float: FLOATS, Path: PATHS, str: PATHS | TEXT}
    return simple[kind].map(lambda value: [str(value)])


def options_of(options_class: type, prefix: str = "") -> dict[str, SearchStrategy[list[str]]]:
    """Return, by option of a dataclass, the words that stand behind it."""
    hints = get_type_hints(options_class, include_extras=True)
    return {f"--{prefix}{f.name.replace('_', '-')}": words_of(hints[f.name]) for f in fields(options_class)}
