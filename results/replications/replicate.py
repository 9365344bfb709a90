"""Train other people's tables, and write their figures beside ours into README.md.

    python results/replications/replicate.py groups                    # all that is missing of a table; then the page
    python results/replications/replicate.py groups --cells "S3*"      # some cells, to share them among processes
    python results/replications/replicate.py groups --list             # the cells, and which are trained
    python results/replications/replicate.py groups --trial            # two steps of each cell, for no table
    python results/replications/replicate.py page                      # the page alone

Tables: mad, state-tracking, groups, mqar. A cell is one or more calls of ``runners.mad.study``. Its records are written
to ``records/<table>/<cell>.jsonl`` beside this file, and a cell that has this file is not trained again. The same
command continues what was stopped.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pandas as pd
import torch

from runners import records
from runners.files import write_atomically
from runners.mad import study
from runners.mad.experiment import Experiment, plan
from runners.mad.options import defaults
from runners.mad.points import chosen, points
from runners.mad.reference.overview import markdown
from runners.mad.rows import ENTRIES, load_rows
from runners.options import from_keywords
from tasks import TASKS
from tasks.fuzzy_recall import LONGEST_KEYS

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
MISSING = "–"
SETTINGS: dict[str, Any] = {"reference": "none", "keep": "none", "quiet": True}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure of somebody else, and the studies that should give it.

    Attributes:
        row, column: its place in the table.
        published: the figure, as the table shows it.
        studies: keyword arguments of ``runners.mad.study``.
    """

    row: str
    column: str
    published: str
    studies: Sequence[dict[str, Any]]

    @property
    def name(self) -> str:
        """What ``--cells`` is compared with."""
        return f"{self.row}, {self.column}"

    def file(self, table: str) -> Path:
        """Return where its records are."""
        return HERE / "records" / table / f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower()).strip('-')}.jsonl"


@dataclass(frozen=True)
class Table:
    """A table: its cells, and how a figure comes from the records of a cell."""

    cells: Sequence[Cell]
    figure: Callable[[pd.DataFrame], str]

    def text(self, name: str) -> str:
        """Return the table as Markdown: our figures, each behind the published one, if its column has any."""
        rows, columns = (list(dict.fromkeys(key)) for key in zip(*((c.row, c.column) for c in self.cells), strict=True))
        published = {(c.row, c.column): c.published for c in self.cells}
        ours = {(c.row, c.column): self._ours(c.file(name)) for c in self.cells}
        shown = [("", rows)]
        for column in columns:
            theirs, found = ([of.get((row, column), MISSING) for row in rows] for of in (published, ours))
            shown += [(column, theirs), ("ours", found)] if set(theirs) != {MISSING} else [(column, found)]
        headings, texts = zip(*shown, strict=True)
        return markdown(headings, list(zip(*texts, strict=True)))

    def _ours(self, file: Path) -> str:
        return self.figure(records.load(file)) if file.exists() else MISSING


def of_seeds(table: pd.DataFrame, sets: Sequence[str], name: str = "token_accuracy") -> list[float]:
    """Return the mean accuracy over sets of sequences, of each seed."""
    return [float(y) for y in table[[f"{of}.{name}" for of in sets]].mean(axis=1)]


# MAD: DeltaNet's paper. A figure is a mean over all settings of a task, of the point that validation chooses.
MAD_TASKS = ("compression", "fuzzy-in-context-recall", "in-context-recall", "memorization", "noisy-in-context-recall")
MAD_COLUMNS = (*MAD_TASKS, "selective-copying")
MAD = {
    "transformer": ("51.6 (43.2)", "29.8 (56.5)", "94.1 (90.5)", "85.2 (78.8)", "86.8 (89.7)", "99.6 (99.8)"),
    "hyena": ("45.2", "7.9", "81.7", "89.5", "78.8", "93.1"),
    "mamba": ("52.7 (49.1)", "6.7 (12.3)", "90.4 (99.3)", "89.5 (89.6)", "90.1 (99.7)", "86.3 (88.7)"),
    "gla": ("38.8 (40.8)", "6.9 (15.5)", "80.8 (91.8)", "63.3 (77.1)", "81.6 (93.1)", "88.6 (89.1)"),
    "deltanet": ("42.2 (39.6)", "35.7 (39.3)", "100 (99.9)", "52.8 (39.4)", "100 (99.9)", "100 (99.7)"),
}


