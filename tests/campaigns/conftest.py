"""What the campaigns share: the table that they print, and their time."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.campaigns.ledger import Ledger

LEDGERS = pytest.StashKey[list[Ledger]]()
MINUTES = float(os.environ.get("CAMPAIGN_MINUTES", "10"))
"""Time of all campaigns together."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGERS] = []
    # A shell's background job ignores Ctrl-C, and the processes that it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
