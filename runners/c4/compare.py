"""Compare runs of pretraining in tables and charts, one of each for a validation text.

    python -m runners.c4 compare
    python -m runners.c4 compare results/c4/rt-* results/c4/transformer-*

A row is one run, or the mean of several that differ in the seed alone. Nothing is trained: all figures are read from
the folders of the runs, which need not be finished.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from runners.c4.cost import model_parameters
from runners.c4.identity import config_of
from runners.c4.stored import StoredRun, curves_of, labels_of, stored_runs, that_differ_in_the_seed
from runners.cli import check_out, cli, shown_as
from runners.ending import user_errors
from runners.files import write_table
from runners.intervals import mean_and_interval
from runners.tables import Name, abbreviated


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tabulate and draw runs of pretraining.

    Attributes:
        runs: folders of runs; all in the results folder unless given.
        out: folder of results.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], shown_as("[RUN ...]")] = ()
    out: Path = Path("results")


@dataclass(frozen=True)
class Standing:
    """Runs that differ in the seed alone.

    Attributes:
        runs: at least one.
    """

    runs: Sequence[StoredRun]

    @property
    def loss(self) -> tuple[float, float] | None:
        """Mean last validation loss in nats per token, and half its 95% interval, which is NaN for one run.

        None if a run diverged or has no validation loss yet, or if the last ones are not of the same step.
        """
        last = [run.last for run in self.runs if run.diverged_at is None]
        losses = [row.validation_loss for row in last if row is not None and row.validation_loss is not None]
        same_step = len({row.step for row in last if row is not None}) == 1
        return mean_and_interval(losses) if same_step and len(losses) == len(self.runs) else None

    @property
    def place(self) -> tuple[bool, float]:
        """Sort key: finished runs before others, low losses before high ones."""
        return any(run.result is None for run in self.runs), math.inf if self.loss is None else self.loss[0]

    @property
    def remark(self) -> str:
        """How many runs these are, and how far those have come that are not finished."""
        words = [f"{len(self.runs)} seeds"] if len(self.runs) > 1 else []
        for run in self.runs:
            of_seed = f"seed {run.described['config']['seed']}: " if len(self.runs) > 1 else ""
            if run.diverged_at is not None:
                words.append(f"{of_seed}diverged at step {run.diverged_at:,}")
            elif run.result is None:
                words.append(f"{of_seed}step {len(run.rows):,} of {run.described['config']['steps']:,}")
        return ", ".join(words)

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Its figures, not rounded; None stands for what is not known."""
        described, loss = self.runs[0].described, self.loss
        bytes_per_token = described["corpus"].get("bytes_per_token")
        speeds = [run.result["tokens_per_second"] for run in self.runs if run.result is not None]
        return {
            "seeds": len(self.runs),
            "parameters": _parameters(described),
            "tokens": min(run.rows[-1].tokens if run.rows else 0 for run in self.runs),
            "nats_per_token": None if loss is None else loss[0],
            "half_width": None if loss is None or math.isnan(loss[1]) else loss[1],
            "bits_per_byte": None if loss is None or not bytes_per_token else loss[0] / math.log(2) / bytes_per_token,
            "tokens_per_second": mean(speeds) if speeds else None,
        }

    def cells(self) -> list[str]:
        """Return the cells of its row, without the label."""
        known = self.figures
        half = "" if known["half_width"] is None else f" ± {known['half_width']:.4f}"
        return [
            "–" if known["parameters"] is None else abbreviated(int(known["parameters"])),
            abbreviated(int(known["tokens"] or 0)),
            "" if known["nats_per_token"] is None else f"{known['nats_per_token']:.4f}{half}",
            "" if known["bits_per_byte"] is None else f"{known['bits_per_byte']:.4f}",
            "" if known["tokens_per_second"] is None else f"{known['tokens_per_second']:,.0f}",
        ]


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    console = Console(markup=False)
    say = partial(console.print, soft_wrap=True)

    with user_errors(ValueError, OSError):
        options = cli(Options, Options(), arguments, "compare")
        check_out(options.out)
        compare(read_runs(options.runs, options.out, say), options.out, console)


def compare(runs: Sequence[StoredRun], out: Path, console: Console) -> None:
    """Print a table of runs on each validation text, and draw their curves into a chart in the folder ``out``."""
    from runners.c4.charts import plot_curves  # imports Matplotlib

    for of_text in _on_each_text(runs):
        rows = print_standings(of_text, console)

        # The chart's name is a hash of its runs.
        digest = hashlib.sha256("".join(sorted(run.name for run in of_text)).encode()).hexdigest()
        chart = out / "figures" / f"c4-comparison-{digest[:8]}.png"
        plot_curves(curves_of(of_text), chart)
        table = write_table(chart.with_suffix(".csv"), rows)
        console.print(f"chart: {chart}\ntable: {table}", soft_wrap=True)


