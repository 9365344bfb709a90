"""The programs as commands, which an installation puts beside ``python``; ``pyproject.toml`` names them."""

import runpy
import sys
from pathlib import Path

PROGRAMS = {
    "rt-mad": "runners.mad",
    "rt-c4": "runners.c4",
    "rt-compare": "runners.compare",
    "rt-reference": "runners.mad.reference",
    "rt-c4-reference": "runners.c4.reference",
    "rt-bench": "runners.bench",
    "rt-theory": "runners.theory",
    "rt-report": "runners.report",
}
"""The modules of the commands."""


def run() -> None:
    """Run the module of the command that was typed, which finds modules in the current folder, as ``python -m`` does.

    So it does in the processes that it starts.
    """
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(PROGRAMS[Path(sys.argv[0]).stem], run_name="__main__", alter_sys=True)
