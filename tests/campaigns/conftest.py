"""What the campaigns share: the table that they print, their time, and folders in memory."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.ledger import Ledger
from tests.campaigns.programs import fork
from tests.campaigns.small import DIAGNOSTICS, LONGER, PRETRAINING, words
from tests.runners.c4.texts import write_texts

LEDGERS = pytest.StashKey[list[Ledger]]()
MINUTES = float(os.environ.get("CAMPAIGN_MINUTES", "10"))
"""Time of all campaigns together."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGERS] = []
    # A shell's background job ignores Ctrl-C, and the processes that it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Do not import the campaigns, and with them Hypothesis, for a run that leaves them out."""
    return "not campaign" in config.option.markexpr or None


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """The campaign's line of the table; the campaign fails if something broke."""
    campaigns = [item for item in request.session.items if "campaign" in item.keywords]
    made = Ledger(name=request.node.name.removeprefix("test_").replace("_", " "), seconds=60 * MINUTES / len(campaigns))
    request.config.stash[LEDGERS].append(made)
    yield made
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for line in (made.row(), *made.broken):
        reporter.write_line(f"\n{line}")
    assert made.tried
    assert not made.broken


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not (ledgers := config.stash[LEDGERS]):
        return
    terminalreporter.section("campaigns")
    terminalreporter.write_line("| campaign | tried | survived | broke |")
    terminalreporter.write_line("| --- | ---: | --- | --- |")
    for made in ledgers:
        terminalreporter.write_line(made.row())


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results to read back.

    ``studied`` and ``pretrained`` are finished, ``stopped`` and ``killed`` are not, ``texts`` are the data.
    """
    # What killed programs leave in the folder of temporary files goes with pytest's own.
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))

    folder = tmp_path_factory.mktemp("results")
    (folder / "texts").mkdir()
    write_texts(folder / "texts")

    for program, arguments in (
        ("mad", words(DIAGNOSTICS, out="studied")),
        ("c4", words(PRETRAINING, out="pretrained")),
        ("c4", words(PRETRAINING, out="killed")),
    ):
        end = fork(program, arguments, folder).end()
        assert end is not None
        assert end.status == 0, end
    (folder / "run").symlink_to(next((folder / "pretrained" / "c4").iterdir()).relative_to(folder))

    # A run that was killed after its last checkpoint.
    next((folder / "killed" / "c4").glob("*/record.json")).unlink()

    # A study with checkpoints, which are written when it is stopped.
    started = fork("mad", words(DIAGNOSTICS, out="stopped", steps=LONGER, evaluations="40"), folder)
    while not re.search(r"step \d", started.printed()):  # an evaluation, not the forecast of the time
        assert started.end(0.1) is None
    started.send(signal.SIGTERM)
    end = started.end()
    assert end is not None
    assert end.status == 143, end
    assert list((folder / "stopped" / "runs").rglob("*.safetensors"))
    return folder
