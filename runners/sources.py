"""Sources of modules as this process runs them, not as their files are by now: users edit layers while others train."""

import inspect
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_kept: dict[str, tuple[ModuleSpec, str]] = {}
"""By module, the source that was read first, and the module's specification, which a reload replaces."""


def source_of(module_name: str, file: str, own: bool) -> str:
    """Return the source of a module: of an imported one, that of its import, or of its last reload.

    It is read at the first call, and kept. A module that is not imported yet is read each time.

    Args:
        module_name: name of the module.
        file: its file.
        own: whether it belongs to this project, whose files are not compared with what was imported.

    Raises:
        ValueError: the file has changed between import and first reading, as far as its functions show.
    """
    module = sys.modules.get(module_name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None:
        return Path(file).read_text()

    kept = _kept.get(module_name)
    if kept is None or kept[0] is not spec:
        source = Path(file).read_text()
        if not own and _has_changed(module, spec, source, file):
            raise ValueError(
                f"{file} has changed since it was imported: start the command again, or in a notebook reload "
                f"{module_name}"
            )
        kept = _kept[module_name] = spec, source
    return kept[1]


def _has_changed(module: ModuleType, spec: ModuleSpec, source: str, file: str) -> bool:
    """Return whether a function of a module, or a method of its classes, is not one that the source defines.

    A loader other than Python's own may have imported other code than the source, and tells nothing.
    """
    if type(spec.loader) is not SourceFileLoader:
        return False
    defined = {_essence(code) for code in _all_codes(compile(source, file, "exec", dont_inherit=True))}
    return any(_essence(code) not in defined for code in _live_codes(module) if code.co_filename == file)


def _live_codes(module: ModuleType) -> Iterator[CodeType]:
    """Return the code of a module's functions, and of its classes' methods."""
    for item in list(vars(module).values()):
        members = list(vars(item).values()) if inspect.isclass(item) and item.__module__ == module.__name__ else [item]
        for member in members:
            for function in _functions_of(member):
                plain = inspect.unwrap(function)
                if isinstance(plain, FunctionType):
                    yield plain.__code__


def _functions_of(member: Any) -> list[Any]:
    """Return the functions that a member of a module or a class holds."""
    if isinstance(member, staticmethod | classmethod):
        return [member.__func__]
    if isinstance(member, property):
        return [part for part in (member.fget, member.fset, member.fdel) if part is not None]
    if isinstance(member, cached_property):
        return [member.func]
    return [member] if isinstance(member, FunctionType) else []


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    """Return a code object and all those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


def _essence(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object does, without its lines."""
    constants = tuple(_essence(y) if isinstance(y, CodeType) else (type(y), repr(y)) for y in code.co_consts)
    return code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
