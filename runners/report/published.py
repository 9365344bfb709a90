"""What is published beside the records of trainings: claims, the paper's claims, and benchmarks.

    python -m runners.report.published     # writes docs/paper.md

``results/claims.csv`` holds what is known, with figures. ``data/claims.toml`` holds the paper's claims; its texts take
our figures from there by name, so that no figure stands twice.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

from runners.files import read_json

DATA = Path(__file__).parent / "data"
RENAMED = {"rt-triton": "rt-fused", "rt-chunked": "rt-wavefront", "rt-chunked-graph": "rt-wavefront-graph"}
"""Today's names of implementations, by their earlier names."""
PLACE = ("phase", "width", "layers", "batch_size", "length", "runs", "recompute", "micro_batch_size")
"""Settings of a benchmark's cell."""
FIGURES = ("median_ms", "min_ms", "max_ms", "tokens_per_second", "peak_gib", "error")
HEADINGS = {
    "batch_size": "batch",
    "median_ms": "ms",
    "min_ms": "min",
    "max_ms": "max",
    "tokens_per_second": "tokens/s",
    "peak_gib": "GiB",
    "micro_batch_size": "in parts of",
    "recompute": "recomputing",
}
"""Names of settings and figures in the tables."""
PAGE = """\
# The paper

[Oncescu et al. 2026](https://arxiv.org/abs/2604.21215), line by line, and in italics our answer: a claim of
[claims.csv](../results/claims.csv) with figures, command and record. `python -m runners.report` shows the paper's
figures beside ours. `python -m runners.report.published` writes this page.
{% for verdict, title in titles.items() %}
## {{ title }}

{% for one in claims if one.verdict == verdict %}- **{{ one.where }}.** {{ one.short }}
{%- if one.ours %} *{{ claim(one.ours).claim }}* (`{{ one.ours }}`){% endif %}
{% endfor %}{% endfor -%}
"""
TITLES = {"agrees": "Agrees", "partly": "Agrees in part", "differs": "Differs", "not shown": "Not shown"}
"""Headings of the page by verdict."""


Claim = Callable[..., Any]
"""Finds a row of ``results/claims.csv`` by name; see ``read_claims``."""


def read_claims(file: Path) -> Claim:
    """Return the function that finds a claim by its name.

    The result has the columns of the file as attributes: ``claim``, ``value``, ``interval``, ``unit`` and others, all
    of them texts. With the name of one of several, as ``RT`` of "RT 1; Transformer 0", it is the value of that one.

    Raises:
        OSError: the file cannot be read.
    """
    rows = {row.name: row for row in pd.read_csv(file, dtype=str, keep_default_na=False).itertuples()}

    def claim(name: str, of: str | None = None) -> Any:
        parts = rows[name].value.split("; ")
        return rows[name] if of is None else next(y.removeprefix(f"{of} ") for y in parts if y.startswith(f"{of} "))

    return claim


def papers_claims(claim: Claim) -> list[dict[str, Any]]:
    """Return the paper's claims with our figures: where, claim, verdict, why, command, records, and a table or none."""
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.globals |= {
        "claim": claim,
        "says": lambda name: f"{claim(name).claim.removesuffix('.')} ({claim(name).value}, {claim(name).unit}).",
    }
    found = []
    for entry in tomllib.loads((DATA / "claims.toml").read_text(encoding="utf-8"))["claim"]:
        texts = {name: environment.from_string(entry.get(name, "")).render() for name in ("why", "table")}
        lines = [[cell.strip() for cell in line.split("|")] for line in texts["table"].splitlines() if line]
        found.append({"records": [], **entry, "why": texts["why"], "table": lines})
    return found


def papers_page(claim: Claim) -> str:
    """Return the text of ``docs/paper.md``: a line for each claim of the paper, with our claim that answers it."""
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    found = [{"ours": None} | entry for entry in papers_claims(claim)]
    return environment.from_string(PAGE).render(claims=found, claim=claim, titles=TITLES)


def read_benchmarks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the published records of benchmarks by file, the newest first, with today's names of implementations."""
    found = {}
    for path in sorted(folder.glob("*/*.json"), key=lambda path: path.parent.name[:10], reverse=True):
        content = read_json(path)
        if isinstance(content, dict) and "benchmark" in content:
            for cell in content["cells"]:
                cell["implementation"] = RENAMED.get(cell["implementation"], cell["implementation"])
            found[path.relative_to(folder).as_posix()] = content
    return found


def anchors(benchmarks: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of anchors: the authors' code and ours on the same measurement.

    Keys: ``what``, the measurement; ``figures``: authors' RT and Transformer, the paper's RT, our RT and Transformer,
    and the bound; ``gain``, the speed of our RT divided by that of the authors' RT; ``file`` and ``device`` of ours.
    """
    found = []
    for row in tomllib.loads((DATA / "anchors.toml").read_text(encoding="utf-8"))["row"]:
        content, field = benchmarks.get(row["file"], {"cells": [], "device": "record not there"}), row["field"]
        figures_of: list[float | None] = []
        for implementation in (row["ours"], row["theirs"]):
            keys = row["keys"] | {"implementation": implementation}
            timed = [cell for cell in content["cells"] if cell["status"] == "timed"]
            alike = [cell for cell in timed if all(cell.get(name, value) == value for name, value in keys.items())]
            whole = [cell for cell in alike if cell.get("micro_batch_size") is None] or alike
            figures_of.append(whole[0].get(field) if whole else None)
        ours, theirs = figures_of
        authors, gain = row.get("authors", "–"), "–"
        if ours is not None and authors != "–":
            then = float(authors.replace(",", ""))
            gain = f"{ours / then if field == 'tokens_per_second' else then / ours:.1f}×"
        stated = [row.get(name, "–") for name in ("authors", "authors_transformer", "paper")]
        figures = [*stated, _text(field, ours), _text(field, theirs), row.get("limit", "–")]
        found.append(row | {"figures": figures, "gain": gain, "device": content["device"]})
    return found


def benchmark_table(benchmark: Mapping[str, Any]) -> list[list[str]]:
    """Return the headings and a row for each cell of a benchmark."""
    cells = benchmark["cells"]
    place = [name for name in PLACE if any(cell.get(name) not in (None, False) for cell in cells)]
    figures = [name for name in FIGURES if any(cell.get(name) is not None for cell in cells)]
    rows = [[HEADINGS.get(name, name) for name in (*place, "implementation", *figures, "")]]
    for cell in cells:
        settings = ["" if cell.get(name) in (None, False) else str(cell[name]) for name in place]
        timed = ["" if cell.get(name) is None else _text(name, cell[name]) for name in figures]
        rows.append([*settings, cell["implementation"], *timed, "" if cell["status"] == "timed" else cell["status"]])
    return rows


def _text(name: str, value: float | None) -> str:
    """Return a figure with three digits, thousands with commas."""
    if value is None:
        return "not measured"
    return f"{value:.1e}" if name == "error" else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    (ROOT / "docs" / "paper.md").write_text(papers_page(read_claims(ROOT / "results" / "claims.csv")), encoding="utf-8")
