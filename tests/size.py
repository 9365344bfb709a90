"""How large the code is, and how many files a command loads.

    python -m tests.size

A statement is one of Python's syntax tree; docstrings do not count.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("mixers", "tasks", "runners", "tests")
PROGRAMS = ("runners.mad.__main__", "runners.c4.__main__")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Size(NamedTuple):
    """Files and statements of a folder."""

    files: int
    statements: int


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def files_of(folder: str) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted((ROOT / folder).rglob("*.py"))


def statements(node: ast.AST) -> int:
    """Return the number of statements in a node, itself included."""
    return sum(isinstance(inner, ast.stmt) and not _is_docstring(inner) for inner in ast.walk(node))


@cache
def size(folder: str) -> Size:
    """Return the size of a folder."""
    files = files_of(folder)
    return Size(len(files), sum(statements(tree_of(file)) for file in files))


def functions(folder: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a folder with their places."""
    for file in files_of(folder):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, Function):
                yield f"{file.relative_to(ROOT)}:{node.name}", node


def is_kernel(function: Function) -> bool:
    """Return whether a function is a Triton kernel."""
    return any(
        "jit" in ast.unparse(decorator) or "autotune" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def parameters(function: Function) -> int:
    """Return the number of parameters of a function, without ``self``."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def used_once(folder: str) -> tuple[list[str], int]:
    """Return the private functions of a folder that are named once beside their definition, and the number of all."""
    found, count = [], 0
    for file in files_of(folder):
        tree = tree_of(file)
        names = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        names += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in ast.walk(tree):
            if isinstance(node, Function) and node.name.startswith("_") and not node.name.startswith("__"):
                count += 1
                found += [f"{file.relative_to(ROOT)}:{node.name}"] * (names[node.name] == 1)
    return found, count


@cache
def loaded_by_programs() -> dict[str, list[str]]:
    """Return the files of ``runners`` that the import of each program loads, one after the other in this process."""

    def forget() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "runners"}

    before, found = forget(), {}
    for program in PROGRAMS:
        import_module(program)
        found[program] = sorted(forget())
    sys.modules.update(before)
    return found


def imports(package: str) -> dict[str, set[str]]:
    """Return for each file of a package the files of the package that it imports, also inside functions."""
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files_of(package)
    }
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                found[name] |= inner or {node.module} & names.keys()
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
        found[name] -= {name}
    return found


def levels(package: str) -> int:
    """Return the number of levels of imports in a package: a file stands above all that it imports.

    A folder in the package counts as one file. The package's own ``__init__`` holds no code, but names what others use.
    """
    depth = package.count("/") + 2
    graph: dict[str, set[str]] = {}
    for name, others in imports(package).items():
        if name == package.replace("/", "."):
            continue
        part, *inner = (".".join(found.split(".")[:depth]) for found in (name, *others))
        graph.setdefault(part, set()).update({*inner} - {part, package.replace("/", ".")})

    @cache
    def level(part: str) -> int:
        return 1 + max(map(level, graph[part]), default=0)

    return max(level(part) for part in graph if part != package.replace("/", "."))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """Print the sizes."""
    for folder in FOLDERS:
        files, count = size(folder)
        print(f"{folder}: {count:,} statements in {files} files")
    once, private = used_once("runners")
    print(f"runners: {len(once)} of {private} private functions are used once")
    longest = max(functions("runners"), key=lambda pair: 0 if is_kernel(pair[1]) else statements(pair[1]) - 1)
    print(f"longest function of runners: {longest[0]}, {statements(longest[1]) - 1} statements")
    print(f"levels of imports in runners/mad: {levels('runners/mad')}")
    for module, files_loaded in loaded_by_programs().items():
        print(f"import {module}: {len(files_loaded)} files of runners")


if __name__ == "__main__":
    main()
