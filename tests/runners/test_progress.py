"""Progress bars, and the consoles of the Python functions."""

import pytest

from runners import progress


@pytest.mark.parametrize("has_widgets", [False, True])
def test_a_notebook_has_bars_only_with_widgets(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its output, which may claim to be a terminal, would show control codes as they are."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: "found" if has_widgets else None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = progress.console_of_call({"steps"}, quiet=False)
    assert (console.is_jupyter, console.is_terminal) == (has_widgets, False)
    with console.capture() as captured:
        console.print("give --steps [bold]", highlight=False)
    assert captured.get() == "give steps [bold]\n"
    assert progress.console_of_call((), quiet=True).quiet


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_bar_shows_what_is_done_on_a_terminal_alone(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(progress.bar(iter("abc"), "reading", total=3)) == ["a", "b", "c"]
    written = capsys.readouterr()
    assert ("reading" in written.err, written.out) == (on_terminal, "")


def test_lines_of_a_function_name_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    console = progress.console_of_call({"steps", "mlp_width"}, quiet=False)
    console.print("give --steps 20 --mlp-width 64, or --other; python -m runners.mad --steps 3", soft_wrap=True)
    console.print(3)
    assert capsys.readouterr().out == "give steps 20 mlp_width 64, or --other; python -m runners.mad --steps 3\n3\n"
