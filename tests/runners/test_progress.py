"""Consoles of the Python functions."""

import pytest

from runners import progress


@pytest.mark.parametrize("has_widgets", [False, True])
def test_a_notebook_has_bars_only_with_widgets(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its output, which may claim to be a terminal, would show control codes as they are."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: "found" if has_widgets else None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = progress.console_of_call(quiet=False)
    assert (console.is_jupyter, console.is_terminal) == (has_widgets, False)
