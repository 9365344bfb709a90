"""The version of code: what counts of a module, and which modules count."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from mixers.registry import find_mixer
from runners import provenance
from runners.provenance import code_version


def test_code_counts_but_comments_and_docstrings_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    versions = []
    for i, body in enumerate(["return 1", "'a docstring'\n    return 1  # a comment", "return 2"]):
        name = f"layer_{i}"
        (tmp_path / f"{name}.py").write_text(f"class Layer:\n  def f(self):\n    {body}\n")
        module = __import__(name)
        digest = code_version(module.Layer)
        versions.append(digest)
    sources = [(tmp_path / f"layer_{i}.py") for i in range(3)]
    for source in sources[1:]:
        sources[0].write_text(source.read_text())
        versions.append(code_version(importlib.reload(sys.modules["layer_0"]).Layer))
    assert versions[3] == versions[0]
    assert versions[4] != versions[0]


def test_an_empty_field_that_a_later_python_adds_does_not_count() -> None:
    """As 3.12 added the type parameters of a function."""
    tree = ast.parse("def f():\n    return 1\n")
    before = provenance._plain(tree)
    (function,) = tree.body
    function._fields = (*function._fields, "later")  # type: ignore[misc]
    function.later = []  # type: ignore[attr-defined]
    assert provenance._plain(tree) == before
    function.later = [ast.Name("T")]  # type: ignore[attr-defined]
    assert provenance._plain(tree) != before


def test_a_layer_is_another_when_a_module_beside_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layer.py").write_text("from .helper import K\nimport beside\nclass Mine:\n    k = K\n")
    (package / "helper.py").write_text("K = 1\n")
    (tmp_path / "beside.py").write_text("B = 1\n")
    layer = importlib.import_module("lab.layer").Mine
    before = code_version(layer)
    assert code_version(layer) == before
    (package / "helper.py").write_text("K = 20\n")
    importlib.reload(sys.modules["lab.helper"])
    after = code_version(layer)
    (tmp_path / "beside.py").write_text("B = 20\n")
    importlib.reload(sys.modules["beside"])
    assert len({before, after, code_version(layer)}) == 3


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_version_of_code_imports_no_library(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none of a user's own folder, into which pip installs with --user."""
    library = tmp_path / folder / f"slow_{folder[:4]}" / "__init__.py"
    library.parent.mkdir(parents=True)
    library.write_text("raise RuntimeError('imported')\n")
    (tmp_path / folder / "slow_library-1.0.dist-info").mkdir()
    own = f"own_{folder[:4]}"
    (tmp_path / f"{own}.py").write_text(
        f"class Mine:\n    def run(self):\n        import {library.parent.name}.inner\n"
    )
    for place in (tmp_path, tmp_path / folder):
        monkeypatch.syspath_prepend(place)

    layer = importlib.import_module(own).Mine
    before = code_version(layer)
    library.write_text("raise RuntimeError('a later version')\n")
    assert code_version(layer) == before


def test_the_code_of_a_plain_module_belongs_to_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "counted.py"
    code = "from torch import nn\nclass M(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    layer = find_mixer("counted:M")
    before = code_version(layer)
    file.write_text(code + "        # more words\n")
    importlib.reload(sys.modules["counted"])
    assert code_version(layer) == before
    file.write_text(code + "        self.out = nn.Linear(dim, dim)\n")
    importlib.reload(sys.modules["counted"])
    assert code_version(layer) != before


def test_so_does_a_package_whose_inner_module_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "inner.py").write_text("FACTOR = 1\n")
    (tmp_path / "outer" / "__init__.py").write_text("SCALE = 1\n")
    (tmp_path / "uses_outer.py").write_text("import outer.inner\ny = outer.SCALE\n")
    (tmp_path / "uses_inner.py").write_text("import outer.inner as m\ny = m.FACTOR\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = code_version("uses_outer"), code_version("uses_inner")
    (tmp_path / "outer" / "__init__.py").write_text("SCALE = 20\n")
    importlib.reload(sys.modules["outer"])
    assert code_version("uses_outer") != before[0]
    assert code_version("uses_inner") == before[1]


@pytest.mark.parametrize("suffix", ["c", "h", "cu", "cuh"])
def test_so_does_code_in_c_beside_it(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"beside_{suffix}.py").write_text("")
    without = code_version(f"beside_{suffix}")
    (tmp_path / f"loop.{suffix}").write_text("int one(void) { return 1; }")
    before = code_version(f"beside_{suffix}")
    (tmp_path / f"loop.{suffix}").write_text("int one(void) { return 2; }")
    assert len({without, before, code_version(f"beside_{suffix}")}) == 3
