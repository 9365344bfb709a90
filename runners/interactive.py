"""The code of classes that a notebook or a program defines itself: it belongs to no module that Python can find.

A class of ``__main__`` has no file, or one that has changed since it was read. So its code is taken from the objects:
the instructions of its methods, and whatever they name among the global names, function by function.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

MAIN = "__main__"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
ABOUT = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "__abstractmethods__"),
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "_abc_impl"),
}
"""Entries of a class that say something about it, and do nothing."""
MOST = 10_000
"""Number of entries from which on a container counts by its type and length: it is data that the program has loaded."""


def code_of(classes: Iterable[type], found_module: Callable[[str], None]) -> list[Any]:
    """Return all code of classes of ``__main__``, as nested lists of texts.

    Args:
        classes: the classes.
        found_module: takes the name of each other module from which their code names an object.
    """
    return [_Reader(found_module).read(item) for item in classes]


class _Reader:
    """Reads objects; each class and function once."""

    def __init__(self, found_module: Callable[[str], None]) -> None:
        self._found_module = found_module
        self._read: list[Any] = []
        self._around: list[Any] = []

    def read(self, item: Any) -> Any:
        """Return an object as nested lists of texts; of objects that hold no code and are not plain, the type alone."""
        if isinstance(item, PLAIN):
            return repr(item)
        if isinstance(item, tuple | list | dict | set | frozenset):
            return self._read_container(item)
        if isinstance(item, CodeType):
            return [item.co_code.hex(), *item.co_names, *item.co_varnames, *map(self.read, item.co_consts)]
        if isinstance(item, staticmethod | classmethod):
            return self.read(item.__func__)
        if isinstance(item, property):
            return [self.read(y) for y in (item.fget, item.fset)]
        if isinstance(item, partial):
            return [self.read(y) for y in (item.func, item.args, item.keywords)]
        if isinstance(item, cached_property):
            return self.read(item.func)
        if isinstance(item, ModuleType):
            self._found_module(item.__name__)
            return item.__name__
        if isinstance(item, type | FunctionType):
            return self._read_definition(item)
        if isinstance(item, BuiltinFunctionType):
            return f"{item.__module__}.{item.__qualname__}"
        inner = getattr(item, "__dict__", {}).get("__wrapped__")  # a cached function, for example
        return [self.read(type(item)), *([self.read(inner)] if inner is not None else [])]

    def _read_container(self, item: Any) -> Any:
        if len(item) >= MOST or any(item is outer for outer in self._around):
            return f"{type(item).__qualname__} of {len(item)}"
        if isinstance(item, set | frozenset):
            return sorted(repr(self.read(y)) for y in item)

        self._around.append(item)
        try:
            if isinstance(item, dict):
                return [[self.read(key), self.read(y)] for key, y in item.items()]
            return [self.read(y) for y in item]
        finally:
            self._around.pop()

    def _read_definition(self, item: Any) -> Any:
        if item.__module__ != MAIN:
            self._found_module(item.__module__ or "")
            return f"{item.__module__}.{item.__qualname__}"
        if any(item is y for y in self._read):
            return item.__qualname__

        self._read.append(item)
        if isinstance(item, type):
            entries = {name: y for name, y in vars(item).items() if name not in ABOUT}
            return [item.__qualname__, self.read(item.__bases__), self.read(entries)]
        names = sorted(_names(item.__code__) & item.__globals__.keys())
        around = [
            item.__defaults__,
            item.__kwdefaults__,
            _inner(item),
            {name: item.__globals__[name] for name in names},
        ]
        return [item.__qualname__, self.read(item.__code__), self.read(around)]


def _names(code: CodeType) -> set[str]:
    """Return the names that some code and the functions in it use, of attributes too."""
    return {*code.co_names}.union(*(_names(y) for y in code.co_consts if isinstance(y, CodeType)))


def _inner(function: FunctionType) -> list[Any]:
    """Return the variables of outer functions that a function uses, without those that have no value yet."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found
