"""Which files import which: data flows one way, and programs are neighbours, not relatives."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests import size

ROOT = Path(__file__).parents[1]
PACKAGES = ("mixers", "tasks", "runners")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}
PROGRAMS = {path.name for path in (ROOT / "runners").iterdir() if (path / "__main__.py").exists()}
ENTRIES = ("runners.compare",)
"""Files that start a part of a program under a name of its own."""


@cache
def imported(module: str) -> set[str]:
    """Files of the project that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(size.tree_of(FILES[module])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & FILES.keys()) - {module}


def part(module: str) -> str:
    """A package, or for a file of a program in ``runners`` that program."""
    package, _, inner = module.partition(".")
    program = inner.partition(".")[0]
    return f"{package}.{program}" if package == "runners" and program in PROGRAMS else package


def reached(start: str) -> set[str]:
    """All files that a file imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in imported(waiting.pop()) - found:
            found.add(module)
            waiting.append(module)
    return found


def test_no_file_imports_itself_through_others() -> None:
    assert [module for module in FILES if module in reached(module)] == []


def test_the_programs_are_those_that_are_known() -> None:
    """Or the tests below would hold for want of programs."""
    assert {"mad", "c4", "bench", "report"} <= PROGRAMS


@pytest.mark.parametrize(
    ("parts", "forbidden"),
    [
        ({"mixers"}, {"tasks", "runners"}),
        ({"tasks"}, {"mixers", "runners"}),
        ({"runners"}, {f"runners.{program}" for program in PROGRAMS}),
        ({"runners.mad"}, {"runners.c4", "runners.bench", "runners.report"}),
        ({"runners.c4"}, {"runners.mad", "runners.bench", "runners.report", "tasks"}),
    ],
    ids=["mixers", "tasks", "shared files", "mad", "c4"],
)
def test_imports_go_one_way(parts: set[str], forbidden: set[str]) -> None:
    found = [
        f"{module} imports {other}"
        for module in FILES
        if part(module) in parts and module not in ENTRIES
        for other in imported(module)
        if part(other) in forbidden or part(other).partition(".")[0] in forbidden
    ]
    assert found == []


def named_in_the_tree() -> set[str]:
    """Files and folders, with a slash at their end, that the tree in CONTRIBUTING.md names."""
    tree = re.search(r"^```\n(mixers/\n.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    found, folders = set(), {-4: ""}
    for line in tree[1].splitlines():
        names = re.match(r" *((?:[\w.]+(?:\.py|\.md|/)(?: +|$))+)", line)
        assert names is not None, f"no name: {line}"
        indent = len(line) - len(line.lstrip())
        for name in names[1].split():
            found.add(folders[indent - 4] + name)
            if name.endswith("/"):
                folders[indent] = folders[indent - 4] + name
    return found


def test_the_tree_in_the_documents_names_each_file_or_a_folder_without_its_files() -> None:
    named = named_in_the_tree()
    assert [name for name in named if not (ROOT / name).exists()] == []
    whole = tuple(f for f in named if f.endswith("/") and not any(n != f and n.startswith(f) for n in named))
    files = {path.relative_to(ROOT).as_posix() for path in FILES.values() if not path.stem.startswith("__")}
    assert [file for file in sorted(files - named) if not file.startswith(whole)] == []


def test_the_code_stays_small_enough_for_one_head() -> None:
    """A mechanism has a price: someone must read it."""
    assert size.size("runners").files <= 120
    assert size.size("runners").statements <= 8_500
    assert size.size("tests").statements <= 14_000


def test_functions_are_short_and_take_few_arguments() -> None:
    own = [pair for pair in size.functions("runners") if not size.is_kernel(pair[1])]
    assert [place for place, function in own if size.statements(function) > 61] == []
    assert [place for place, function in own if size.parameters(function) > 12] == []
    once, private = size.used_once("runners")
    assert len(once) <= private / 4, "\n".join(once)


def test_a_program_is_few_files() -> None:
    assert all(len(files) <= 32 for files in size.loaded_by_programs().values())


def test_the_diagnostics_are_few_levels_of_imports() -> None:
    assert size.levels("runners/mad") <= 6
