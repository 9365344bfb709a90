"""The JSON form of a run of ``diagnostics --layers``."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from runners.bench.diagnostics.layers.bench import LayerCell, LayersBench
from runners.bench.record import figures_to_dict, run_to_dict

NOT_TIMED = {"first_step_seconds": None, "methods": None, "compiled": None}


def to_dict(bench: LayersBench) -> dict[str, Any]:
    """Return the JSON-able form of a run."""
    return {
        **run_to_dict(bench),
        "caches_filled_at_start": bench.caches,
        "flash_linear_attention": find_spec("fla") is not None,
        "checks": {
            name: {"error": outcome.error, "problem": outcome.problem} for (name, _), outcome in bench.checks.items()
        },
        "cells": [cell_to_dict(bench, cell) for cell in bench.cells if cell in bench.figures],
    }


def cell_to_dict(bench: LayersBench, cell: LayerCell) -> dict[str, Any]:
    """Return the JSON-able form of a cell that has its figures."""
    figures = bench.figures[cell]
    shown = {
        **asdict(cell),
        **figures_to_dict(figures),
        "error": bench.check_of(cell).error,
        **(figures.facts or NOT_TIMED),
    }
    return {**shown, "targets": [target.judge(shown) for target in bench.targets(cell)]}
