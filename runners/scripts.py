"""The programs as commands, which an installation puts beside ``python``; ``pyproject.toml`` names them.

Each does what ``python -m`` with the name of the module does, also in the processes that it starts.
"""

import runpy
import sys
from pathlib import Path


def mad() -> None:
    """``rt-mad``: train single layers on diagnostic tasks."""
    _run("runners.mad")


def c4() -> None:
    """``rt-c4``: pretrain language models."""
    _run("runners.c4")


def compare() -> None:
    """``rt-compare``: compare finished studies."""
    _run("runners.compare")


def reference() -> None:
    """``rt-reference``: train the reference results."""
    _run("runners.mad.reference")


def c4_reference() -> None:
    """``rt-c4-reference``: train the reference language models."""
    _run("runners.c4.reference")


def bench() -> None:
    """``rt-bench``: time layers and training steps."""
    _run("runners.bench")


def theory() -> None:
    """``rt-theory``: check the paper's theorems."""
    _run("runners.theory")


def report() -> None:
    """``rt-report``: write all results as one page."""
    _run("runners.report")


def _run(module: str) -> None:
    """Run a module as the main program, which finds modules in the current folder, as with ``python -m``."""
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
