"""What a command refuses: one line says why, and nothing is written."""

import os
import runpy
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.mad import __main__ as mad
from runners.memory import ran_out_of_memory
from runners.storage import check_writable
from tests.runners.mad.commands import HEADS, TINY

pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixer", "nope", "--task", "compression"], "no mixer 'nope': choose from transformer, sliding-attention"),
        (["--mixer", "rt", "--task", "nope"], "no task 'nope': choose from in-context-recall"),
        (
            ["--mixer", "RT", "--task", "parity"],
            "no mixer 'RT': did you mean rt? The layers are transformer, sliding-att",
        ),
        (
            ["--mixer", "rt", "--task", "memorisation"],
            "no task 'memorisation': did you mean memorization? The tasks are in-",
        ),
        (
            ["--mixer", "rt", "--task", "recall"],
            "did you mean in-context-recall or noisy-in-context-recall or fuzzy-in-",
        ),
        (["--mixer", "rt,lstm", "--task", "parity"], "no mixer 'rt,lstm': separate names by spaces\n"),
        (
            ["--mixer", "rt", "--task", "parity", "--reference", "/nowhere", "--dry-run"],
            "--reference /nowhere is no folder: give shipped, none, or a folder of reference results\n",
        ),
        (["--mixer", "rt", "--task", "parity,mqar"], "no task 'parity,mqar': separate names by spaces\n"),
        (
            ["--mixer", "my.layer.L", "--task", "parity"],
            "'my.layer.L': write my.layer:L, with a colon before the class\n",
        ),
        (["--mixer", "./my/layer.py", "--task", "parity"], "give module and class, not the file: my.layer:Class\n"),
        (
            ["--mixer", "rt", "--task", "parity", "--lr", "1e-3,1e-4"],
            "cannot read '1e-3,1e-4'; separate values by spaces",
        ),
        (
            ["--mixer", "rt", "--task", "parity", "--lr", "1e-3,", "1e-4"],
            "cannot read '1e-3,', '1e-4'; separate values by spaces",
        ),
        (["--mixer", "rt", "--task", "parity", "--lr", "1e-3", "high"], "cannot read '1e-3', 'high'; see --help\n"),
        (["--mixer", "rt", "--task", "parity", "--steps", "1e3"], "--steps: '1e3' is no whole number; see --help\n"),
        (["--mixer", "rt", "--task", "parity", "--width", "12.5"], "--width: '12.5' is no whole number; see --help\n"),
        (
            ["--mixer", "rt", "--task", "compression", "--mixer.window", "3"],
            "--mixer.window does not apply to mixer rt",
        ),
        (
            ["--mixer", "lstm", "transformer", "--task", "compression", "--mixer.block", "3"],
            "--mixer.block does not apply to mixer lstm, transformer: the options are --mixer.heads, --mixer.qk-norm",
        ),
        (
            ["--mixer", "rt", "--task", "parity", "selective-copying", "--task.length", "16"],
            "task selective-copying: length is 16: 16 tokens to copy",
        ),
        (
            ["--mixer", "rt", "--task", "compression", "copying", "--task.degree", "3"],
            "--task.degree does not apply to task compression, copying",
        ),
        (["--mixer", "rt", "--task", "compression", "--mixer.heads", "5"], "mixer 'rt': heads: 5 must divide"),
        (["--mixer", "rt", "--task", "compression", "--steps", "x"], "--steps"),
        (["--mixer", "rt", "--task", "compression", "--steps", "0"], "--steps 0 must be at least 1"),
        (["--mixer", "rt", "--task", "compression", "--lr", "-1"], "--lr -1 must lie between"),
        (["--mixer", "rt", "--task", "compression", "--sped", "1"], "unknown option --sped"),
        (["rt", "--task", "compression", "--mixer", "rt"], "no option takes rt: see --help"),
        (["--mixer", "rt", "--task", "compression", "--difficulty", "hard"], "has no difficulty 'hard'"),
        (["--mixer", "rt", "--task", "compression", "--batch-size", "20000"], "batch size 20000 is larger than"),
        (["--mixer", "no_such_module:Layer", "--task", "compression"], "cannot import mixer 'no_such_module:Layer'"),
        (["--mixer", "pathlib:Path", "--task", "compression"], "must be a class derived from torch.nn.Module"),
        (["--task", "compression"], "--mixer is missing"),
        (["--mixer", "rt", "--task", "compression", "--epochs", "3", "--steps", "5"], "exclude each other"),
        (["--mixer", "rt", "--mixer", "gla", "--task", "parity"], "--mixer is given more than once: give it once"),
        (["--mixer", "rt", "--task", "parity", "--task=copying"], "--task is given more than once: give it once"),
        (
            ["--mixer", "rt", "--task", "parity", "--lr", "1e-3", "--lr", "2e-3", "--weight_decay", "0"],
            "--lr is given more than once: give it once, with all values",
        ),
        (["--list", "--dry-run"], "--list and --dry-run exclude each other"),
        (["--list", "--seeds", "3"], "--seeds has no effect on --list, which trains nothing: leave it out"),
        (["--list", "--task=parity"], "--task has no effect on --list"),
        (["--list", "--preset", "quick", "--task.length", "9"], "--task.length has no effect on --list"),
        (
            ["--mixer", "rt", "--task", "parity", "--grid", "wide", "--lr", "1e-3"],
            "--grid wide has no effect beside the learning rates of --lr: give one",
        ),
        (["--mixer", "rt", "--preset", "quick", "--grid", "wide"], "the learning rates of --preset quick: give one"),
        (["--mixer", "rt", "--preset", "quick", "--grid", "paper"], "the learning rates of --preset quick: give one"),
        (["--preset", "demo", "--grid=paper"], "--grid paper has no effect beside the learning rates of --preset demo"),
        (
            ["--mixer", "rt", "--task", "parity", "--grid", "paper", "--lr", "1e-3"],
            "--grid paper has no effect beside the learning rates of --lr: give one",
        ),
        (
            ["--mixer", "rt", "--task", "parity", "--wandb-project", "mine"],
            "--wandb-project has no effect without --wandb online or --wandb offline: give one",
        ),
        (["--mixer", "rt", "--task", "parity", "--wandb-tags", "a", "b"], "--wandb-tags has no effect without"),
        (["--mixer", "rt"], "--task is missing"),
        (["--mixer", "rt", "--task"], "--task is missing"),
        (["--mixer", "--task", "compression"], "--mixer is missing"),
        (["--mixer", "rt", "--task", "compression", "--preset"], "Missing value for argument '--preset'"),
        (["--mixer", "gla", "--task", "parity", "--mixer.gate-temperature", "nan"], "gate-temperature nan must be a"),
    ],
)
def test_bad_input_is_one_clear_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_chosen_preset_is_not_advised_against(refused: Callable[..., str]) -> None:
    assert "--preset quick" in refused("--mixer", "rt")
    assert "--preset" not in refused("--mixer", "rt", "--preset", "full")


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_damaged_reference_results_are_refused_before_training(
    refused: Callable[..., str], tmp_path: Path, content: str
) -> None:
    file = tmp_path / "rows" / "rt" / "in-context-recall.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    said = refused("--mixer", "rt", "--task", "in-context-recall", *TINY, "--reference", str(tmp_path / "rows"))
    assert f"{file} is damaged" in said
    assert "move it elsewhere, or delete it to train the cell again" in said


