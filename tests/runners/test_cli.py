"""What all command lines share: how they end, and how their help reads."""

import errno
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mixers.transformer import Transformer
from runners.bench import __main__ as bench
from runners.c4 import __main__ as c4
from runners.c4.config import OF_THE_MODEL, Config
from runners.cli import check_out, cli, others_continue, run_command
from runners.guidance import flag_of
from runners.interrupt import StoppedError
from runners.mad import __main__ as mad
from runners.mad.options import Options
from runners.mad.reference import __main__ as mad_reference
from runners.mad.results import compare
from runners.nested_options import parse
from runners.report import __main__ as report
from runners.theory import __main__ as theory

ROOT = Path(__file__).parents[2]


def test_a_character_that_the_encoding_lacks_does_not_end_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    run_command(lambda: print("1 ± 2"), "interrupted")
    assert out.getvalue() == b"1 ? 2\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")]
)
def test_a_lack_of_memory_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is

    with pytest.raises(SystemExit) as stop:
        run_command(main, "interrupted")
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"stopped: too little memory ({type(error).__name__}: ")
    assert said.endswith("free some, or lower the sizes; what is stored is kept\n")
    assert said.count("\n") == 1


def test_an_error_in_one_piece_of_work_is_one_line_with_a_file_of_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    failed: list[str] = []
    with others_continue("first", failed, ValueError):
        raise RuntimeError("no such\nkernel")
    with others_continue("second", failed, ValueError):
        pass
    with others_continue("third", failed, ValueError):
        raise ValueError("the file is of another corpus: delete it")
    with others_continue("fourth", failed, ValueError):
        raise MemoryError
    with others_continue("fifth", failed, ValueError):
        raise AssertionError
    assert failed == ["first", "third", "fourth", "fifth"]

    unexpected, expected, memory, assertion = capsys.readouterr().err.splitlines()
    assert expected == "third stopped: the file is of another corpus: delete it"
    assert memory.startswith("fourth stopped: too little memory (MemoryError: )")
    said, _, traceback = unexpected.partition("; traceback: ")
    assert said == "first stopped: RuntimeError: no such kernel"
    assert 'raise RuntimeError("no such\\nkernel")' in Path(traceback).read_text()
    Path(traceback).unlink()

    said, _, traceback = assertion.partition("; traceback: ")
    assert said == "fifth stopped: AssertionError: raise AssertionError"
    Path(traceback).unlink()


def test_a_full_disk_is_one_line_although_the_traceback_needs_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    failed: list[str] = []
    with others_continue("first", failed):
        raise RuntimeError("no such kernel")
    assert capsys.readouterr().err == f"first stopped: RuntimeError: no such kernel; traceback: not written ({full})\n"
    assert failed == ["first"]


@pytest.mark.parametrize(
    "stop",
    [
        KeyboardInterrupt(),
        SystemExit(2),
        StoppedError(3, [signal.SIGTERM]),
        BrokenPipeError(),
        OSError(errno.ENOSPC, "No space left on device"),  # no other piece would be stored
    ],
)
def test_what_stops_the_program_stops_all_pieces_of_work(stop: BaseException) -> None:
    with pytest.raises(type(stop)), others_continue("first", [], RuntimeError):
        raise stop


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.fixture
def same_signals() -> Iterator[None]:
    """What a signal does to the tests stays as it is."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_a_process_that_nobody_reads_ends_silently(unread: int) -> None:
    """Python flushes buffered output as late as the process ends."""
    words = [sys.executable, "-m", "runners.theory", "--help"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, stdout=unread, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("module", ["mad", "c4", "theory", "bench"])
def test_a_command_that_nobody_reads_ends_silently(
    module: str, unbuffered: bool, unread: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unbuffered output fails where it is printed, buffered output after the program."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    raw = io.FileIO(unread, "w", closefd=False)
    out = io.TextIOWrapper(raw, write_through=True) if unbuffered else io.TextIOWrapper(io.BufferedWriter(raw))
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "runners" / module / "__main__.py"), run_name="__main__")
    out.close()  # flushes what is left, as Python does at its end
    assert (stop.value.code, capsys.readouterr().err) == (1, "")


@pytest.mark.parametrize(("closed", "arguments", "status"), [(">&-", "--help", 0), (">&- 2>&-", "--nonsense", 2)])
def test_a_program_whose_streams_are_closed_does_its_work(closed: str, arguments: str, status: int) -> None:
    words = ["sh", "-c", f'exec "$0" -m runners.theory {arguments} {closed}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


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
        (bench.main, {"diagnostics", "pretraining", "--help"}),
    ],
    ids=["mad", "c4", "bench"],
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
        (bench.main, ["diagnostics", "--device", "cpu"]),
        (bench.main, ["diagnostics", "--layers", "all", "--device", "cpu"]),
        (bench.main, ["pretraining", "--device", "cpu"]),
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