def read_runs(folders: Sequence[Path], out: Path, say: Callable[[str], None]) -> list[StoredRun]:
    """Read the runs in ``folders``, or all in the results folder ``out`` if there are none.

    Raises:
        ValueError: there is no run, or two folders hold the same one.
    """
    for folder in folders:
        if not (folder / "run.json").exists():
            raise ValueError(f"no run at {folder}: give the folder of a run (results/c4/...)")

    runs = stored_runs(dict.fromkeys(folders or sorted((out / "c4").glob("*"))), say)
    if not runs and folders:
        raise ValueError("none of the runs can be read: name others")
    if not runs:
        raise ValueError(f"{out / 'c4'} has no run that can be read: train with python -m runners.c4, or name folders")

    known: dict[str, StoredRun] = {}
    for run in runs:
        if known.setdefault(run.name, run) is not run:
            raise ValueError(f"{known[run.name].folder} and {run.folder} hold the same run: name one of them")
    return runs


def print_standings(runs: Sequence[StoredRun], console: Console) -> list[dict[str, Any]]:
    """Print a table of runs on one text, the lowest loss first; return its rows with figures that are not rounded."""
    standings = sorted(map(Standing, that_differ_in_the_seed(runs)), key=lambda standing: standing.place)
    labels = labels_of({s.runs[0].name: s.runs[0].described for s in standings}, ignored=["seed"])

    text = ", ".join(runs[0].described["config"]["data"]) or "allenai/c4"
    tokens = max(run.validation_tokens for run in runs)
    table = Table(title=f"validation loss on {text} ({runs[0].corpus}), {tokens:,} tokens", title_justify="left")
    table.add_column("model")
    for heading in ("parameters", "tokens", "nats/token", "bits/byte", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for standing in standings:
        label = labels[standing.runs[0].name]
        table.add_row(Name(f"{label}\n  {standing.remark}" if standing.remark else label), *standing.cells())
    console.print(table)

    console.print("parameters: without embedding and readout")
    if any(len(standing.runs) > 1 for standing in standings):
        console.print("±: half the 95% t-interval of the mean over seeds")
    for line in _ends_of_rates(standings):
        console.print(line, soft_wrap=True)
    return [{"model": labels[s.runs[0].name], **s.figures, "remark": s.remark} for s in standings]


def _ends_of_rates(standings: Sequence[Standing]) -> list[str]:
    """Say of which models the best learning rate is the smallest or largest of several."""
    described = {standing.runs[0].name: standing.runs[0].described for standing in standings}
    labels = labels_of(described, ignored=["seed", "lr"], alike=True)
    models: dict[str, list[tuple[float, float]]] = {}
    for standing in standings:
        loss = math.inf if standing.loss is None else standing.loss[0]  # a rate that diverged has been tried, too
        lr = standing.runs[0].described["config"]["lr"]
        models.setdefault(labels[standing.runs[0].name], []).append((loss, lr))

    lines = []
    for model, losses in models.items():
        lrs, (lowest, best) = sorted({lr for _, lr in losses}), min(losses)
        if len(lrs) > 1 and best in (lrs[0], lrs[-1]) and lowest < math.inf:
            end = "smallest" if best == lrs[0] else "largest"
            tried = ", ".join(f"{lr:g}" for lr in lrs)
            lines.append(f"{model}: the best lr {best:g} is the {end} of {tried}, so a better one may lie beyond it")
    return lines


def _on_each_text(runs: Iterable[StoredRun]) -> list[list[StoredRun]]:
    """Group runs by their corpus and the part of it on which they are validated."""
    groups: list[list[StoredRun]] = []
    for run in runs:
        known = next((group for group in groups if run.is_comparable(group[0])), None)
        if known is None:
            groups.append([run])
        else:
            known.append(run)
    return groups


def _parameters(described: dict[str, Any]) -> int | None:
    """Return the number of a model's parameters without embeddings; None if this code cannot build the model."""
    try:
        config, options, vocab_size = (
            config_of(described),
            described["mixer_options"],
            described["corpus"]["vocab_size"],
        )
        parameters, tables = model_parameters(config, options, vocab_size)
    except Exception:  # the run may be of another version, and a user's layer may raise anything
        return None
    return parameters - tables