def mad_studies(layer: str, task: str) -> list[dict[str, Any]]:
    """Return the studies of a layer on all settings of a task: two layers and two SwiGLU, one seed.

    Memorization has the six points of the paper, the longer tasks the two of the largest learning rate.
    """
    grid = {} if task == "memorization" else {"lr": [1e-3], "weight_decay": [0.0, 0.1]}
    sweeps = TASKS[task].sweeps.items()
    difficulties = ["baseline", *(f"{name.replace('_', '-')}-{y}" for name, values in sweeps for y in values)]
    model = {"mixer": f"{layer}+swiglu:SwiGLU", "layers": 4, "mlp_width": 0}
    return [{**model, **grid, "task": task, "difficulty": difficulty} for difficulty in difficulties]


def mad_baseline() -> str:
    """Return what the reference results say of MAD's grid: one layer, the baseline of each task, the best point."""
    table = load_rows(records.REFERENCE, ["full"], [ENTRIES[layer] for layer in MAD], MAD_COLUMNS)
    table = table[(table["lr"] <= 1e-3) & (table["seed"] == 0)]
    best = 100 * table.pivot_table(index="layer", columns="task", values="validation.token_accuracy", aggfunc="max")
    rows = [[layer, *(f"{best.loc[layer, task]:.1f}" for task in MAD_COLUMNS)] for layer in MAD]
    return markdown(["", *MAD_COLUMNS], rows)


def mad_figure(table: pd.DataFrame) -> str:
    """Mean accuracy in % over the settings, of the chosen point of each; of fuzzy recall with the longest keys."""
    split = LONGEST_KEYS if table["task"].iloc[0] == "fuzzy-in-context-recall" else "test"
    return f"{100 * chosen(points(table))[f'{split}.token_accuracy'].mean():.1f}"


# State tracking: Grazzi et al. Best of three seeds, and in brackets the median.
TRACKING = {
    "Transformer": ("transformer", {}, "0.022 (0.003)", "0.031 (0.018)", "0.067 (0.064)"),
    "mLSTM": ("mlstm", {}, "0.087 (0.018)", "0.040 (0.027)", "0.114 (0.114)"),
    "sLSTM": ("slstm", {}, "1.000 (1.000)", "0.787 (0.124)", "0.178 (0.163)"),
    "Mamba, 0 to 1": ("mamba", {}, "0.000 (0.000)", "0.095 (0.066)", "0.123 (0.116)"),
    "Mamba, -1 to 1": ("mamba", {"negative_eigenvalues": True}, "1.000 (1.000)", "0.241 (0.214)", "0.116 (0.098)"),
    "DeltaNet, 0 to 1": ("deltanet", {}, "0.017 (0.010)", "0.314 (0.214)", "0.194 (0.162)"),
    "DeltaNet, -1 to 1": (
        "deltanet",
        {"negative_eigenvalues": True},
        "1.000 (0.999)",
        "0.971 (0.826)",
        "0.260 (0.227)",
    ),
}
ARITHMETIC = {"steps": 100_000, "layers": 3, "task": "modular-arithmetic"}
TRACKING_TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parity": ({"steps": 20_000, "layers": 2, "task": "parity"}, {"min_length": 3, "last_only": True}),
    "arithmetic": (ARITHMETIC, {}),
    "with brackets": (ARITHMETIC, {"brackets": True}),
}