def test_results_in_place_of_a_folder_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("")
    for rest in ([], ["--dry-run"]):
        with pytest.raises(SystemExit, match="2"):
            mad.main(["--mixer", "rt", "--task", "compression", "--out", str(file), *rest])
        assert capsys.readouterr().err == f"error: --out {file} is a file: name a folder\n"


def test_a_storage_that_cannot_be_opened_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for storage in (str(results), "nonsense://x"):
        with pytest.raises(SystemExit) as stop:
            mad.main(["--mixer", "rt", "--task", "compression", "--out", str(tmp_path / "out"), "--storage", storage])
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
        assert list(tmp_path.iterdir()) == [results]


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        (
            "sqlite:///{}/file/studies.db",
            "storage {} nothing can be written into {}/file (Not a directory): name another",
        ),
        ("{}/file/studies.journal", "storage {} nothing can be written into {}/file (Not a directory): name another"),
        ("sqlite:///{}/none/studies.db", "cannot open storage {} there is no folder {}/none"),
        ("sqlite+pysqlite:///{}/none/studies.db", "cannot open storage {} there is no folder {}/none"),
        ("sqlite:///file:{}/none/a%20b.db?uri=true", "cannot open storage {} there is no folder {}/none"),
        ("sqlite:///{}/file?timeout=5", "cannot open storage {}"),
        ("sqlite:{}/studies.db", "cannot open storage {} Could not parse SQLAlchemy URL"),
        ("mysql://me@host:port/studies", "cannot open storage {} invalid literal for int() with base 10: 'port': give"),
        ("sqlite://host/studies.db", "cannot open storage {} Invalid SQLite URL"),
        ("sqlite://", "storage sqlite:// is in memory, where its studies would be lost: name a file"),
        ("sqlite:///:memory:", "storage sqlite:///:memory: is in memory, where its studies would be lost: name a file"),
        ("sqlite:///file:x?mode=memory&uri=true", "storage sqlite:///file:x?mode=memory&uri=true is in memory"),
    ],
    ids=[
        "database",
        "journal",
        "no-folder",
        "driver",
        "URI",
        "broken",
        "slash",
        "port",
        "host",
        "no-name",
        "memory",
        "shared-memory",
    ],
)
def test_a_storage_that_takes_no_studies_is_refused_before_anything_is_timed(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage: str, reason: str
) -> None:
    monkeypatch.setattr(mad, "announce", lambda *_: pytest.fail("times steps"))
    (tmp_path / "file").write_bytes(b"neither a folder nor a database" * 100)
    url = storage.format(tmp_path)
    message = refused("--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--storage", url)
    assert message.startswith(f"error: {reason.format(f'{url}:', tmp_path)}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize("prefix", ["", "sqlite:///", "sqlite+pysqlite:///", "sqlite:///file:"])
def test_a_link_to_a_storage_is_checked_where_it_leads(tmp_path: Path, prefix: str) -> None:
    """Locks lie beside the file itself."""
    link = tmp_path / "studies"
    link.symlink_to("/proc/studies")
    with pytest.raises(ValueError, match=r"studies(\?uri=true)?: nothing can be written into /proc \("):
        check_writable(f"{prefix}{link}" + "?uri=true" * prefix.endswith("file:"), tmp_path / "out")


@pytest.mark.parametrize("storage", ["{}/out", "{}/out/", "sqlite:///{}/out"])
def test_a_storage_in_place_of_the_results_folder_is_refused(
    refused: Callable[..., str], tmp_path: Path, storage: str
) -> None:
    url = storage.format(tmp_path)
    message = refused("--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--storage", url)
    assert f"storage {url} stands where the results folder {tmp_path}/out is to be: name another file" in message
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("undiagnosed")
def test_a_database_that_takes_no_more_data_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--weight-decay", "0"]
    words += ["--out", str(tmp_path / "out"), "--storage"]
    mad.main([*words, f"sqlite:///{tmp_path}/studies.db", "--lr", "1e-3"])
    capsys.readouterr()

    with pytest.raises(SystemExit, match="2"):
        mad.main([*words, f"sqlite:///file:{tmp_path}/studies.db?mode=ro&uri=true", "--lr", "2e-3"])
    error = capsys.readouterr().err
    assert error.startswith(f"error: storage sqlite:///file:{tmp_path}/studies.db?mode=ro&uri=true: ")
    assert "attempt to write a readonly database" in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("undiagnosed")
def test_a_storage_whose_url_names_its_file_as_a_uri_trains(tmp_path: Path) -> None:
    url = f"sqlite:///file:{tmp_path}/my%2520studies.db?uri=true"  # decoded by SQLite, before it by SQLAlchemy from 2.1
    words = ["--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--lr", "1e-3", "--weight-decay", "0"]
    for rest in (["--dry-run"], []):
        mad.main([*words, "--storage", url, "--out", str(tmp_path / "out"), *rest])
        names = [file.name for file in tmp_path.glob("my*")]
        assert len(names) == (not rest)
        assert {*names} <= {"my studies.db", "my%20studies.db"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_storage_without_permission_to_write_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    storage = tmp_path / "studies.journal"
    storage.touch(mode=0o400)
    message = refused("--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--storage", str(storage))
    assert message == f"error: storage {storage}: nothing can be written into it (Permission denied): name another\n"


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("kind", ["database", "journal"])
def test_a_storage_of_another_folder_s_studies_is_refused_before_a_folder_is_made(
    refused: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    url = f"sqlite:///{tmp_path}/studies.db" if kind == "database" else str(tmp_path / "studies.journal")
    words = ["--mixer", "rt", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3", "--weight-decay", "0"]
    mad.main([*words, "--storage", url, "--out", str(tmp_path / "first")])
    remedy = f"give --out {tmp_path / 'first'}" if kind == "database" else "or give a --storage of its own"
    assert remedy in refused(*words, "--storage", url)


def sqlite_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table studies (name text)")
        database.commit()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (sqlite_file, "is an SQLite database: give --storage sqlite:///"),
        (lambda path: path.write_bytes(b"\x7fELF\x02\n and no newline at the end"), "is not an Optuna journal"),
        (lambda path: path.write_text('{"my": "notes"}\n{"half'), "is not an Optuna journal"),
        (lambda path: path.write_text("one line"), "is not an Optuna journal"),
        (os.mkfifo, "is no regular file"),
    ],
    ids=["sqlite", "binary", "json", "text", "pipe"],
)
@pytest.mark.parametrize("rest", [[], ["--dry-run"]], ids=["training", "dry-run"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(
    refused: Callable[..., str], tmp_path: Path, make: Callable[[Path], object], remedy: str, rest: list[str]
) -> None:
    file = tmp_path / "file"
    make(file)
    before = file.read_bytes() if file.is_file() else None

    message = refused("--mixer", "rt", "--task", "compression", "--storage", str(file), *rest)

    assert message.startswith(f"error: storage {file} ")
    assert remedy in message
    assert (file.read_bytes() if file.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("rest", [[], ["--dry-run"]], ids=["training", "dry-run"])
def test_a_damaged_database_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, rest: list[str]) -> None:
    file, url = tmp_path / "studies.db", f"sqlite:///{tmp_path}/studies.db"
    command = ["--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--lr", "1e-3", "--storage", url]
    command += ["--out", str(tmp_path / "out")]
    mad.main(command)
    with closing(sqlite3.connect(file)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    whole = file.read_bytes()
    file.write_bytes(whole[: (page - 1) * size] + b"\xff" * size + whole[page * size :])

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        mad.main([*command, *rest])
    says = "database disk image is malformed: repair the database, or name another storage"
    assert capsys.readouterr().err == f"error: storage {url}: {says}\n"


def test_a_journal_whose_lock_has_too_long_a_name_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    storage = tmp_path / f"{'ü' * 104}.journal"
    message = refused("--mixer", "rt", "--task", "compression", *TINY, "--storage", str(storage))
    assert message.endswith("has a name of 216 bytes: name a file with at most 207\n")
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    message = refused("--mixer", "rt", "--task", "compression", *TINY, "--storage", str(tmp_path / "loop" / "journal"))
    assert "symbolic links" in message or "File exists" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("class Config: pass", "Config must be a dataclass"),
        ("@dataclass\n    class Config:\n        size: int", "whose fields all have defaults"),
        ("Config = undefined", "cannot import mixer"),
    ],
)
def test_a_layer_with_an_unusable_config_is_one_clear_line(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, message: str
) -> None:
    name = f"layer_{abs(hash(config))}"
    imports = "from dataclasses import dataclass\nfrom mixers.base import Layer\n"
    (tmp_path / f"{name}.py").write_text(f"{imports}class L(Layer):\n    {config}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused("--mixer", f"{name}:L", "--task", "compression")


def test_a_fault_in_the_code_of_a_layer_keeps_its_traceback_and_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from mixers.transformer import Transformer\nclass L(Transformer):\n    def __init__(self, *_): {}['size']\n"
    (tmp_path / "faulty_layer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for rest in (["--task", "compression"], ["--list"]):
        with pytest.raises(KeyError, match="size") as caught:
            mad.main(["--mixer", "faulty_layer:L", *rest])
        assert caught.value.__notes__ == ["while mixer 'faulty_layer:L' was built"]
        assert caught.traceback[-1].path == tmp_path / "faulty_layer.py"


LACKS_OF_MEMORY = {
    # The end of the capture of a CUDA graph raises an error of its own.
    "graph": """
def train(*_):
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")
""",
    "cpu": """
def train(*_):
    raise MemoryError
""",
}
"""Functions in no file, so that they do not count as a user's code."""


def test_an_error_of_a_users_layer_that_speaks_of_memory_is_none_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "slots.py").write_text("def write():\n    raise ValueError('slot 3 is out of memory slots')\n")
    scope = runpy.run_path(str(tmp_path / "slots.py"))
    with pytest.raises(ValueError, match="slots") as caught:
        scope["write"]()
    assert not ran_out_of_memory(caught.value)
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("source", LACKS_OF_MEMORY.values(), ids=LACKS_OF_MEMORY)
def test_too_little_memory_is_one_line_that_names_together(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(source, scope)
    monkeypatch.setattr("runners.mad.search.search.train", scope["train"])
    with pytest.raises(SystemExit) as stop:
        mad.main(["--mixer", "rt", "--task", "in-context-recall", *HEADS, *TINY, "--out", str(tmp_path)])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "stopped: out of memory: lower --together (now 6)\n"
