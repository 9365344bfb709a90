"""The code of classes that a notebook or a program defines itself: it belongs to no module that Python can find.

A class of ``__main__`` has no file, or one that has changed since it was read. So its code is taken from the objects:
the instructions of its methods, and whatever they name among the global names, function by function.
"""

import copyreg
import dis
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

MAIN = "__main__"
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(np.generic, torch.dtype, torch.device, PurePath),
)
"""Types whose values are their texts."""
DEFINED = (type, FunctionType)
ABOUT = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "__abstractmethods__"),
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "_abc_impl"),
}
"""Entries of a class that say something about it, and do nothing."""
MOST = 10_000
"""Number of entries from which on a container or a tensor counts by its type and size: it is data that was loaded."""
MOST_OBJECTS = 100_000
"""Number of objects from which on further ones count by their types."""
DEEPEST = 100
"""Depth at which objects inside objects count by their types."""


def code_of(classes: Iterable[type], found_module: Callable[[str], None]) -> list[Any]:
    """Return all code of classes of ``__main__``, as nested lists of texts.

    Args:
        classes: the classes.
        found_module: takes the name of each other module from which their code names an object.
    """
    return [_Reader(found_module).read(item) for item in classes]


class _Reader:
    """Reads objects; one that may hold itself is read once, and has a number where it is met again."""

    def __init__(self, found_module: Callable[[str], None]) -> None:
        self._found_module = found_module
        self._known: dict[int, tuple[int, Any]] = {}  # with the object itself, whose ``id`` else becomes another's
        self._depth = 0

    def read(self, item: Any) -> Any:
        """Return an object as nested lists of texts; of an object that cannot be read, the type alone."""
        if self._depth >= DEEPEST or len(self._known) >= MOST_OBJECTS:
            return type(item).__qualname__
        self._depth += 1
        try:
            return self._parts(item)
        except Exception:  # the attributes of a user's object may do anything
            return type(item).__qualname__
        finally:
            self._depth -= 1

    def _parts(self, item: Any) -> Any:
        if isinstance(item, PLAIN):
            return repr(item)
        if isinstance(item, torch.Tensor | np.ndarray):
            size = item.numel() if isinstance(item, torch.Tensor) else item.size
            return [str(item.dtype), *item.shape, repr(item.tolist()) if size < MOST else ""]

        # Code, and what wraps it.
        if isinstance(item, CodeType):
            return [item.co_code.hex(), *item.co_names, *item.co_varnames, *map(self.read, item.co_consts)]
        if isinstance(item, staticmethod | classmethod):
            return self.read(item.__func__)
        if isinstance(item, MethodType):
            return [self.read(item.__func__), self.read(item.__self__)]
        if isinstance(item, property):
            return [self.read(y) for y in (item.fget, item.fset)]
        if isinstance(item, partial | partialmethod):
            return [self.read(y) for y in (item.func, item.args, item.keywords)]
        if isinstance(item, cached_property):
            return self.read(item.func)

        # What has a name.
        if isinstance(item, ModuleType):
            self._found_module(item.__name__)
            return item.__name__
        if isinstance(item, DEFINED) and item.__module__ != MAIN:
            self._found_module(item.__module__ or "")
            return f"{item.__module__}.{item.__qualname__}"
        if isinstance(item, BuiltinFunctionType) or type(item).__name__ == "method_descriptor":
            return f"{getattr(item, '__module__', None)}.{item.__qualname__}"

        # What may hold itself.
        if isinstance(item, tuple | frozenset):
            return self._container(item)
        number, _ = self._known.setdefault(id(item), (len(self._known), item))
        if number < len(self._known) - 1:
            return f"object {number}"
        if isinstance(item, DEFINED):
            return self._definition(item)
        return self._container(item) if isinstance(item, list | dict | set) else self._object(item)

    def _container(self, item: Any) -> Any:
        if len(item) >= MOST:
            return f"{type(item).__qualname__} of {len(item)}"
        if isinstance(item, dict):
            return [[self.read(key), self.read(y)] for key, y in item.items()]
        if isinstance(item, set | frozenset):  # whose order is not that of another process
            item = sorted(item, key=_place_in_a_set)
        return [self.read(y) for y in item]

    def _object(self, item: Any) -> Any:
        """Return the type of an object, and what it holds.

        Of a class of ``__main__``, and of a module of PyTorch, these are its attributes; of another class, what a copy
        of the object would be made of. The mode of a module, training or not, changes while it is used.
        """
        kind = type(item)
        if kind.__module__ == MAIN or isinstance(item, torch.nn.Module):
            held: Any = object.__getstate__(item)
            if isinstance(held, dict):
                held = {name: y for name, y in held.items() if name != "training"}
            return [self.read(kind), self.read(held)]
        if isinstance(item, Mapping):
            return [self.read(kind), self.read(dict(item))]

        copied = copyreg.dispatch_table[kind](item) if kind in copyreg.dispatch_table else item.__reduce_ex__(2)
        parts = copied if isinstance(copied, str) else [[*y] if isinstance(y, Iterator) else y for y in copied]
        return [self.read(kind), self.read(parts), self.read(getattr(item, "__dict__", None))]

    def _definition(self, item: Any) -> Any:
        """Return a class or a function of ``__main__``, with what it names."""
        if isinstance(item, type):
            entries = {name: y for name, y in vars(item).items() if name not in ABOUT}
            return [item.__qualname__, *map(self.read, (type(item), item.__bases__, entries))]

        # A docstring does not count.
        code, about = item.__code__, {name: y for name, y in vars(item).items() if name != "__wrapped__"}
        consts = code.co_consts[1:] if code.co_consts[:1] == (item.__doc__,) else code.co_consts
        words = [item.__qualname__, code.co_code.hex(), code.co_argcount, code.co_flags]
        words += [*code.co_names, *code.co_varnames]
        used = {name: item.__globals__[name] for name in sorted(_names(code) & item.__globals__.keys())}
        return [*words, *map(self.read, (consts, item.__defaults__, item.__kwdefaults__, _inner(item), about, used))]


def _place_in_a_set(item: Any) -> str:
    """Return the sort key of an entry of a set, which is the same in every process."""
    if isinstance(item, DEFINED):
        return item.__qualname__
    return json.dumps(_Reader(lambda _: None).read(item))


def _names(code: CodeType) -> set[str]:
    """Return the global names that some code and the functions in it read, without those that it sets."""
    found = {"LOAD_GLOBAL": set[str](), "LOAD_NAME": set[str](), "STORE_GLOBAL": set[str]()}
    for step in dis.get_instructions(code):
        if step.opname in found:
            found[step.opname].add(step.argval)
    inner = (_names(y) for y in code.co_consts if isinstance(y, CodeType))
    return found["LOAD_GLOBAL"].union(found["LOAD_NAME"], *inner) - found["STORE_GLOBAL"]


def _inner(function: FunctionType) -> list[Any]:
    """Return the variables of outer functions that a function uses, without those that have no value yet."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found
