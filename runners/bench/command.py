"""The command of a benchmark: from the command line to tables, JSON file and chart."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runners.bench.bench import Bench
from runners.bench.scheduler import Scheduler
from runners.device import device_name, find_devices
from runners.ending import user_errors
from runners.files import write_json
from runners.provenance import sha256_of

B = TypeVar("B", bound=Bench[Any, Any])


def run_benchmark(
    name: str,
    arguments: Sequence[str],
    parse: Callable[[Sequence[str]], Any],
    bench_class: Callable[[Any, torch.device, str], B],
    to_dict: Callable[[B], dict[str, Any]],
    plot: Callable[[B, Path], None],
    print_tables: Callable[[B, Console], None],
) -> None:
    """Check and time implementations, print the tables, and write the JSON file and the chart.

    Args:
        name: name of the benchmark on the command line.
        arguments: command line after the name.
        parse: reads the options; raises ValueError if one does not fit.
        bench_class: makes a run from options, device and command line.
        to_dict: returns the JSON-able form of a run.
        plot: writes the chart of a run.
        print_tables: prints the tables of a run.

    Raises:
        SystemExit: status 1 if an implementation was wrong or failed, 2 if the command line does not fit.
    """
    # Refuse a wrong command line before anything is written.
    with user_errors(ValueError, OSError):
        options = parse(arguments)
        device = find_devices(options.device)[0]

    # Measure, with the record saved after each group.
    console = Console(markup=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
    bench = bench_class(options, device, shlex.join(["python", "-m", "runners.bench", name, *arguments]))
    path = options.out / "bench" / f"{bench.name}-{_slug(device_name(device))}-{_digest(options)}.json"
    chart = path.with_suffix(".png")
    with user_errors(OSError), _progress(console) as progress:
        bar = progress.add_task("")

        def announce(description: str) -> None:
            done, total = len(bench.figures), len(bench.cells)
            progress.update(bar, description=description, completed=done, total=total, refresh=True)
            if not console.is_terminal:  # where the bar is shown at the end alone
                console.print(f"{done} of {total}: {description}", soft_wrap=True)

        Scheduler(bench, announce, lambda: write_json(path, to_dict(bench))).run()
        announce("done")
        plot(bench, chart)

    print_tables(bench, console)
    if bench.cut is not None:
        console.print(bench.cut, soft_wrap=True)
    console.print(f"stored in {path}, chart: {chart}", soft_wrap=True)
    if bench.failed:
        raise SystemExit(1)


def _progress(console: Console) -> Progress:
    """Return a progress bar without a thread of its own, which would disturb the timing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, auto_refresh=False)


def _digest(options: Any) -> str:
    """Return a digest of the options that decide what is measured, so that no run replaces the record of another."""
    deciding = {name: value for name, value in asdict(options).items() if name not in ("out", "device")}
    return sha256_of(json.dumps(deciding, sort_keys=True))[:8]


def _slug(name: str) -> str:
    """Return a name in lower case, with hyphens in place of everything but letters and digits."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")
