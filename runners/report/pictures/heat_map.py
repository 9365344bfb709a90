"""The heat map of a board: every layer on every task at a glance."""

from dataclasses import replace

from matplotlib import rc_context

from runners.mad.results.charts import draw_heat_map
from runners.report.cells import Board
from runners.report.pictures import Picture
from runners.report.svg import STYLE, to_svg


def heat_picture(board: Board) -> Picture:
    """Return the heat map of the rows that have cells."""
    setting = "quick" if board.name == "quick" else "baseline"
    standings = [replace(cell.standing, difficulty=setting) for cell in board.cells.values()]
    panels = {}
    if standings:
        with rc_context(STYLE | {"axes.grid": False}):
            figure = draw_heat_map(standings)
        panels = {
            "": {"both": to_svg(figure, f"heat map of {board.trained} accuracies; the leaderboard has its figures")}
        }
    return Picture(
        name="heat-map",
        title="Heat map",
        question="Which layer solves which task? Rows are sorted by family, between ceiling and chance. Grey means not "
        "trained, never zero.",
        panels=panels,
        missing="" if panels else "No cell is trained yet.",
        wide=True,
    )
