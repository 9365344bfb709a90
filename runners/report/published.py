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
from markupsafe import Markup

from runners.report.svg import Chart
from runners.style import Style, style_of

DATA = Path(__file__).parent / "data"
WIDE = 1024
"""Width of language models, at which they are compared, too."""
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
TITLES = {"agrees": "Agrees", "partly": "Agrees in part", "differs": "Differs", "not shown": "Not tested"}
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
        found.append({"records": [], "ours": None, **entry, "why": texts["why"], "table": lines})
    return found


def papers_page(claim: Claim) -> str:
    """Return the text of ``docs/paper.md``: a line for each claim of the paper, with our claim that answers it."""
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    return environment.from_string(PAGE).render(claims=papers_claims(claim), claim=claim, titles=TITLES)


def claims_table(file: Path) -> list[dict[str, Any]]:
    """Return the claims of a file that hold, then those that are refuted, each with its records below the folder."""
    table, found = pd.read_csv(file, dtype=str, keep_default_na=False), []
    for row in table.sort_values("status", kind="stable").to_dict("records"):
        names = (file.parent / name for name in row["record"].split("; ") if name)
        records = [next((path for path in (Path(f"{name}.jsonl"), name) if path.exists()), name) for name in names]
        found += [{**row, "records": records}] * (row["status"] != "superseded")
    return found


def wide_steps(benchmarks: Mapping[Path, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the steps of layers at the width of language models, of the newest of the records with the most layers.

    Keys: ``record``; ``shapes``: by sequences × positions, the cells of the layers, the fastest first; ``layers``: by
    layer, its cells of the shapes at which its time relative to the Transformer's is known. Empty without such times.
    """
    found: list[dict[str, Any]] = [{}]
    for path, content in benchmarks.items():
        alike = (cell for cell in content["cells"] if (cell.get("width"), cell.get("runs")) == (WIDE, 1))
        shapes: dict[str, dict[str, Any]] = {}
        layers: dict[str, dict[str, Any]] = {}
        for cell in sorted(alike, key=lambda cell: (cell["length"], cell.get("relative") or float("inf"))):
            shape = f"{cell['batch_size']} × {cell['length']:,}"
            shapes.setdefault(shape, {})[cell["implementation"]] = cell
            if cell.get("relative"):
                layers.setdefault(cell["implementation"], {})[shape] = cell
        found.append({"record": path, "shapes": shapes, "layers": layers})
    return max(found, key=lambda one: len(one.get("layers", ())))


def wide_picture(wide: Mapping[str, Any]) -> Markup:
    """Draw times relative to the Transformer's, a row for each layer; filled: the first shape.

    Args:
        wide: as ``wide_steps`` returns it.
    """
    rows = [(y, layer, wide["layers"][layer]) for y, layer in enumerate(reversed(wide["layers"]))]
    edges, first = (-0.6, len(rows) - 0.4), next(iter(wide["shapes"]))
    chart = Chart(
        description=f"time of a step at width {WIDE:,} relative to the Transformer's",
        labels={"x": "time of a step, × the Transformer’s", "y": ""},
        logs="x",
        limits={"y": edges},
        ticks={"y": {y: layer.rpartition(":")[2] for y, layer, _ in rows}},
        text="{:g}×".format,
        size=(280, 36 + 11 * len(rows)),
        left=92,
    )
    chart.line([1, 1], edges, Style(color="var(--muted)", marker="o"), width=0.8)
    for y, layer, cells in rows:
        style, ratios = style_of(layer), [cell["relative"] for cell in cells.values()]
        chart.line(ratios, [y] * len(ratios), style)
        for shape, ratio in zip(cells, ratios, strict=True):
            chart.mark(ratio, y, style, hollow=shape != first)
        chart.end(", ".join(f"{ratio:.3g}×" for ratio in ratios), y, style.color)
    return chart.svg()


def anchors(folder: Path, benchmarks: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of anchors: the authors' code and ours on the same measurement.

    Keys: ``what``, the measurement; ``figures``: authors' RT and Transformer, the paper's RT, our RT and Transformer,
    and the bound; ``gain``, the speed of our RT divided by that of the authors' RT; ``record`` and ``device`` of ours.
    """
    found = []
    for row in tomllib.loads((DATA / "anchors.toml").read_text(encoding="utf-8"))["row"]:
        record, field = folder / row["file"], row["field"]
        content = benchmarks.get(record, {"cells": [], "device": "record not there"})
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
        figures = [*stated, _text(ours), _text(theirs), row.get("limit", "–")]
        found.append(row | {"figures": figures, "gain": gain, "device": content["device"], "record": record})
    return found


def _text(value: float | None) -> str:
    """Return a figure with three digits, thousands with commas."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    (ROOT / "docs" / "paper.md").write_text(papers_page(read_claims(ROOT / "results" / "claims.csv")), encoding="utf-8")
