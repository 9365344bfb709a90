"""What all command lines share: how they end, and how their help reads."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mixers.transformer import Transformer
from runners.c4.config import Config
from runners.cli import parse
from runners.mad.options import Options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "unbuffered"), [("mad --help", "1"), ("c4 --help", ""), ("theory --help", "1"), ("bench --help", "")]
)
def test_a_command_that_nobody_reads_ends_silently(command: str, unbuffered: str) -> None:
    """Unbuffered output fails where it is printed, buffered output as late as the process ends."""
    read, write = os.pipe()
    os.close(read)
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"runners.{module}", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("preset", "arguments", "expected"),
    [
        (Options(mixer=(), task=()), [], {"--width": "(default: 128)", "--grid": "(default: paper)"}),
        (Options(mixer=(), task=()), ["--mixer", "rt", "gla"], {"--mixer.heads": "(default: 16, 4)"}),
        (
            Options(mixer=(), task=()),
            ["--mixer", "lstm", "rt", "transformer"],
            {"--mixer.heads": "(default: 16; mixer rt, transformer alone)"},
        ),
        (Config(), [], {"--steps": "(default: 25000)", "--mixer.block": "(default: 1)"}),
    ],
)
def test_the_help_states_each_default_once_and_none_where_there_is_none(
    capsys: pytest.CaptureFixture[str], preset: Any, arguments: list[str], expected: dict[str, str]
) -> None:
    with pytest.raises(SystemExit):
        parse(type(preset), preset, [*arguments, "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    sections = {f"--{section.split()[0]}": section for section in words.split(" --")}
    for option, default in expected.items():
        assert default in sections[option]
        assert sections[option].count("default: ") == 1
    for nothing in ("(default: )", "(default: None)"):
        assert nothing not in words


class Listing(Transformer):
    """A layer with settings of other kinds than the project's."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Transformer.Config):
        sizes: list[int] = field(default_factory=lambda: [1, 2])
        name: str | None = None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["--mixer.heads", "16"], {"heads": 16}),
        (["--mixer.qk_norm=False", "--mixer.sizes", "3"], {"qk_norm": False, "sizes": [3]}),
        (["--mixer.name", "None"], {"name": None}),
    ],
)
def test_options_of_a_layer_that_are_not_given_are_left_to_it(
    monkeypatch: pytest.MonkeyPatch, given: list[str], expected: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Listing=Listing))
    _, nested = parse(Options, Options(mixer=(), task=()), ["--mixer", "layers_of_others:Listing", *given])
    assert nested["mixer"] == expected


def test_an_option_of_two_types_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Transformer):
        @dataclass(frozen=True, kw_only=True)
        class Config(Transformer.Config):
            sizes: int = 1

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Listing=Listing, Other=Other))
    names = ["rt", "layers_of_others:Listing", "layers_of_others:Other"]
    meaning = "--mixer.sizes means different things to mixer layers_of_others:Listing, layers_of_others:Other: give"
    with pytest.raises(ValueError, match=meaning):
        parse(Options, Options(mixer=(), task=()), ["--mixer", *names, "--mixer.sizes", "3"])


def test_a_wrong_value_is_told_what_may_be_given() -> None:
    for value in ("fast", "None"):
        with pytest.raises(ValueError, match=r"Expected one of .*'naive'"):
            parse(Options, Options(mixer=(), task=()), ["--mixer", "rt", "--mixer.implementation", value])
