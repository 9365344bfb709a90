"""The code of classes that a notebook or a program defines itself."""

from typing import Any

import pytest

from runners.interactive import code_of
from runners.provenance import code_version

PROGRAM = '''
from functools import cache, cached_property, partial
from math import sqrt
import torch
from tasks import parity

RATE, SIZES, unused = 0.5, [1, 2], 1

def outer(factor):
    def inner(x):
        return factor * x
    return inner

scaled = outer(2)

def helper(x, by=1):
    return [scaled(y) + by for y in x]

@cache
def remembered(x):
    return 6 * x

half = partial(pow, 2)

class Activation:
    def __call__(self, x):
        return 8 * x

activation = Activation()
CYCLE = []
CYCLE.append(CYCLE)

class Base:
    def start(self):
        return RATE, activation(1), remembered(2), half, CYCLE, TABLE, {"a", "b"}

    @cached_property
    def later(self):
        return 9

TABLE = dict.fromkeys(range(10_000))

class Layer(Base):
    """A layer."""

    heads: int = 4

    def forward(self, x):
        return helper(x) + SIZES + [sqrt(4), parity]

    @property
    def other(self):
        return Layer

    @staticmethod
    def third():
        return 3
'''


def code(program: str = PROGRAM, *changes: str) -> tuple[str, set[str]]:
    """The code of the layer of a program in which texts are replaced, in turn, and the modules that it names."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    modules: set[str] = set()
    return repr(code_of([names["Layer"], names["Base"]], modules.add)), modules


def test_the_same_program_has_the_same_code() -> None:
    text, modules = code()
    assert text == code()[0]
    assert modules == {"tasks.parity", "builtins", "functools"}
    assert "0x" not in text  # no address of an object


@pytest.mark.parametrize(
    "change",
    [
        ("return helper(x) + SIZES", "return helper(x) + 2 * SIZES"),
        ("scaled(y) + by", "scaled(y) - by"),
        ("by=1", "by=2"),
        ("factor * x", "factor + x"),
        ("outer(2)", "outer(3)"),
        ("RATE, SIZES, unused = 0.5, [1, 2], 1", "RATE, SIZES, unused = 0.25, [1, 2], 1"),
        ("RATE, SIZES, unused = 0.5, [1, 2], 1", "RATE, SIZES, unused = 0.5, [1, 3], 1"),
        ("return RATE", "return -RATE"),
        ("return 6 * x", "return 7 * x"),
        ("return 8 * x", "return 7 * x"),
        ("return 9", "return 7"),
        ("partial(pow, 2)", "partial(pow, 3)"),
        ("partial(pow, 2)", "partial(abs, 2)"),
        ("range(10_000)", "range(10_001)"),
        ("heads: int = 4", "heads: int = 8"),
        ("return Layer\n", "return Base\n"),
        ("return 3", "return 4"),
        ("import sqrt", "import cos as sqrt"),
        ("class Layer(Base):", "class Layer(Base, list):"),
    ],
)
def test_a_change_of_what_the_layer_reaches_counts(change: tuple[str, str]) -> None:
    assert code(PROGRAM, *change)[0] != code()[0]


@pytest.mark.parametrize(
    "change",
    [
        ("[1, 2], 1\n", "[1, 2], 7\n"),
        ("class Base:", "def further():\n    return 5\n\n\nclass Base:"),
        ('"""A layer."""', '"""Another text."""'),
        ("import torch\n", "\n\n# A comment.\n"),
    ],
)
def test_what_it_does_not_reach_does_not_count(change: tuple[str, str]) -> None:
    assert code(PROGRAM, *change)[0] == code()[0]


def test_a_redefined_class_has_another_code_version() -> None:
    def version(body: str) -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Layer:\n    def forward(self, x):\n        return {body}", names)
        return code_version(names["Layer"])

    assert version("x + 1") == version("x + 1") != version("x + 2")
