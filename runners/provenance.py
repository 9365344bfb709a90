"""Provenance of a result: versions of libraries, and a hash of the code."""

import ast
import hashlib
import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixers.origin import is_library
from runners.interactive import MAIN, code_of
from runners.sources import differences, source_of

OWN_PACKAGES = ("mixers", "tasks", "runners")


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on; None for a library that is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "numpy": np.__version__,
        "optuna": version("optuna"),
    }


def code_version(*roots: type | str, alone: Sequence[str] = ()) -> str:
    """Return the SHA-256 over the code that a result depends on.

    It covers the given modules and, recursively, all that they import, except Python and installed libraries. Comments,
    docstrings and layout do not count. Code in C and CUDA C++ counts as it is written, with each module beside it. Of a
    program or a notebook, the code of the given classes counts (``runners.interactive``).

    Args:
        *roots: modules by name, or classes, which stand for their modules and those of their base classes.
        alone: modules that count without their imports.
    """
    waiting: list[str] = []
    own: list[type] = []
    for root in roots:
        ancestors = () if isinstance(root, str) else root.__mro__
        own += [ancestor for ancestor in ancestors if ancestor.__module__ == MAIN]
        waiting += [root] if isinstance(root, str) else [ancestor.__module__ for ancestor in ancestors]
    in_main = code_of(own, waiting.append)
    seen = {name: _parsed(source)[1] for name in alone if (source := _source(name)) is not None}
    in_c: dict[str, str] = {}
    of_users: dict[str, str] = {}

    while waiting:
        name = waiting.pop()
        if name in seen or (source := _source(name)) is None:
            continue

        statements, seen[name] = _parsed(source)
        if name.partition(".")[0] not in OWN_PACKAGES:
            of_users[name] = source
        in_c |= _c_files(name)
        waiting += _imports(statements, _package(name))

    files = {name: file for name in of_users if (file := _file(name)) is not None}
    return sha256_of(json.dumps([*sorted((seen | in_c).items()), *in_main, *differences(of_users, files)]))


def keep_sources(*roots: type | str) -> None:
    """Read the code of classes or modules now, so that it counts as it was imported if its files are edited later."""
    code_version(*roots)


@cache
def _parsed(source: str) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Return the import statements of a module, and the text of its syntax tree without docstrings."""
    tree = _without_docstrings(ast.parse(source))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)], repr(_plain(tree))


def _plain(value: Any) -> Any:
    """Return a syntax tree as nested lists without empty fields, of which later versions of Python have more."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, ast.AST):
        return value
    fields = [(name, y) for name, y in ast.iter_fields(value) if y is not None and y != []]
    return [type(value).__name__, *((name, _plain(y)) for name, y in fields)]


def _source(module_name: str) -> str | None:
    """Return a module's source; None if it belongs to Python or an installed library, or is no module."""
    file = _file(module_name)
    return None if file is None else source_of(module_name, file)


def _file(module_name: str) -> str | None:
    """Return the file of a module's source; None as ``_source`` does."""
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None

    # An installed library is recognised by its top package, because find_spec of an inner module imports the package.
    try:
        if top not in OWN_PACKAGES and _is_installed(top):
            return None
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # a class or function inside a module, or a library that is not installed
        return None

    return None if spec is None or spec.origin is None or not spec.origin.endswith(".py") else spec.origin


def _c_files(module_name: str) -> dict[str, str]:
    """Return the text of each file in C or CUDA C++ beside a module."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        return {}
    files = sorted(path for path in Path(spec.origin).parent.iterdir() if path.suffix in (".c", ".h", ".cu", ".cuh"))
    return {f"{spec.parent}/{path.name}": path.read_text() for path in files}


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package is an installed library."""
    spec = importlib.util.find_spec(package)
    return spec is not None and any(map(is_library, [spec.origin or "", *(spec.submodule_search_locations or ())]))


def _package(module_name: str) -> str:
    """Return the package to which a module's relative imports refer."""
    spec = importlib.util.find_spec(module_name)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return module_name if is_package else module_name.rpartition(".")[0]


def _imports(statements: Sequence[ast.Import | ast.ImportFrom], package: str) -> list[str]:
    """Return the absolute names of modules that a module of ``package`` imports, or from which it imports names.

    ``import a.b`` imports ``a``, too, whose names the module can then use.
    """
    names: list[str] = []
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                names += [".".join(parts[:n]) for n in range(1, len(parts)) if alias.asname is None]
                names.append(alias.name)
        else:
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)

            # An imported name may be a module, or an object of the module.
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names += [base if _file(name) is None else name for name in inner]

    return names


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Delete the docstrings, and other constants that stand alone, from a syntax tree in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                statement
                for statement in node.body
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            ]
    return tree


def sha256_of(text: str) -> str:
    """Return the hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
