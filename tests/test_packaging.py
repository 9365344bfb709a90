"""What an installation needs: locked versions, commands, one version number, files for citing and contributing."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runners import __version__, scripts
from runners.ending import run_command

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def pins(name: str) -> dict[str, tuple[str, int]]:
    """By package of a file: its version, and how many hashes it has."""
    found = PIN.findall((ROOT / name).read_text())
    return {canonicalize_name(package): (version, rest.count("--hash=sha256:")) for package, version, rest in found}


def test_every_dependency_is_locked_at_a_version_that_fits() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *extras["dev"], *extras["pretraining"])]
    locked, chosen = pins("constraints.txt"), pins("torch.txt")
    assert chosen.keys() == {"torch", "triton"}
    assert not chosen.keys() & locked.keys()
    assert all(hashes for _, hashes in locked.values())

    for requirement in wanted:
        version, _ = (chosen | locked)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


STRANGER = """
from rich.console import Console
from runners.mad import rows
from runners.mad.ranking import beside, print_results
place = rows.file_of(rows.records.REFERENCE, "quick", rows.ENTRIES["rt"], "parity")
own = rows.records.load(place).assign(layer="mine")
print_results(*beside(own, rows.load("shipped", ["parity"])), Console(width=200), False)
print(rows.__file__)
"""
"""Ranks a layer that is as good as RT."""


def test_an_installed_wheel_ranks_a_layer_from_another_folder(tmp_path: Path) -> None:
    for name in ("mixers", "tasks", "runners", "results/reference"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, copy_function=os.symlink)
    for name in ("results/claims.csv", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        (tmp_path / "source" / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # as pip does
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=tmp_path / "source", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert wheel.stat().st_size < 6 * 2**20  # 4 of them records of ten tasks, up to 2 of profiles of all rows

    paths = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    said = subprocess.check_output([sys.executable, "-c", STRANGER], cwd=tmp_path, env=paths, text=True)
    assert re.search(r"mine on parity.*: 1\d?\w\w of \d\d: ", said)
    assert said.endswith(f"{tmp_path}/site/runners/mad/rows.py\n")

    # Programs read more than code.
    found = [path for package in ("mixers", "runners") for path in (ROOT / package).rglob("*.[!mp]*")]
    read = [path.relative_to(ROOT) for path in found if path.parent.name != "__pycache__"]
    assert read
    assert [path for path in read if not (tmp_path / "site" / path).exists()] == []


def test_every_program_has_a_command() -> None:
    assert PROJECT["scripts"] == dict.fromkeys(scripts.PROGRAMS, "runners.scripts:run")
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "runners").rglob("__main__.py")]
    programs = [*(".".join(folder.parts) for folder in folders), "runners.compare"]
    assert sorted(scripts.PROGRAMS.values()) == sorted(programs)


def test_a_command_runs_as_the_main_program_which_its_worker_processes_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_program").mkdir()
    (tmp_path / "some_program" / "__init__.py").touch()
    (tmp_path / "some_program" / "__main__.py").write_text(
        "import sys\nprint(__name__, sys.modules['__main__'].__spec__.name)\n"
    )
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["/bin/rt-mad"])
    monkeypatch.setitem(scripts.PROGRAMS, "rt-mad", "some_program")
    monkeypatch.chdir(tmp_path)  # where ``python -m`` finds modules, too
    scripts.run()
    assert capsys.readouterr().out == "__main__ some_program.__main__\n"


def test_the_version_is_printed_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--steps", "3", "--version"])
    run_command(lambda: pytest.fail("it ran"), "interrupted")
    assert capsys.readouterr().out.endswith(f" {__version__}\n")


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_newest_entry_of_the_changes_and_the_citation_are_of_this_version() -> None:
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = load("CITATION.cff")
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert newest[1] == __version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_workflow_runs_what_the_readme_says() -> None:
    jobs = load(".github/workflows/test.yml")["jobs"].values()
    assert [step["run"] for job in jobs for step in job["steps"] if "run" in step] == ["make test"]
