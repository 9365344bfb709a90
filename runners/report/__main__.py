"""Write all results of the project as HTML pages.

    python -m runners.report                       # results/report/index.html
    python -m runners.report results/studies/*     # with your own studies in the same tables, marked
    python -m runners.report --language-models my_language_models    # those of your own text

The first page has the leaderboards; pages of their own have pictures, language models, the paper's claims, and speeds.
A page is one file that loads no other file. They are made from the records in ``results/reference``, from
``results/published`` and ``results/claims.csv``, and from the records of the given studies. Nothing is trained.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from jinja2 import Environment, PackageLoader, StrictUndefined

from runners import records
from runners.c4.reference.rows import AGAINST, RATES
from runners.ending import run_command, user_errors
from runners.files import write_atomically
from runners.mad.rows import ENTRIES, load_rows
from runners.options import parse
from runners.records import REFERENCE
from runners.report import curves, language
from runners.report.boards import METRICS, TITLES, YOURS, Board, boards_of
from runners.report.correlation import LEAST, SIGNIFICANT
from runners.report.pictures import PICTURES, picture_of
from runners.report.published import anchors, benchmark_table, papers_claims, read_benchmarks, read_claims
from runners.report.svg import DASHES, MARKS
from runners.style import DARK
from runners.tables import abbreviated
from tasks import PUBLISHED

PAGES = {
    "index": "Leaderboards",
    "pictures": "Pictures",
    "language": "Language models",
    "paper": "Paper",
    "speed": "Speed",
}
"""Pages by the name of their file."""
GLANCE = (
    *("mean-rank-ties", "mean-rank-ties-behind", "mean-rank-ties-transformer", "small-language-models"),
    *("tasks-predict-between-families", "transition", "step-of-rt"),
)
"""Claims at the top of the first page."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write all results of the project as HTML pages.

    Attributes:
        studies: folders of your own studies, to show in the same tables.
        language_models: --folder of python -m runners.c4.reference, in place of the project's language models.
        out: folder of results; the first page is report/index.html in it.
    """

    studies: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[STUDY ...]")] = ()
    language_models: Path | None = None
    out: Path = Path("results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors are one line and exit status 2."""
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)

        # The records.
        own = records.load(*options.studies)
        for study in options.studies:
            if not any(study in file.parents or study == file for file in own["file"]):
                raise ValueError(f"{study} holds no records: give studies of runners.mad, as results/studies/*")
        reference = load_rows(REFERENCE, ("full", "quick"), ENTRIES.values(), PUBLISHED)
        boards, left_out = boards_of(reference, own)
        for line in left_out:
            print(f"left out: {line}")

        folder = options.language_models or REFERENCE / "language-models"
        if options.language_models and not [*folder.glob("*.jsonl"), *folder.glob(f"{AGAINST}/*.jsonl")]:
            raise ValueError(f"{folder} holds no language models of runners.c4.reference: give its --folder")
        models = language.read_models(folder, alike=True)
        against = language.read_models(folder / AGAINST, alike=False)
        published, claim = REFERENCE.parent / "published", read_claims(REFERENCE.parent / "claims.csv")
        benchmarks = read_benchmarks(published)

        # The pages.
        pages: dict[str, dict[str, Any]] = {
            "index": {"glance": map(claim, GLANCE), "boards": boards},
            "pictures": {
                "boards": boards,
                "pictures": {board.name: [picture_of(board, name) for name in PICTURES] for board in boards},
            },
            "language": language_page(boards, models, against) | {"text": options.language_models, "boards": boards},
            "paper": {"claims": papers_claims(claim), "results": REFERENCE.parent},
            "speed": {"anchors": anchors(benchmarks), "benchmarks": benchmarks, "published": published},
        }
        for name, content in pages.items():
            write_page(options.out / "report" / f"{name}.html", name, content)
    print(f"written: {options.out / 'report' / 'index.html'}")


def language_page(
    boards: Sequence[Any], models: dict[str, language.Model], against: dict[str, language.Model]
) -> dict[str, Any]:
    """Return what the page of language models shows.

    Args:
        boards: the boards, that of the reference protocol first.
        models: language models of every layer.
        against: language models of RT and the Transformer.
    """
    finished, done = ({n: m for n, m in of.items() if m.finished and m.lr} for of in (models, against))
    of_layers, of_rt = curves.panels_of_families(finished), curves.panels_at_30m(done)
    rhos, pictures = {}, {}
    for board in boards:
        found = {metric: language.correlations(board, [*models.values()], metric) for metric in METRICS}
        rhos[board.name] = found
        pictures[board.name] = [curves.forest_picture(found), curves.score_picture(board, [*models.values()], found)]
    return {
        "models": models,
        "answer": language.answer(boards[0], [*models.values()]),
        "mean_ranks": {layer: -y for layer, y in language.scores_of(boards[0], "token")[language.MEAN_RANK].items()},
        "rhos": rhos,
        "pictures": pictures,
        "of_layers": [
            curves.loss_picture(of_layers, "learning", "How the language models learn"),
            curves.gradient_picture(of_layers, "reach", "How far back the language models use their inputs"),
        ],
        "of_rt": [
            curves.loss_picture(of_rt, "transition", "RT against the Transformer as language models"),
            curves.gradient_picture(of_rt, "gradients", "How far back trained models use their inputs"),
        ],
        "runs": language.table_of_runs(against),
        "losses": language.LOSSES,
        "parts": language.PARTS,
        "rates": RATES,
        "least": LEAST,
        "significant": SIGNIFICANT,
    }


def write_page(path: Path, name: str, content: dict[str, Any]) -> None:
    """Write a page, one of ``PAGES``, to a file."""
    environment = Environment(
        loader=PackageLoader("runners.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": lambda y: "?" if y is None else abbreviated(y), "digits": digits}
    words = {"tasks": list(PUBLISHED), "metrics": METRICS, "titles": TITLES, "yours": YOURS, "pages": PAGES}
    environment.globals |= {
        "link": lambda target: Path(os.path.relpath(target, path.parent)).as_posix(),
        "grid": rates_of,
        "benchmark_table": benchmark_table,
        "colors": DARK,
        "dashes": DASHES,
        "shapes": MARKS,
    }
    text = environment.get_template(f"{name}.html").render(page=name, **words, **content)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def rates_of(board: Board, i: int) -> str:
    """Return the learning rates (i = 0) or weight decays (1) of a board's cells: those of all, and those of some."""
    of_cells = [{point[i] for point in cell.point["grid"]} for cell in board.cells.values()]
    common = set.intersection(*of_cells)
    some = ", ".join(f"{y:g}" for y in sorted(set.union(*of_cells) - common))
    return ", ".join(f"{y:g}" for y in sorted(common)) + f" (in some cells also {some})" * bool(some)


def digits(value: float) -> str:
    """Return an accuracy with three digits, or with four if three would round it up to 1."""
    text = f"{value:.3f}"
    return text if text != "1.000" or value == 1 else f"{math.floor(value * 1e4) / 1e4:.4f}"


if __name__ == "__main__":
    run_command(main, "interrupted: no page is written")
