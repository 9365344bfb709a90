"""Options from dataclasses: the command line and keyword arguments give the same."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import docstring_parser
import pytest

from runners.c4 import config as c4
from runners.mad import options as mad
from runners.options import applicable, from_keywords, parse_nested, peek
from runners.records import Record


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train.

    Attributes:
        mixer: layers.
        lr: learning rates.
        steps: optimizer steps.
        out: folder.
        dry_run: train nothing.
    """

    mixer: tuple[str, ...] = ("rt",)
    lr: tuple[float, ...] = ()
    steps: int | None = None
    out: Path = Path("results")
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.steps == 0:
            raise ValueError("--steps 0 must be at least 1")


@dataclass(frozen=True, kw_only=True)
class OfRT:
    """Options of a layer.

    Attributes:
        block: positions of a block.
        qk_norm: norm of queries and keys.
        kind: of it.
    """

    block: int = 1
    qk_norm: bool = True
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class OfGLA:
    """Options of another layer."""

    block: int = 64


CONFIGS = {"mixer": {"rt": OfRT, "gla": OfGLA}}


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (
            "--lr 1e-3 2e-3 --steps 7 --out a --dry-run",
            {"lr": [1e-3, 2e-3], "steps": 7, "out": "a", "dry_run": True},
        ),
        ("--mixer rt gla", {"mixer": ("rt", "gla")}),
        ("--mixer gla --lr 1", {"mixer": "gla", "lr": 1.0}),
    ],
)
def test_a_command_line_and_keyword_arguments_give_the_same(words: str, arguments: dict[str, Any]) -> None:
    options, given = parse_nested(Options, words.split(), Options(), CONFIGS)
    assert options == from_keywords(Options(), "study", arguments)
    assert given == {"mixer": {}}


def test_options_of_layers_are_those_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mixer.block", "None", "--mixer.qk_norm=False", "--mixer.kind", "a"]
    _, given = parse_nested(Options, words, Options(), CONFIGS)
    assert given == {"mixer": {"block": None, "qk_norm": False, "kind": "a"}}

    assert applicable("mixer", {"qk-norm": False}, CONFIGS["mixer"], print) == {"rt": {"qk_norm": False}, "gla": {}}
    assert capsys.readouterr().out == "--mixer.qk-norm does not apply to mixer gla\n"
    with pytest.raises(ValueError, match=r"--mixer.heads does not apply to mixer rt, gla: the options are"):
        applicable("mixer", {"heads": 2}, CONFIGS["mixer"], print)

    with pytest.raises(SystemExit):
        parse_nested(Options, ["--help"], Options(), CONFIGS)
    assert "positions of a block." in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--lr 1e-3,2e-3", "--steps many", "--mixer.blok 4", "--nonsense", "--out"])
def test_what_cannot_be_read_ends_with_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_nested(Options, words.split(), Options(), CONFIGS)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_a_path_is_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_nested(Options, ["--out", ""], Options(), {})
    assert "a path is empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a path is empty"):
        from_keywords(Options(), "study", {"out": ""})


def test_zero_has_no_sign() -> None:
    """It would be another run."""
    options, _ = parse_nested(Options, ["--lr", "-0.0", "-1.0"], Options(), {})
    assert repr(options.lr) == repr(from_keywords(Options(), "study", {"lr": [-0.0, -1.0]}).lr) == "(0.0, -1.0)"


def test_values_are_checked_wherever_they_come_from() -> None:
    with pytest.raises(ValueError, match="--steps 0 must be at least 1"):
        parse_nested(Options, ["--steps", "0"], Options(), {})
    with pytest.raises(ValueError, match="--steps 0 must be at least 1"):
        from_keywords(Options(), "study", {"steps": 0})
    with pytest.raises(ValueError, match="steps: Input should be a valid integer"):
        from_keywords(Options(), "study", {"steps": "7"})
    with pytest.raises(TypeError, match=r"study\(\) has no argument 'step': choose from mixer, lr"):
        from_keywords(Options(), "study", {"step": 7})


def test_a_first_look_reads_a_few_options_alone() -> None:
    words = ["--preset", "quick", "--mixer", "rt", "my:Layer", "--mixer.block", "4", "--task", "mqar"]
    assert peek(words, preset="grid", mixer=("gla",)) == {"preset": "quick", "mixer": ["rt", "my:Layer"]}
    assert peek([], preset="grid", mixer=("gla",)) == {"preset": "grid", "mixer": ("gla",)}


@pytest.mark.parametrize("kind", [mad.Options, c4.Config, Record])
def test_the_docstring_explains_every_field(kind: type[Any]) -> None:
    """Also those that the class inherits; of options it is the help."""
    texts = [docstring_parser.parse(each.__doc__ or "").params for each in kind.__mro__[:-1]]
    assert {param.arg_name for of in texts for param in of if param.description} == {
        entry.name for entry in fields(kind)
    }
