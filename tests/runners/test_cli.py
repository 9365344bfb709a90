"""What all command lines share: how their help reads, and what they refuse."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runners.mad.results import compare

from mixers.transformer import Transformer
from runners.c4 import __main__ as c4
from runners.c4.config import OF_THE_MODEL, Config
from runners.cli import check_out, cli
from runners.guidance import flag_of, not_understood
from runners.mad import __main__ as mad
from runners.mad.options import Options
from runners.mad.reference import __main__ as mad_reference
from runners.nested_options import parse
from runners.report import __main__ as report
from runners.theory import __main__ as theory


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


def test_the_help_states_what_the_preset_gives_to_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mad.main(["--preset", "quick", "--task", "parity", "memorization", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert re.search(r"--task\.length INT [^-]*\(default: 24, 16\)", words)


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


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--seed 0 --steps 3 4", "--steps takes one value, so run the command once for each"),
        ("--seeds 0 4", "--seeds takes the number of seeds: give --seeds 3 for seeds 0, 1 and 2"),
        ("--list --dry-run 4", "see --help"),
        ("--data=a b 4", "see --help"),
        ("train now 4", "see --help"),
        ("--steps 4", "see --help"),
        ("4", "see --help"),
    ],
)
def test_a_word_too_many_after_the_value_of_an_option_says_that_it_takes_one(words: str, advice: str) -> None:
    assert not_understood("4", {}, words.split()) == f"no option takes 4: {advice}"


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


@pytest.mark.parametrize(
    ("preset", "arguments", "message"),
    [
        (Options(mixer=(), task=()), ["--learning-rate", "1e-3"], "unknown option --learning-rate: did you mean --lr?"),
        (Options(mixer=(), task=()), ["--batch", "3"], "unknown option --batch: did you mean --batch-size?"),
        (Options(mixer=(), task=()), ["--dryrun"], "unknown option --dryrun: did you mean --dry-run?"),
        (Options(mixer=(), task=()), ["--gpu"], "unknown option --gpu: did you mean --device?"),
        (Options(mixer=(), task=()), ["--nonsense"], "unknown option --nonsense: see --help"),
        (Options(mixer=("rt",), task=()), ["--block=4"], "unknown option --block: did you mean --mixer.block?"),
        (Options(mixer=("rt",), task=()), ["--mixer.head", "4"], "to mixer rt: did you mean --mixer.heads?"),
        (Options(mixer=("rt",), task=()), ["--mixer.width", "4"], "to mixer rt: did you mean --width?"),
        (Options(mixer=("rt",), task=()), ["--mixer.dilations", "4"], "to mixer rt: the options are --mixer.heads, "),
        (Options(mixer=("rt",), task=()), ["--mixer.nonsense", "4"], "to mixer rt: the options are --mixer.heads, "),
        (
            Options(mixer=(), task=("parity",)),
            ["--lenght", "9"],
            "unknown option --lenght: did you mean --task.length?",
        ),
        (Config(), ["--learning_rate=1"], "unknown option --learning_rate: did you mean --lr?"),
        (Config(), ["--mixer.heads", "8"], "--mixer.heads is the option --heads here: give that one"),
    ],
)
def test_an_unknown_option_is_told_which_one_was_meant(preset: Any, arguments: list[str], message: str) -> None:
    own = OF_THE_MODEL if isinstance(preset, Config) else ()
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(type(preset), preset, arguments, own)


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (mad.main, {flag_of(field.name) for field in fields(Options)}),
        (c4.main, {flag_of(field.name) for field in fields(Config)} | c4.COMMANDS.keys()),
    ],
    ids=["mad", "c4"],
)
def test_a_command_without_arguments_says_what_it_does_in_25_lines_of_80_columns(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], said: set[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    printed = capsys.readouterr().out
    assert printed.count("\n") <= 25
    assert max(map(len, printed.splitlines())) < 80
    assert set(re.findall(r"(?<= )[\w-]+|^--help", printed, flags=re.MULTILINE)) >= said


def test_the_options_stand_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(Options, Options(mixer=(), task=()), ["--mixer", "rt", "--help"])
    titles = re.findall(r"^\W*((?:\w+ )?options) +\W*$", capsys.readouterr().out, flags=re.MULTILINE)
    assert titles == ["options", "study options", "model options", "output options", "mixer options"]


def test_a_wrong_value_is_told_what_may_be_given() -> None:
    for value in ("fast", "None"):
        with pytest.raises(ValueError, match=r"Expected one of .*'naive'"):
            parse(Options, Options(mixer=(), task=()), ["--mixer", "rt", "--mixer.implementation", value])


@dataclass(frozen=True)
class Several:
    """Options with several values."""

    rates: tuple[float, ...] = (0.1, 0.2)
    layers: tuple[str, ...] = ()


@pytest.mark.parametrize("arguments", [["--rates"], ["--layers"], ["--rates", "--layers", "rt"]])
def test_an_option_without_any_of_its_values_is_no_default(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^what follows {arguments[0]} is missing: give at least one value$"):
        cli(Several, Several(), arguments)


def test_an_option_left_out_keeps_its_default_also_if_that_is_empty() -> None:
    assert cli(Several, Several(), ["--rates", "0.3"]) == Several(rates=(0.3,))


UNWRITABLE = Path("/proc/results")
"""A place where no user can make a folder."""


@pytest.mark.skipif(not UNWRITABLE.parent.exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (mad.main, ["--mixer", "rt", "--task", "compression"]),
        (compare.main, []),
        (mad_reference.main, []),
        (c4.main, ["--preset", "tiny"]),
        (c4.main, ["gradients", "run"]),
        (report.main, []),
        (theory.main, []),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(UNWRITABLE)])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.err.startswith(f"error: --out {UNWRITABLE}: nothing can be written into {UNWRITABLE.parent} (")
    assert printed.err.endswith("): name another folder\n")
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.skipif(not UNWRITABLE.parent.exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (mad.main, ["--preset", "demo", "--mixer", "transformer", "--steps", "2", "--device", "cpu"]),
        (mad_reference.main, ["--layers", "lstm", "--tasks", "parity"]),
        (c4.main, ["--preset", "tiny", "--device", "cpu"]),
    ],
)
def test_a_dry_run_needs_no_folder_that_can_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, main: Callable[[list[str]], None], arguments: list[str]
) -> None:
    main([*arguments, "--dry-run", "--out", str(UNWRITABLE)])
    printed = capsys.readouterr()
    assert (printed.err, bool(printed.out)) == ("", True)

    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--dry-run", "--out", str(file)])
    assert capsys.readouterr().err == f"error: --out {file} is a file: name a folder\n"


def test_the_nearest_folder_that_exists_decides_whether_results_can_be_written(tmp_path: Path) -> None:
    check_out(tmp_path / "new" / "results")
    assert list(tmp_path.iterdir()) == []

    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=re.escape(f"--folder {file} is a file: name a folder")):
        check_out(file, "--folder")
    with pytest.raises(ValueError, match=re.escape(f"nothing can be written into {file} (Not a directory)")):
        check_out(file / "new" / "results")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_to_write_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(ValueError, match=re.escape(f"into {closed} (Permission denied): name another folder")):
        check_out(closed / "results")