def tracking_studies(mixer: str, options: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Return the study of a layer on a task, with sequences of up to 40 tokens and tests of up to 240."""
    training, task = TRACKING_TASKS[column]
    examples = {"length": 40, "train_examples": 2_048_000, "extrapolation_factors": (2, 3, 4, 5, 6)}
    protocol = {"lr": [1e-3], "weight_decay": [0.1], "seeds": 3, "batch_size": 256}
    return [{**training, **protocol, "mixer": mixer, "mixer_options": options, "task_options": {**examples, **task}}]


def tracking_figure(table: pd.DataFrame) -> str:
    """Accuracy above chance as a share, mean over the lengths from 80 to 240."""
    chance = table["chance"].iloc[0]["token"]
    found = [(y - chance) / (1 - chance) for y in of_seeds(table, [f"length {n}" for n in range(80, 241, 40)])]
    return f"{max(found):.3f} ({median(found):.3f})"


# Groups: DeltaProduct. Whether training at 128 elements extrapolates to 512; our figures are of each seed. Theirs has
# neither the short convolution nor the output gate that our layer has.
BARE, WHOLE, LONGER = "at 512", "with convolution and gate", "trained longer"
GROUPS = (
    *(("S3", 1, True, "fails"), ("S3", 2, True, "extrapolates"), ("S3", 1, False, "fails"), ("S3", 2, False, "fails")),
    *(("S4", 1, True, "fails"), ("S4", 2, True, "extrapolates")),
    *(("A5", 1, True, "fails"), ("A5", 2, True, "extrapolates")),
    *(("S5", 3, True, "fails"), ("S5", 4, True, "extrapolates")),
)


def group_studies(group: str, pairs: int, negative: bool, published: str, column: str) -> list[dict[str, Any]]:
    """Return the study of one layer with a number of pairs a position; with a second seed where it should succeed."""
    options = {"heads": 8, "householders": pairs, "negative_eigenvalues": negative, "gated": False}
    layer = {"mixer": "deltaproduct", "mixer_options": options, "weight_decay": [0.01]}
    if column != WHOLE:
        bare = {**options, "convolution": 1}
        layer = {"mixer": "ungated:UngatedDeltaProduct", "mixer_options": bare, "weight_decay": [1e-6]}
    words = {"group": group, "length": 128, "begin": True, "train_examples": 100_000}
    training = {"epochs": 100, "batch_size": 2048} if group == "S3" else {"steps": 20_000, "batch_size": 512}
    if column == LONGER:
        words["train_examples"], training = 2_000_000, {"steps": 100_000, "batch_size": 512}
    protocol = {"lr": [1e-3], "seeds": 1 + (published == "extrapolates"), **training}
    return [{**protocol, **layer, "task": "group-words", "task_options": words}]


def group_figure(table: pd.DataFrame) -> str:
    """Token accuracy at 128 and at 512 elements, of each seed."""
    pairs = zip(of_seeds(table, ["test"]), of_seeds(table, ["length 512"]), strict=True)
    return "; ".join(f"{short:.3f} → {long:.3f}" for short, long in pairs)


# MQAR: table 2 of Log-Linear Attention, in zoology's setting. Mean and standard deviation over seeds.
KINDS = (*5 * ((64, 4),), (128, 8), (256, 16), (256, 32), (256, 64))
"""Lengths and numbers of pairs: 100,000 sequences of the first kind, 20,000 of each other one."""
RECALL = {
    "Transformer": ("transformer", ({"heads": 1},) * 3, ("≥ 99", "≥ 99", "≥ 99")),
    "Hyena, Transformer": ("hyena+transformer", ({"transformer.heads": 1},) * 3, (MISSING,) * 3),
    "Mamba-2": (
        "mamba2",
        tuple({"heads": heads, "state_size": 16} for heads in (2, 4, 8)),
        ("46.9 (2.3)", "75.1 (4.9)", "89.6 (6.1)"),
    ),
    "Gated DeltaNet": (
        "gated-deltanet",
        ({"heads": 1}, {"heads": 2}, {"heads": 2}),
        ("38.4 (1.0)", "79.0 (2.1)", "≥ 99"),
    ),
}


def recall_studies(mixer: str, options: dict[str, Any], width: int) -> list[dict[str, Any]]:
    """Return the study of two layers without MLP."""
    size = {"vocab_size": 8192, "length": 256, "pairs": 64, "train_examples": 180_000, "extrapolation_factors": ()}
    task = {**size, "alpha": 0.01, "random_filler": True, "mixture": KINDS}
    protocol = {"lr": [1e-2], "weight_decay": [0.1], "seeds": 3, "epochs": 32, "batch_size": 256}
    model = {"mixer": mixer, "mixer_options": options, "layers": 2, "width": width, "mlp_width": 0}
    return [{**model, **protocol, "task": "mqar", "task_options": task}]


def recall_figure(table: pd.DataFrame) -> str:
    """Accuracy in %, mean over the kinds of sequences."""
    found = [100 * y for y in of_seeds(table, [f"pairs {pairs}" for _, pairs in dict.fromkeys(KINDS)])]
    return f"{fmean(found):.1f} ({stdev(found):.1f})"


TABLES = {
    "mad": Table(
        [
            Cell(row=layer, column=task, published=published, studies=mad_studies(layer, task))
            for layer, row in MAD.items()
            for task, published in zip(MAD_COLUMNS, row, strict=True)
        ],
        mad_figure,
    ),
    "state-tracking": Table(
        [
            Cell(row=row, column=column, published=y, studies=tracking_studies(mixer, options, column))
            for row, (mixer, options, *published) in TRACKING.items()
            for column, y in zip(TRACKING_TASKS, published, strict=True)
        ],
        tracking_figure,
    ),
    "groups": Table(
        [
            Cell(
                row=f"{group}, n_h {pairs}, {'-1' if negative else '0'} to 1",
                column=column,
                published=published if column == BARE else MISSING,
                studies=group_studies(group, pairs, negative, published, column),
            )
            for group, pairs, negative, published in GROUPS
            for column in (BARE, WHOLE, *(LONGER,) * (published == "extrapolates" and group != "S3"))
        ],
        group_figure,
    ),
    "mqar": Table(
        [
            Cell(row=row, column=f"width {width}", published=y, studies=recall_studies(mixer, options, width))
            for row, (mixer, all_options, published) in RECALL.items()
            for width, options, y in zip((16, 32, 64), all_options, published, strict=True)
        ],
        recall_figure,
    ),
}


def shortened(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a study with two steps on few sequences; on a GPU in launches as large as the study's."""
    batch = settings.get("batch_size", 128) if torch.cuda.is_available() else 4
    few = {**settings.get("task_options", {}), "train_examples": 2 * batch, "eval_examples": 8}
    others = {name: y for name, y in settings.items() if name != "epochs"}
    return {**others, "steps": 2, "evaluations": 1, "batch_size": batch, "task_options": few}


def planned(mixer_options: Any = (), task_options: Any = (), **settings: Any) -> Experiment:
    """Return the experiment of the keyword arguments of a study."""
    options = from_keywords(defaults("grid"), "study", settings)
    return plan(options, dict(mixer_options), dict(task_options))[0]


def train(table: str, cell: Cell, out: Path, trial: bool) -> None:
    """Train what is missing of a cell; unless it is a trial, write its records."""
    found: list[records.Record] = []
    out = out / "trial" if trial else out
    for settings in map(shortened, cell.studies) if trial else cell.studies:
        result = study(**settings, out=out, **SETTINGS)
        found += [replace(record, curve={}) for _, record in records.read_all(*result.table["file"])]
    file = out / "trial.jsonl" if trial else cell.file(table)
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write_all(file, found)
    seconds = sum(record.seconds / record.together for record in found)
    print(f"{table}: {cell.name}: {TABLES[table].figure(records.load(file))}, {seconds:.0f} s of training", flush=True)


def write_page() -> None:
    """Write the tables between their marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in {"mad-baseline": mad_baseline(), **{name: y.text(name) for name, y in TABLES.items()}}.items():
        head, start, rest = text.partition(f"<!-- {name} -->")
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}{start}\n\n{made}\n\n{end}{tail}"
    write_atomically(PAGE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", choices=[*TABLES, "page"])
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns of the names that --list shows")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder of the studies")
    parser.add_argument("--list", action="store_true", help="print the cells, and train nothing")
    parser.add_argument("--trial", action="store_true", help="two steps of each cell, for no table")
    given = parser.parse_args(arguments)

    sys.path.insert(0, str(HERE))  # for swiglu and ungated
    for cell in TABLES[given.table].cells if given.table != "page" else ():
        if not any(fnmatch(cell.name, pattern) for pattern in given.cells):
            continue
        if given.list:
            steps = sum(planned(**settings).steps for settings in cell.studies)
            print(f"{'+' if cell.file(given.table).exists() else '-'} {cell.name}: {steps:,} steps")
        elif given.trial or not cell.file(given.table).exists():
            train(given.table, cell, given.out, given.trial)
    if not (given.list or given.trial):
        write_page()


if __name__ == "__main__":
    main()
