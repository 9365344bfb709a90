"""Bad values of every option: each is one line and status 2, or the program runs."""

import contextlib
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs the extra dev")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mixers import MIXERS
from mixers.registry import find_mixer
from runners.bench import diagnostics as bench_diagnostics
from runners.bench import layers as bench_layers
from runners.bench import pretraining as bench_pretraining
from runners.c4.config import Config
from runners.c4.evaluation.generate import Options as GenerateOptions
from runners.compare import CompareOptions
from runners.mad.options import Options
from runners.mad.reference.__main__ import ReferenceOptions
from runners.task_names import find_task
from runners.theory.__main__ import Options as TheoryOptions
from tasks import TASKS
from tests.campaigns.ledger import Ledger
from tests.campaigns.programs import fault, fork
from tests.campaigns.small import ANY_DIAGNOSTICS, PRETRAINING
from tests.campaigns.values import options_of

pytestmark = pytest.mark.campaign
PATIENCE = 25.0
"""Seconds after which a program that still runs is asked to stop, and asked again."""
SILENCE = 35.0
"""Further seconds that it may be silent."""
PRETRAINING_BENCH = {"--device": ["cpu"], "--lengths": ["8"], "--out": ["out"]}
BENCH = PRETRAINING_BENCH | {"--width": ["16"], "--mlp-width": ["16"]}

Line = tuple[str, list[str], dict[str, list[str]]]
"""A program, its first words, and its options."""


@st.composite
def changed(draw: st.DrawFn, program: str, first: Sequence[str], base: dict[str, list[str]], kinds: Any) -> Line:
    """Draw a command line: one that works, in which one or two options have other values."""
    options = dict(base)
    for name in draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2, unique=True)):
        options[name] = draw(kinds[name])
    return program, list(first), options


@st.composite
def diagnostics(draw: st.DrawFn) -> Line:
    """Draw a command line of ``runners.mad``, with options of the layer and the task too."""
    mixer, task = draw(st.sampled_from(sorted(MIXERS))), draw(st.sampled_from(sorted(TASKS)))
    base = {
        **ANY_DIAGNOSTICS,
        "--mixer": [mixer],
        "--task": [task],
        "--task.train-examples": ["32"],
        "--task.eval-examples": ["8"],
    }
    kinds = {
        **options_of(Options),
        **options_of(find_mixer(mixer).Config, "mixer."),
        **options_of(find_task(task).Config, "task."),
    }
    if draw(st.booleans()):
        base["--dry-run"] = []
    return draw(changed("mad", [], base, kinds))


def lines() -> SearchStrategy[Line]:
    """Command lines of all programs."""
    cells = {"--dry-run": [], "--out": ["out"], "--folder": ["cells"]}
    return st.one_of(
        diagnostics(),
        diagnostics(),
        changed("c4", [], PRETRAINING | {"--dry-run": []}, options_of(Config)),
        changed("c4", [], PRETRAINING, options_of(Config)),
        changed("c4", ["generate", "run"], {"--device": ["cpu"]}, options_of(GenerateOptions)),
        changed("compare", [], {"--out": ["studied"]}, options_of(CompareOptions)),
        changed("mad.reference", [], cells, options_of(ReferenceOptions)),
        changed("theory", [], {"--out": ["out"]}, options_of(TheoryOptions)),
        changed("bench", ["diagnostics"], BENCH, options_of(bench_diagnostics.Options)),
        changed("bench", ["layers", "--layers", "lstm"], BENCH, options_of(bench_layers.Options)),
        changed("bench", ["pretraining"], PRETRAINING_BENCH, options_of(bench_pretraining.Options)),
    )


def tried(line: Line, folder: Path) -> tuple[str | None, str]:
    """Run a command line; return what is wrong, and how it ended."""
    program, first, options = line
    words = [*first, *(word for name, given in options.items() for word in (name, *given))]
    started = fork(program, words, folder)
    if (end := started.end(PATIENCE)) is not None:
        left = end.status == 2 and (folder / "out").exists()
        kind = {0: "ran", 1: "ran to a bad end of one line", 2: "refused"}.get(end.status, "")
        return ("refused, but wrote something" if left else fault(end, [0, 1, 2])), kind

    # A long training is no fault if it says something, and if a second Ctrl-C ends it within a step.
    if not started.printed() and started.end(SILENCE) is None and not started.printed():
        started.kill()
        return f"silent for {PATIENCE + SILENCE:.0f} s", ""
    for _ in range(2):
        started.send(signal.SIGINT)
        if (end := started.end(PATIENCE)) is not None:
            return fault(end, [130, 0, 1]), "ran until asked to stop"
    started.kill()
    return "does not end when asked to", ""


def test_bad_values_of_every_option(ledger: Ledger, tmp_path: Path, results: Path) -> None:
    @settings(
        max_examples=10**6,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(line=lines())
    def attempt(line: Line) -> None:
        if not ledger.has_time():
            raise KeyboardInterrupt
        folder = tmp_path / "above" / "folder"
        shutil.copytree(results, folder)
        (folder / "folder").mkdir()
        (folder / "file").write_text("some text")
        wrong, end = tried(line, folder)
        program, first, options = line
        given = " ".join(f"{name} {shlex.join(words)}" for name, words in options.items())
        ledger.add(f"{program} {' '.join(first)} {given}", wrong, end)
        shutil.rmtree(tmp_path / "above")

    with contextlib.suppress(KeyboardInterrupt):
        attempt()
