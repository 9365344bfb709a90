"""The code of classes that a notebook or a program defines itself."""

import subprocess
import sys
from typing import Any

import pytest
import torch

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


LAYER = """
import collections, fractions, functools, operator, re, types, torch, weakref
import numpy as np
from dataclasses import dataclass
{}
class Layer(torch.nn.Module):
    def forward(self, x):
        return {}
"""


def version(before: str, body: str = "f(x)") -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(LAYER.format(before, body), names)
    return code_version(names["Layer"])


@pytest.mark.parametrize(
    ("before", "one", "other"),
    [
        ("class F(torch.autograd.Function):\n def forward(c, x): return {} * x\nf = F.apply", "2", "3"),
        ("class A:\n def g(self, x): return {} * x\nf = A().g", "2", "3"),
        ("class D:\n def __init__(self, f): self.f = f\n@D\ndef f(x): return {} * x", "2", "3"),
        ("f = np.vectorize(lambda x: {} * x)", "2", "3"),
        ("class M(type):\n def m(self): return {}\nclass f(metaclass=M): pass", "2", "3"),
        ("def f(x): pass\nf.k = {}", "2", "3"),
        ("def f({}): pass", "a", "*a"),
        ("f = {}", "torch.float32", "torch.bfloat16"),
        ("f = {}", "np.float32(0.1)", "np.float32(0.2)"),
        ("f = {}", "range(2)", "range(3)"),
        ("f = {}", "torch.Tensor.relu", "torch.Tensor.sigmoid"),
        ("f = {}", "torch.nn.LeakyReLU(0.1)", "torch.nn.LeakyReLU(0.2)"),
        ("f = {}", "torch.tensor(1.0)", "torch.tensor(2.0)"),
        ("f = {}", "types.SimpleNamespace(a=1)", "types.SimpleNamespace(a=2)"),
        ("@dataclass\nclass C:\n a: int\nf = C({})", "1", "2"),
        ("a = {{1: lambda x: x + 1, 2: lambda x: x - 1}}\nf = a, a[{}]", "1", "2"),
        ("@dataclass(slots=True)\nclass C:\n a: int\nf = C({})", "1", "2"),
        ("class C:\n __slots__ = ('a',)\n def __init__(self, a): self.a = a\nf = C({})", "1", "2"),
        ("f = torch.nn.Sequential(torch.nn.{}())", "GELU", "ReLU"),
        ("f = torch.nn.Linear(2, 2, bias={})", "True", "False"),
        ("f = torch.nn.ParameterList([torch.{}(2)])", "zeros", "ones"),
        ("f = types.SimpleNamespace(a=[{}])", "1", "2"),
        ("f = fractions.Fraction({}, 5)", "1", "2"),
        ("f = re.compile({})", "'a'", "'b'"),
        ("f = collections.deque([{}])", "1", "2"),
        ("f = operator.attrgetter({})", "'a'", "'b'"),
        ("f = bytearray({})", "b'a'", "b'b'"),
        ("f = types.MappingProxyType(dict(a={}))", "1", "2"),
        ("f = np.random.default_rng({})", "1", "2"),
    ],
)
def test_code_and_constants_behind_other_objects_count(before: str, one: str, other: str) -> None:
    torch.manual_seed(0)
    first = version(before.format(one))
    torch.manual_seed(0)
    assert first == version(before.format(one)) != version(before.format(other))


def test_the_mode_of_a_module_does_not_count_and_is_kept() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(LAYER.format("class Own(torch.nn.Dropout): pass\nf, g = torch.nn.Dropout(), Own()", "f(g(x))"), names)
    before = code_version(names["Layer"])
    for module in (names["f"], names["g"]):
        assert module.training is True
        module.eval()
    assert code_version(names["Layer"]) == before
    names["g"].p = 0.25
    assert code_version(names["Layer"]) != before


@pytest.mark.parametrize(
    "before",
    [
        "class Q:\n __slots__ = ()\n def __getattr__(self, n): return 1\nf = Q()",
        "class Q:\n __slots__ = ()\n def __getattr__(self, n): raise KeyError(n)\nf = Q()",
        "f = []\nfor _ in range(600): f = [f]",
        "f = lambda: 1\nfor _ in range(200): f = (lambda g: lambda: g())(f)",
        "class Q: pass\nf = weakref.proxy(Q())",
        "f = {len, int}",
        "import threading\nf = threading.Lock()",
        "f = (n for n in range(3))",
        "f = np.random.default_rng(0)",
        "class N:\n def __init__(self, a): self.a, self.b = a, a\nf = None\nfor _ in range(60): f = N(f)",
    ],
)
def test_odd_objects_end_nothing(before: str) -> None:
    assert version(before) == version(before)


def test_a_layer_that_ran_and_another_variable_of_an_attributes_name_change_nothing() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    body = "def forward(self, x):\n  global MASK\n  MASK = MASK or self.heads\n  return x * MASK"
    exec(f"MASK = None\nclass Layer:\n heads = 1\n {body}", names)
    before = code_version(names["Layer"])
    names["Layer"]().forward(2)
    names["heads"] = 3
    assert names["MASK"] == 1
    assert code_version(names["Layer"]) == before


@pytest.mark.parametrize(
    "program",
    [
        "def g(x): return x\ndef h(x): return g(x)\nclass A:\n def r(self): return h\nf = {g, h, A}",
        "f = frozenset({('a', 'b'), ('c', 'd'), ('e', 'f', frozenset('gh'))})",
        "def f(x): return x in {('a', 'b'), ('c', 'd'), ('e', 'f')}",
    ],
)
def test_a_set_is_read_in_the_same_order_in_every_process(program: str) -> None:
    text = f"from tests.runners.test_interactive import version; print(version({program!r}))"
    found = {
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(found) == 1


def test_a_redefined_class_has_another_code_version() -> None:
    def of_body(body: str) -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Layer:\n    def forward(self, x):\n        return {body}", names)
        return code_version(names["Layer"])

    assert of_body("x + 1") == of_body("x + 1") != of_body("x + 2")
