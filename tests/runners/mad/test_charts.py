"""Charts of made-up results."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from runners.mad.charts import draw_curves, draw_dots, plot_comparison
from runners.mad.points import chosen, points
from runners.mad.ranking import beside
from runners.mad.tables import labelled
from runners.records import Record
from tests.runners.mad.made_up import interval_of, layer, record, table

MANY = ("lstm", "rt", "s5", "lru", "staircase")
CEILING, CHANCE = {"sequence": 0.98, "token": 0.9912}, {"sequence": 0.2, "token": 0.3}


def shown(*found: Record) -> pd.DataFrame:
    return labelled(chosen(points(table(*found))))


def many(**changes: object) -> list[Record]:
    """Five layers on two tasks, of which RT has no test accuracy on one, and S5 diverged there."""
    missing = {("rt", "mqar"): 0.5, ("s5", "mqar"): None}
    return [
        record(missing.get((name, task), n / 10), layer=name, task=task, ceiling=CEILING, chance=CHANCE,
               tested=(name, task) != ("rt", "mqar"), **changes)
        for n, name in enumerate(MANY) for task in ("parity", "mqar")
    ]  # fmt: skip


@pytest.mark.parametrize("seeds", [(0.5,), (0.2, 0.4, 0.9)])
def test_lines_are_intervals_and_dots_means(seeds: tuple[float, ...]) -> None:
    figure = draw_dots(shown(*layer("rt", seeds), *layer("s5", seeds)))
    (axes,) = figure.axes
    drawn = [segment[:, 0] for lines in axes.collections for segment in lines.get_segments() if len(segment)]
    shares = (0.5, 1) * (len(seeds) > 1)
    np.testing.assert_allclose(drawn, [interval_of([seed * share for seed in seeds])[1:] for share in shares] * 2)
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() not in ("None", None)]
    np.testing.assert_allclose(dots, [0.25, 0.5] * 2)
    assert [text.get_text() for text in axes.texts] == ["0.50", "0.50"]
    assert figure.get_suptitle().startswith(
        f"test accuracy after 20,000 steps, {'1 seed' if len(seeds) == 1 else '3 seeds'}\n"
    )


@pytest.mark.parametrize("length", [5, 30, 60])
def test_no_two_labels_of_a_chart_overlap_however_long_they_are(length: int) -> None:
    words = ", ".join(f"some-setting-{n} {n}" for n in range(length // 15))
    found = [record(layer=name, task=task, tested=name != "rt") for name in MANY for task in ("parity", "mqar")]
    table_of = shown(*found)
    table_of["label"] += f"{'_' * length}.module:Layer ({words})"
    table_of["setting"] += f" (custom, {words})"
    figure = draw_dots(table_of)
    figure.draw_without_rendering()
    extents = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
    assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in extents)


def test_dots_have_a_panel_for_each_task_and_the_best_layer_on_top() -> None:
    first, second = draw_dots(shown(*many())).axes
    assert [axes.get_title() for axes in (first, second)] == ["mqar", "parity"]
    names = [label.get_text() for label in first.get_yticklabels()]
    assert names == ["rt", "s5", "lstm", "lru", "staircase"]  # those that lack a task are below
    texts = {names[int(text.get_position()[1])]: text.get_text() for text in first.texts}
    assert texts == {"rt": "", "s5": "diverged", "lstm": "0.00", "lru": "0.30", "staircase": "0.40"}
    limits = [line.get_xdata()[0] for line in first.lines if line.get_marker() in ("None", None)]
    assert limits == [CEILING["token"], CHANCE["token"]]


def test_curves_have_a_line_for_each_seed_of_the_chosen_point() -> None:
    curve = {"step": [10, 20], "train_loss": [2.0, 1.0], "loss": [2.5, 1.5], "token_accuracy": [0.1, None]}
    runs = [*layer("rt", (0.5, 0.6), curve=curve), record(0.1, layer="rt", lr=1e-4, curve=curve)]
    losses, accuracies = draw_curves(shown(*runs), table(*runs)).axes
    assert [list(line.get_ydata()) for line in losses.lines] == [[2.0, 1.0], [2.5, 1.5]] * 2
    assert len(accuracies.lines) == 2
    assert draw_curves(shown(record()), table(record())) is None


def test_ones_own_layers_are_marked_beside_reference_rows_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    found = many()
    own, rows = (table(*(one for one in found if (one.layer == "rt") == mine)) for mine in (True, False))
    plot_comparison(beside(own, rows)[0], own, tmp_path / "beside.png")
    plot_comparison(beside(table(*found), None)[0], own, tmp_path / "alone.png")
    assert {path.suffix for path in tmp_path.glob("beside.*")} == {".png", ".pdf", ".csv"}
    bold = [[label.get_text() for label in figure.axes[0].get_yticklabels() if label.get_fontweight() == "bold"]
            for figure in drawn[::2]]  # fmt: skip
    assert bold == [["→ rt"], []]


def test_the_file_of_a_chart_has_each_figure_under_its_name(tmp_path: Path) -> None:
    sets = {"long": {"sequence_accuracy": 0.5, "token_accuracy": 0.75}}
    own = layer("mine", (0.5, 0.7), metrics=sets, mixer_config={"heads": 2}, state=None, ceiling=CEILING, chance=CHANCE)
    runs = table(*own, record(None, layer="lstm"))
    plot_comparison(beside(runs, None)[0], runs, tmp_path / "chart.png")
    lines = pd.read_csv(tmp_path / "chart.csv").set_index(["layer", "split"])
    mine, beyond, diverged = lines.loc[("mine", "test")], lines.loc[("mine", "long")], lines.loc[("lstm", "test")]
    assert mine["token_accuracy"] == pytest.approx(0.6, abs=1e-15)
    found = [mine[f"sequence_accuracy{end}"] for end in ("", "_low", "_high")]
    assert found == pytest.approx(interval_of([0.25, 0.35]))
    assert mine[["ceiling_sequence", "ceiling_token", "chance_sequence", "chance_token"]].tolist() == [
        0.98,
        0.9912,
        0.2,
        0.3,
    ]
    assert mine[["mixer", "options", "width", "lr", "seeds", "steps"]].tolist() == [
        "my_module:mine", '{"heads": 2}', 128, 1e-3, 2, 20_000
    ]  # fmt: skip
    assert mine[["parameters", "flops_per_token_128"]].tolist() == [1234, 77]
    assert np.isnan(mine["state_128"])
    assert (beyond["token_accuracy"], beyond["seeds"]) == (0.75, 2)
    assert np.isnan(beyond["ceiling_token"])
    assert diverged["failure"] == "diverged"
    assert np.isnan(diverged["lr"])
