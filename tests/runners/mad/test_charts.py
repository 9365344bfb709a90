"""Charts of made-up results."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from runners.mad.charts import draw_bars, draw_heat_map, plot_comparison
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
def test_whiskers_are_intervals_and_numbers_stand_above_them(seeds: tuple[float, ...]) -> None:
    found = shown(*layer("rt", seeds), *layer("s5", seeds))
    figure = draw_bars(found)
    figure.draw_without_rendering()
    axes = figure.axes[1]
    whiskers = [bars for bars in axes.containers if isinstance(bars, ErrorbarContainer)]
    drawn = [np.asarray(bars.lines[2][0].get_segments()[0])[:, 1] for bars in whiskers]
    np.testing.assert_allclose(drawn, [interval_of(seeds)[1:]] * 2 if len(seeds) > 1 else [])
    for number in axes.texts:
        assert number.get_text() == "0.50"
        assert axes.transData.inverted().transform(number.get_window_extent())[0, 1] > 1
        assert figure.bbox.ymax > number.get_window_extent().ymax
    first, _, meaning = figure.get_suptitle().partition("\n")
    assert first == f"test accuracy after 20,000 steps, {'1 seed' if len(seeds) == 1 else '3 seeds'}"
    assert ("means; whiskers: 95%" in meaning) == (len(seeds) > 1)


@pytest.mark.parametrize("length", [5, 30, 60])
def test_no_two_labels_of_a_chart_overlap_however_long_they_are(length: int) -> None:
    """The legend stays inside, too."""
    words = ", ".join(f"some-setting-{n} {n}" for n in range(length // 15))
    for count, draw in ((4, draw_bars), (5, draw_heat_map)):
        found = [
            record(layer=name, task=task, tested=name != "rt") for name in MANY[:count] for task in ("parity", "mqar")
        ]
        table_of = shown(*found)
        table_of["label"] += f"{'_' * length}.module:Layer ({words})"
        table_of["setting"] += f" (custom, {words})"
        figure = draw(table_of)
        figure.draw_without_rendering()
        axes = figure.axes[-1] if draw is draw_bars else figure.axes[0]
        labels = [axes.get_xticklabels() if draw is draw_bars else [], axes.get_yticklabels()]
        for extents in ([label.get_window_extent() for label in side] for side in labels):
            assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
            assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in extents)
        for legend in figure.legends:
            extent = legend.get_window_extent()
            assert figure.bbox.xmin <= extent.xmin < extent.xmax <= figure.bbox.xmax


def test_a_heat_map_has_a_row_for_each_layer_and_a_column_for_each_task() -> None:
    figure = draw_heat_map(shown(*many()))
    *panels, color_bar = figure.axes
    nan = np.nan
    token = [[0.9912, 0.9912], [nan, 0.1], [0.4, 0.4], [nan, 0.2], [0.0, 0.0], [0.3, 0.3], [0.3, 0.3]]
    sequence = np.array(token) / 2
    sequence[[0, -1]] = [0.98, 0.98], [0.2, 0.2]
    for axes, expected in zip(panels, (sequence, np.array(token)), strict=True):
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array().filled(nan), expected)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["mqar", "parity"]
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        written = {(column, row): f"{value:.2f}" for (row, column), value in np.ndenumerate(expected)}
        assert texts == {**written, (0, 1): "–", (0, 3): "div."}
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["ceiling", "rt", "staircase", "s5", "lstm", "lru", "chance"]
    (side,) = panels[1].child_axes
    families = {label.get_text(): y for label, y in zip(side.get_yticklabels(), side.get_yticks(), strict=True)}
    assert families == {"recurrent attention": 1.5, "state space": 3, "recurrent net": 4.5}
    assert color_bar.get_xlabel() == "accuracy"
    assert figure.get_supxlabel().startswith("grey")


def test_a_heat_map_has_intervals_and_one_ink_for_equal_numbers() -> None:
    for shift in (-0.001, 0.001):
        found = shown(*(one for name in MANY for one in layer(name, (0.5 + shift, 0.5 + shift), ceiling=CEILING)))
        figure = draw_heat_map(found)
        assert figure.get_suptitle().endswith("2 seeds\nmeans and 95% intervals")
        texts = {text.get_position(): text for text in figure.axes[1].texts}
        assert (texts[0, 1].get_text(), texts[0, 1].get_color()) == ("0.50\n.50–.50", "#ffffff")
        assert (texts[0, 0].get_text(), texts[0, 0].get_color()) == ("0.99", "#111111")


def test_ones_own_layers_are_marked_beside_reference_rows_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    found = many()
    own, rows = (table(*(one for one in found if (one.layer == "rt") == mine)) for mine in (True, False))
    plot_comparison(beside(own, rows)[0], tmp_path / "beside.png")
    plot_comparison(beside(table(*found), None)[0], tmp_path / "alone.png")
    plot_comparison(beside(own, None)[0], tmp_path / "few.png")
    assert {path.suffix for path in tmp_path.glob("beside.*")} == {".png", ".pdf", ".csv"}
    bold = [[label.get_text() for label in figure.axes[0].get_yticklabels() if label.get_fontweight() == "bold"]
            for figure in drawn[::2]]  # fmt: skip
    assert bold == [["→ rt"], [], []]
    assert not drawn[4].axes[0].images


def test_the_file_of_a_chart_has_each_figure_under_its_name(tmp_path: Path) -> None:
    sets = {"long": {"sequence_accuracy": 0.5, "token_accuracy": 0.75}}
    own = layer("mine", (0.5, 0.7), metrics=sets, mixer_config={"heads": 2}, state=None, ceiling=CEILING, chance=CHANCE)
    plot_comparison(beside(table(*own, record(None, layer="lstm")), None)[0], tmp_path / "chart.png")
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
