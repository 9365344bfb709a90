"""Sources of modules as this process runs them, not as their files are by now: users edit layers while others train."""

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are their texts."""
EMPTY = ("list()", "dict()")
"""Empty containers in words."""
MOST = 10_000
"""Number of entries from which on a container is data that was loaded, and does not count."""

_kept: dict[str, tuple[ModuleSpec, str]] = {}
"""By module, the source that was read first, and the module's specification, which a reload replaces."""


def source_of(module_name: str, file: str) -> str:
    """Return the source of a module: of an imported one, that of its import, or of its last reload.

    It is read at the first call, and kept. A module that is not imported yet is read each time.

    Raises:
        OSError, SyntaxError: the file cannot be read.
    """
    module = sys.modules.get(module_name)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return _read(file)
    if module_name not in _kept or _kept[module_name][0] is not spec:
        _kept[module_name] = spec, _read(file)
    return _kept[module_name][1]


def _read(file: str) -> str:
    return importlib.util.decode_source(Path(file).read_bytes()).removeprefix("\ufeff")


def differences(sources: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """Return, as sorted texts, what imported modules run that their sources do not define; nothing for most modules.

    So a file that was edited between import and first reading, or whose module was loaded again while others still hold
    its earlier functions, is not taken for what runs. Compared are functions, methods, their defaults, and the numbers,
    texts and containers of such that modules and classes name and functions read: those that were changed since, and
    those that are read from the environment.

    Args:
        sources: source of each module by its name.
        files: file of each module by its name.
    """
    defined = {
        files[name]: {_essence(code) for code in _codes_in(source, files[name])} for name, source in sources.items()
    }
    modules = {name: sys.modules[name] for name in sources if name in sys.modules}
    live = {name: list(_live_codes(module)) for name, module in modules.items()}
    read = {name for codes in live.values() for code in _with_inner(codes) for name in code.co_names}

    found = set[str]()
    for name, module in modules.items():
        codes = ((code.co_filename, _essence(code)) for code in live[name])
        found |= {essence for file, essence in codes if essence not in defined.get(file, {essence})}
        found |= set(_unstated_values(sources[name], module, read))
    return sorted(found)


def _codes_in(source: str, file: str) -> Iterator[CodeType]:
    """Return all code objects of a source; none if it is no Python, which its import has said."""
    with suppress(SyntaxError, ValueError):
        yield from _with_inner([compile(source, file, "exec", dont_inherit=True)])


def _with_inner(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    """Return code objects and those of the functions and classes in them."""
    waiting = list(codes)
    while waiting:
        yield (code := waiting.pop())
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _live_codes(module: ModuleType) -> Iterator[CodeType]:
    """Return the code of a module's functions, and of its classes' methods; some may be those of other modules."""
    for item in list(vars(module).values()):
        for member in list(vars(item).values()) if inspect.isclass(item) else [item]:
            for function in _functions_of(member):
                with suppress(ValueError):  # wrappers in a loop
                    function = inspect.unwrap(function)
                if isinstance(function, FunctionType):
                    yield function.__code__


def _functions_of(member: Any) -> list[Any]:
    """Return the functions that a member of a module or a class holds."""
    if isinstance(member, staticmethod | classmethod):
        return [member.__func__]
    if isinstance(member, property):
        return [part for part in (member.fget, member.fset, member.fdel) if part is not None]
    if isinstance(member, cached_property):
        return [member.func]
    return [member] if isinstance(member, FunctionType) else []


def _unstated_values(source: str, module: ModuleType, read: Set[str]) -> Iterator[str]:
    """Return in words the constants and defaults that are others than the source states, or come from the environment.

    What else is computed follows from the source. Containers that are empty in it are filled while the module is used.
    """
    with suppress(SyntaxError, ValueError):
        for owner, body in _bodies(ast.parse(source), module):
            for statement in _statements(body):
                for name, value in _values_of(statement, owner, read):
                    with suppress(TypeError, ValueError, RecursionError):  # no data, or data that holds itself
                        words, stated = _in_words(value), _stated(statement)
                        if stated not in (words, *EMPTY):
                            yield f"{module.__name__} {name} {words} {stated}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a module or a class, with those inside of ``if``, ``try``, ``with`` and loops."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            for inner in (*parts, *(handler.body for handler in getattr(statement, "handlers", []))):
                yield from _statements(inner)


def _bodies(tree: ast.Module, module: ModuleType) -> Iterator[tuple[Any, list[ast.stmt]]]:
    """Return the statements of a module and of each of its classes, each with the object that they define."""
    yield module, tree.body
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and inspect.isclass(found := vars(module).get(statement.name)):
            yield found, statement.body


def _values_of(statement: ast.stmt, owner: Any, read: Set[str]) -> Iterator[tuple[str, Any]]:
    """Return the name and the live value of what a statement sets: a constant, or the defaults of a function.

    Of a module, constants count that are in ``read``; of a class all, which may say something to its base class.
    """
    if isinstance(statement, ast.FunctionDef):
        function = inspect.unwrap(vars(owner).get(statement.name))
        if isinstance(function, FunctionType) and function.__name__ == statement.name:
            yield statement.name, function.__defaults__
    elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and target.id in vars(owner)
                and (inspect.isclass(owner) or target.id in read)
            ):
                yield target.id, vars(owner)[target.id]


def _stated(statement: Any) -> str:
    """Return in words the value that a statement sets; "environment" if it is read from there.

    Raises:
        ValueError, TypeError: it is computed otherwise.
    """
    if isinstance(statement, ast.FunctionDef):
        return _in_words(tuple(map(ast.literal_eval, statement.args.defaults)) or None)
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(statement.value)}
    return "environment" if names & {"environ", "getenv"} else _in_words(ast.literal_eval(statement.value))


def _in_words(value: Any) -> str:
    """Return data as a text that is the same in every process.

    Raises:
        TypeError: it is no number, text or None, and no short container or dataclass of such.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__} {_in_words(vars(value))}"
    if not isinstance(value, tuple | list | dict | set | frozenset) or len(value) > MOST:
        raise TypeError(f"{type(value).__name__} is no data")

    if isinstance(value, dict):
        entries = [f"{_in_words(key)}: {_in_words(item)}" for key, item in value.items()]
    else:
        entries = [_in_words(item) for item in value]
    if not isinstance(value, list | tuple):  # their order may be that of a set, which is another in another process
        entries.sort()
    return f"{type(value).__name__}({', '.join(entries)})"


def _essence(code: CodeType) -> str:
    """Return what a code object does, without its lines, as a text that is the same in every process."""
    names = code.co_qualname, code.co_names, code.co_varnames, code.co_freevars
    return json.dumps([*names, code.co_code.hex(), *map(_plain, code.co_consts)])


def _plain(constant: Any) -> Any:
    """Return a constant of a code object as a text or nested lists; sets have no order of their own."""
    if isinstance(constant, CodeType):
        return _essence(constant)
    if isinstance(constant, tuple):
        return ["tuple", *map(_plain, constant)]
    if isinstance(constant, frozenset):
        return ["set", *sorted(json.dumps(_plain(item)) for item in constant)]
    return [type(constant).__name__, repr(constant)]
