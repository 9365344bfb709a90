"""Write all results of the project as HTML pages.

    python -m runners.report                       # results/report/index.html
    python -m runners.report results/studies/*     # with your own studies in the same tables, marked
    python -m runners.report --language-models my_language_models    # those of your own text

The first page says where your layer stands, or RT: its place, what it is good and bad at, and what it costs. Pages of
their own have every task, language models, correlations, the paper, all claims with their commands, and speeds. A page
is one file that loads no other file. They are made from the records in ``results/reference``, from
``results/published``, ``results/claims.csv`` and ``results/bench``, and from the records of the given studies. Nothing
is trained.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro
from jinja2 import Environment, PackageLoader, StrictUndefined

from runners import records
from runners.benchmarks import read_benchmarks, steps_of_layers
from runners.c4.reference.rows import AGAINST, EXPERIMENTS, RATES
from runners.ending import run_command, user_errors
from runners.files import write_atomically
from runners.mad.profile import seed_scores
from runners.mad.rows import ENTRIES, PROFILED, load_rows
from runners.options import parse
from runners.progress import spell
from runners.records import REFERENCE
from runners.report import curves, language
from runners.report.boards import YOURS, Board, board_of_profiles, boards_of
from runners.report.correlation import LEAST, SIGNIFICANT
from runners.report.published import (
    anchors,
    claims_table,
    papers_claims,
    read_claims,
    wide_picture,
    wide_steps,
)
from runners.style import DARK
from runners.tables import abbreviated
from tasks import PUBLISHED, TASKS

PAGES = {
    "index": "Overview",
    "profile": "Abilities",
    "full": "Tasks",
    "quick": "Tasks, quick preset",
    "language": "Language models",
    "correlations": "Correlations",
    "paper": "Paper",
    "claims": "Claims",
    "speed": "Speed",
}
"""Pages by the name of their file; those of a board without records are left out."""
GLANCE = (
    *("profile-first", "profile-depth-permutations", "profile-mqar-pairs", "mean-rank-ties", "mean-rank-ties-behind"),
    *("profiles-predict-between-families", "profiles-predict-within-families", "transition"),
)
"""Claims on the first page."""


PICTURES = {
    "overview": "Scores of every ability",
    "state": "Capacity against the size of the state",
    "time": "Profile score against the time of a step",
    "ladders": "Ladders",
}
"""Pictures of runners.mad.reference --preset profile by the names of their files."""


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

        # The boards.
        own = records.load(*options.studies)
        for study in options.studies:
            if not any(study in file.parents or study == file for file in own["file"]):
                raise ValueError(f"{study} holds no records: give studies of runners.mad, as results/studies/*")
        rungs = own["difficulty"].astype(str).str.startswith("rung-")
        reference = load_rows(REFERENCE, ("full", "quick"), ENTRIES.values(), PUBLISHED)
        boards, left_out = boards_of(reference, own[~rungs])
        profiles = load_rows(REFERENCE, ("profile",), PROFILED.values(), TASKS)
        scores = seed_scores(profiles) if len(profiles) else None
        if scores is not None or rungs.any():
            boards = [board_of_profiles(profiles, scores, own[rungs]), *boards]
        for line in left_out:
            print(f"left out: {line}")

        # Language models, claims and benchmarks.
        folder = options.language_models or REFERENCE / "language-models"
        if options.language_models and not [*folder.glob("*.jsonl"), *folder.glob(f"{AGAINST}/*.jsonl")]:
            raise ValueError(f"{folder} holds no language models of runners.c4.reference: give its --folder")
        models = language.read_models(folder, alike=True)
        against = language.read_models(folder / AGAINST, alike=False)
        once = language.read_models(folder / EXPERIMENTS["read-once"].folder, alike=False)
        published, claims = REFERENCE.parent / "published", REFERENCE.parent / "claims.csv"
        benchmarks = read_benchmarks(options.out) | read_benchmarks(published)
        steps, wide, claim = steps_of_layers(benchmarks), wide_steps(benchmarks), read_claims(claims)

        # The pages.
        pages: dict[str, dict[str, Any]] = {
            "index": first_page(boards) | {"glance": map(claim, GLANCE), "models": models, "text": folder},
            **{board.name: {"board": board} for board in boards},
            "language": language_page(models, against, once) | {"text": options.language_models},
            "correlations": correlations_page(boards, models, scores),
            "paper": {"claims": papers_claims(claim), "results": REFERENCE.parent},
            "claims": {"claims": claims_table(claims), "file": claims},
            "speed": {"anchors": anchors(published, benchmarks), "benchmarks": benchmarks, "draw": wide_picture},
        }
        for name, content in pages.items():
            shared = {"there": [*pages], "steps": steps, "wide": wide}
            write_page(options.out / "report" / f"{name}.html", name, content | shared)
    print(f"written: {options.out / 'report' / 'index.html'}")


def first_page(boards: Sequence[Board]) -> dict[str, Any]:
    """Return what the first page shows of the boards: one's own layers, or RT, where they stand; and the boards.

    The first board of several is that of the profiles, then that of the reference protocol. One's own layers stand on
    the first one that has them.
    """
    own = next((board for board in boards if board.own), None)
    board = own or next((found for found in boards if "rt" in found.words), boards[0])
    tasks = own if own and own.name == "quick" else next((found for found in boards if found.name == "full"), board)
    files = {title: REFERENCE / "profile" / f"{name}.png" for name, title in PICTURES.items()}
    return {
        "heroes": [(board, row) for row in (own.own if own else [name for name in board.rows if name in board.words])],
        "profiles": next((found for found in boards if found.name == "profile"), None),
        "board": tasks,
        "pictured": files,
        "pictures": {
            title: f"data:image/png;base64,{b64encode(file.read_bytes()).decode()}"
            for title, file in files.items()
            if file.exists()
        },
    }


def language_page(
    models: Mapping[str, language.Model], against: Mapping[str, language.Model], once: Mapping[str, language.Model]
) -> dict[str, Any]:
    """Return what the page of language models shows.

    Args:
        models: language models of every layer.
        against: language models of RT and the Transformer.
        once: those that read each token once.
    """
    finished, done = ({n: m for n, m in of.items() if m.finished and m.lr} for of in (models, against))
    return {
        "models": models,
        "of_layers": curves.loss_pictures(curves.panels_of_families(finished)),
        "of_rt": curves.loss_pictures(curves.panels_at_30m(done)),
        "at_30m": {"RT against the Transformer at 30M parameters": against, "Text read once": once},
        "table_of_runs": language.table_of_runs,
        "losses": language.LOSSES,
        "rates": RATES,
    }


def correlations_page(
    boards: Sequence[Board], models: Mapping[str, language.Model], scores: pd.DataFrame | None
) -> dict[str, Any]:
    """Return what the page of correlations shows: those of both protocols with the losses of the models.

    Args:
        boards: boards of the tasks.
        models: language models of every layer.
        scores: of the rungs of the reference profiles.
    """
    found, of_layers = [board for board in boards if board.name == "full"], [*models.values()]
    return {
        "of_profiles": None if scores is None else language.profile_answer(scores, of_layers),
        "answer": language.answer(found[0], of_layers) if found else None,
        "rhos": language.correlations(language.scores_of(found[0], of_layers), of_layers) if found else [],
        "losses": language.LOSSES,
        "parts_of": language.PARTS,
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
    environment.filters |= {
        "short": lambda y: "?" if y is None else abbreviated(y),
        "floored": lambda y: "–" if y != y else f"{min(y, 0.999):.3f}" if y < 1 else "1",
        "times": lambda y: "" if y is None else f"{y:.2g}×" if y < 10 else f"{y:,.0f}×",
        "spell": spell,
    }
    environment.globals |= {
        "link": lambda target: Path(os.path.relpath(target, path.parent)).as_posix(),
        "colors": DARK,
        "pages": PAGES,
        "yours": YOURS,
    }
    template = environment.select_template([f"{name}.html", "tasks.html"])
    text = template.render(page=name, **content)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    run_command(main, "interrupted: no page is written")
