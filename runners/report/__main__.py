"""Write all results of the project as one HTML page.

    python -m runners.report                       # results/report/index.html
    python -m runners.report results/studies/*     # with your own studies in the same tables, marked
    python -m runners.report --language-models my_language_models    # those of your own text

The page is one file that loads no other file. It shows leaderboards, pictures, the correlation of scores with losses of
language models, the paper's claims, and speeds. It is made from ``results/reference``, ``results/published`` and the
given studies, finished or not; results without a record are "not trained". Nothing is trained.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from runners.c4.reference.cells import NAME as LANGUAGE_MODELS
from runners.c4.reference.cells import cell_files
from runners.c4.reference.experiments import AGAINST
from runners.cli import check_out, cli, shown_as
from runners.ending import run_command, user_errors
from runners.mad.reference.cells import FOLDER
from runners.progress import bar
from runners.report.cells import Board, reference_board
from runners.report.language import answer, read_language_models
from runners.report.own import read_own
from runners.report.page import Language, Page, Shown, predict, show, write_page
from runners.report.paper import read_claims
from runners.report.pictures import Picture
from runners.report.pictures.costs import flops_picture, state_picture
from runners.report.pictures.depth import block_picture, depth_picture
from runners.report.pictures.heat_map import heat_picture
from runners.report.pictures.lengths import length_picture, position_picture
from runners.report.pictures.models import (
    gradient_picture,
    loss_picture,
    panels_of_families,
    panels_of_parametrisations,
    panels_of_variants,
)
from runners.report.pictures.training import curve_picture, rate_picture
from runners.report.records import Records
from runners.report.speed import anchors, tables
from runners.report.transition import current_models, finished, table_of_runs

DRAWS: tuple[Callable[[Board], Picture], ...] = (
    *(heat_picture, state_picture, flops_picture, depth_picture, block_picture, rate_picture, curve_picture),
    *(length_picture, position_picture),
)
"""What draws the pictures of a board, in their order on the page."""
TEXT = "documentation of free software in English, not C4 (results/notes/2026-11-26.md names the sources)"
"""What the project's language models read."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write all results of the project as one HTML page.

    Attributes:
        studies: folders of your own studies, or their summary.json, to show in the same tables.
        language_models: --folder of python -m runners.c4.reference, in place of the project's language models.
        out: folder of results; the page is report/index.html in it.
    """

    studies: Annotated[tyro.conf.Positional[tuple[Path, ...]], shown_as("[STUDY ...]")] = ()
    language_models: Annotated[Path | None, shown_as("PATH")] = None
    out: Path = Path("results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors are one line and exit status 2."""
    console = Console(markup=False)
    say = partial(console.print, soft_wrap=True)

    with user_errors(ValueError, OSError):
        options = cli(Options, Options(), sys.argv[1:] if arguments is None else arguments)
        check_out(options.out)
        models_folder = options.language_models or FOLDER / LANGUAGE_MODELS
        if options.language_models and not models_folder.is_dir():
            raise ValueError(f"no folder {models_folder}: give --language-models the --folder of runners.c4.reference")
        if options.language_models and not [*cell_files(models_folder), *cell_files(models_folder / AGAINST)]:
            raise ValueError(
                f"{models_folder} holds no language models of runners.c4.reference: give --language-models its --folder"
            )

        # The records.
        own, records = read_own(options.studies, say), Records(FOLDER.parent / "published")
        published = reference_board(FOLDER, "full", own["full"])
        quick = reference_board(FOLDER, "quick", own["quick"])
        say(f"published protocol: {published.trained} of {published.expected} cells are trained")

        # The page.
        language = read_language(models_folder, options.language_models is None, published, quick)
        words = ["STUDY …"] * bool(options.studies) + ["--language-models FOLDER"] * bool(options.language_models)
        page = Page(
            boards=draw_boards([board for board in (published, quick) if board is published or board.cells]),
            language=language,
            claims=read_claims(published, records, current_models(models_folder / AGAINST), language.models),
            anchors=anchors(records),
            tables=tables(records),
            results=FOLDER.parent,
            command=" ".join(["python -m runners.report", *words]),
        )
        path = options.out / "report" / "index.html"
        write_page(page, path)

    say(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")


def read_language(folder: Path, is_ours: bool, published: Board, quick: Board) -> Language:
    """Read the language models of a folder and relate them to the scores of both boards.

    Args:
        folder: ``--folder`` of ``runners.c4.reference``.
        is_ours: whether they are the project's, which read ``TEXT``.
        published: the published protocol.
        quick: the quick preset.
    """
    models, against = read_language_models(folder), current_models(folder / AGAINST)
    of_layers = panels_of_families(finished(current_models(folder)))
    of_rt = {**panels_of_parametrisations(finished(against)), **panels_of_variants(finished(against))}
    return Language(
        models=models,
        text=TEXT if is_ours else f"that of the models in {folder}",
        answer=answer(published, models),
        boards={board.name: predict(board, models) for board in (published, quick) if models},
        pictures=[
            loss_picture(of_layers, "learning", "How the language models learn"),
            gradient_picture(of_layers, "reach", "How far back the language models use their inputs"),
        ],
        against=[
            loss_picture(of_rt, "transition", "RT against the Transformer as language models"),
            gradient_picture(of_rt, "gradients", "How far back trained models use their inputs"),
        ],
        runs=table_of_runs(against),
    )


def draw_boards(boards: Sequence[Board]) -> list[Shown]:
    """Return boards with their pictures."""
    pictures: dict[str, list[Picture]] = {board.name: [] for board in boards}
    todo = [(board, draw) for board in boards for draw in DRAWS]
    for board, draw in bar(todo, "drawing"):
        pictures[board.name].append(draw(board))
    return [show(board, pictures[board.name]) for board in boards]


if __name__ == "__main__":
    run_command(main, "interrupted: no page is written")
