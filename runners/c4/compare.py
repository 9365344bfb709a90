"""Compare finished runs of pretraining in tables and charts, one of each for a validation text.

    python -m runners.c4 compare
    python -m runners.c4 compare results/c4/rt-* results/c4/transformer-*

A row is one run, or the mean of several that differ in the seed alone. Nothing is trained: all figures are read from
the records of the runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from rich.console import Console

from runners import records
from runners.c4.train import loss_of
from runners.ending import user_errors
from runners.files import write_atomically
from runners.intervals import mean_and_interval
from runners.options import parse
from runners.progress import open_console
from runners.records import Record
from runners.tables import abbreviated, ordinal


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tabulate and draw finished runs of pretraining.

    Attributes:
        runs: folders of runs; all in the results folder unless given.
        out: folder of results.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Path = Path("results")


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)
        found = [record for _, record in records.read_all(*(options.runs or [options.out / "c4"]))]
        if not found:
            raise ValueError(
                f"no finished run in {options.out / 'c4'}: train with python -m runners.c4, or name folders"
            )
        compare(found, options.out, open_console())


def compare(found: Sequence[Record], out: Path, console: Console) -> None:
    """Print a table of runs on each validation text, and draw their curves into a chart in the folder ``out``."""
    from runners.c4.charts import plot_curves  # imports Matplotlib
    from runners.style import chart_file

    texts: dict[tuple[str, int], list[Record]] = {}
    for record in found:
        text = record.task_config["name"], record.task_config["validation_tokens"]
        texts.setdefault(text, []).append(record)

    for (name, tokens), of_text in texts.items():
        groups = by_label(of_text)
        table = loss_table(groups)
        print_table(table, f"validation loss on {abbreviated(tokens)} tokens of text {name}, low ones first", console)

        # The finding stays in sight below a long table.
        best = table.iloc[0]
        if pd.notna(best["nats_per_token"]):  # else all diverged
            console.print(f"lowest: {best['model']}, {best['nats_per_token']:.3f} nats per token")

        chart = chart_file(out, "c4-comparison", sorted(f"{record.study} {record.lr}" for record in of_text))
        plot_curves(groups, chart)
        write_atomically(chart.with_suffix(".csv"), partial(table.to_csv, index=False))
        console.print(f"chart: {chart}, the table is the .csv beside it", soft_wrap=True)


def place_of(record: Record, others: Sequence[Record]) -> str:
    """Return the place of a run by validation loss among those on its text that read as many tokens: "2nd of 5"."""

    def terms(of: Record) -> list[Any]:
        return [of.task_config["name"], of.task_config["validation_tokens"], of.steps * tokens_of_a_step(of)]

    alike = [of for of in others if of.diverged_step is None and terms(of) == terms(record)]
    return f"{ordinal(1 + sum(loss_of(of) < loss_of(record) for of in alike))} of {len(alike)}"


def loss_table(groups: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Return a table with a row for each group of runs, low losses first; a group of which a run diverged has none."""
    rows = []
    for label, group in groups.items():
        first, tokens = group[0], tokens_of_a_step(group[0])
        diverged = [
            f"seed {record.seed} diverged at step {record.diverged_step}" for record in group if record.diverged_step
        ]

        # A group of which a run diverged has no figures.
        figures: dict[str, float | None] = dict.fromkeys(("nats_per_token", "half_width", "bits_per_byte"))
        if not diverged:
            losses = pd.DataFrame([record.metrics["validation"] for record in group]).astype(float)
            nats, half = mean_and_interval(losses["loss"].tolist())
            figures = {"nats_per_token": nats, "half_width": half, "bits_per_byte": losses["bits_per_byte"].mean()}

        speeds = [record.steps_per_second * tokens for record in group if record.steps_per_second]
        rows.append(
            {
                "model": label,
                "seeds": len(group),
                "parameters": first.settings["parameters_without_embeddings"],
                "tokens": first.steps * tokens,
                **figures,
                "tokens_per_second": sum(speeds) / len(speeds) if speeds else None,
                "remark": ", ".join([f"{len(group)} seeds"] * (len(group) > 1) + diverged),
            }
        )
    table = pd.DataFrame(rows).sort_values("nats_per_token", ignore_index=True)
    return table.astype(dict.fromkeys((*figures, "tokens_per_second"), float))


def tokens_of_a_step(record: Record) -> int:
    """Return the number of tokens in a step of a run."""
    return record.batch_size * int(record.settings["seq_len"])


def print_table(table: pd.DataFrame, title: str, console: Console) -> None:
    """Print a table of runs on one text."""
    halves = [f" ± {half:.3f}".removesuffix(" ± nan") for half in table["half_width"]]
    losses = [f"{loss:.3f}".removesuffix("nan") for loss in table["nats_per_token"]]
    shown = pd.DataFrame(
        {
            "model": table["model"],
            "parameters": map(abbreviated, table["parameters"]),
            "tokens": map(abbreviated, table["tokens"]),
            "nats/token": map("".join, zip(losses, halves, strict=True)),
            "bits/byte": table["bits_per_byte"].map("{:.3f}".format, na_action="ignore"),
            "tokens/s": table["tokens_per_second"].map(lambda y: abbreviated(round(y)), na_action="ignore"),
            "": table["remark"],
        }
    )
    console.print(title, shown.to_string(index=False, na_rep="", justify="left"), sep="\n", soft_wrap=True)
    console.print("parameters: without embedding and readout; ±: half the 95% t-interval of the mean over seeds")


def by_label(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return runs by label, which those share that differ in the seed alone."""
    groups: dict[str, list[Record]] = {}
    for record in found:
        groups.setdefault(f"{record.fingerprint} {record.lr} {record.weight_decay} {record.optimizer}", []).append(
            record
        )
    labels = labels_of({key: settings_of(group[0]) for key, group in groups.items()})
    return {labels[key]: group for key, group in groups.items()}


def settings_of(record: Record) -> dict[str, Any]:
    """Return the settings in which runs may differ, but for the seed, by name."""
    names = ("layer", "lr", "width", "mlp_width", "layers", "batch_size", "steps", "weight_decay", "evaluations")
    own = {name: getattr(record, name) for name in names}
    others = {name: y for name, y in record.settings.items() if name in ("heads", "parametrisation", "seq_len")}
    return {**own, **record.optimizer, **others}


def labels_of(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a label for each run: its layer, and the settings in which the runs differ.

    Args:
        runs: settings by name of the run, which stands for the label where two are equal; ``layer`` is the layer's
            name.
    """
    keys = dict.fromkeys(key for settings in runs.values() for key in settings if key != "layer")
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in runs.values()}) > 1]
    labels = {}
    for name, settings in runs.items():
        words = [str(settings["layer"])]
        for key in differing:
            if (value := settings.get(key)) is not None:  # None stands for what follows from other settings
                words.append(f"{key.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}")
        labels[name] = ", ".join(words)
    times = Counter(labels.values())
    return {name: label if times[label] == 1 else f"{label} ({name[:8]})" for name, label in labels.items()}
