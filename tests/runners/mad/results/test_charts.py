"""Charts of made-up results."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from runners.mad.results.charts import draw_bars, draw_heat_map, plot_comparison
from runners.mad.results.summary import TEST_METRICS, Estimate
from tests.runners.mad.results.made_up import MANY, SORTED, standings_of


def test_whiskers_end_at_0_and_1_and_numbers_stand_above_them() -> None:
    for half_width in (1.3, 0.1, None):
        standings = standings_of(["rt", "s5"], half_width=half_width)
        figure = draw_bars(standings)
        figure.draw_without_rendering()
        axes = figure.axes[1]
        ends = [
            (0.0 if half_width is None else max(0.0, mean - half_width), min(1.0, mean + (half_width or 0.0)))
            for mean in (0.5, 0.51, 0.52, 0.53)
        ]
        if half_width is not None:
            drawn = [np.asarray(bars.lines[2][0].get_segments()[0])[:, 1] for bars in axes.containers[1::2]]
            np.testing.assert_allclose(drawn, ends)
        for number, mean, (_, high) in zip(axes.texts, (0.5, 0.51, 0.52, 0.53), ends, strict=True):
            assert number.get_text() == f"{mean:.2f}"
            assert axes.transData.inverted().transform(number.get_window_extent())[0, 1] > high
            assert figure.bbox.ymax > number.get_window_extent().ymax
        first, _, meaning = figure.get_suptitle().partition("\n")
        assert first == f"test accuracy, baseline settings, {'1 seed' if half_width is None else '3 seeds'}"
        assert ("means; whiskers: 95%" in meaning) == (half_width is not None)


def test_a_chart_says_once_after_how_many_steps_and_of_which_settings() -> None:
    standings = [replace(s, steps=250, difficulty="demo") for s in standings_of(["rt", "s5"])]
    figure = draw_bars(standings)
    assert figure.get_suptitle() == "test accuracy after 250 steps, demo settings, 1 seed"
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["parity", "mqar"]
    figure = draw_bars([replace(standings[0], steps=400, difficulty="quick"), *standings[1:]])
    assert figure.get_suptitle() == "test accuracy after 250 to 400 steps, 1 seed"
    assert "parity\nquick" in [label.get_text() for label in figure.axes[1].get_xticklabels()]


@pytest.mark.parametrize("length", [5, 30, 90])
def test_the_legend_fits_whatever_the_mixers_are_called(length: int) -> None:
    names = {mixer: f"{mixer}{'_' * length}.module:Layer{'x' * length}" for mixer in MANY[:4]}
    standings = [replace(s, mixer=names[s.mixer]) for s in standings_of(MANY[:4])]
    figure = draw_bars(standings)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert figure.bbox.xmin <= extent.xmin < extent.xmax <= figure.bbox.xmax
    texts = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert texts == [*names.values(), "ceiling", "chance"]


def test_a_heat_map_has_intervals_a_title_and_one_color_for_equal_numbers() -> None:
    standings = standings_of(MANY, half_width=0.25)
    assert draw_heat_map(standings).get_suptitle().endswith("3 seeds\nmeans ± half the 95% t-interval")
    assert draw_heat_map(standings_of(MANY)).get_suptitle().endswith("1 seed")
    for shift in (-0.001, 0.001):
        estimates = {m: Estimate(mean=0.5 + shift, half_width=0.25) for m in TEST_METRICS}
        standings = [replace(s, test=estimates) for s in standings]
        texts = {text.get_position(): text for axes in draw_heat_map(standings).axes for text in axes.texts}
        assert (texts[0, 1].get_text(), texts[0, 1].get_color()) == ("0.50\n±0.25", "#ffffff")
        assert (texts[0, 0].get_text(), texts[0, 0].get_color()) == ("0.99", "#111111")


def test_no_two_labels_of_a_chart_overlap_however_many_settings_they_name() -> None:
    words = ", ".join(f"some-setting-{n} {n}" for n in range(6))
    for mixers, draw in ((MANY[:4], draw_bars), (MANY, draw_heat_map)):
        named = [replace(s, mixer=f"{s.mixer} ({words})", difficulty=f"custom, {words}") for s in standings_of(mixers)]
        figure = draw(named)
        figure.draw_without_rendering()
        axes = figure.axes[-1] if draw is draw_bars else figure.axes[0]
        labels = [axes.get_xticklabels() if draw is draw_bars else [], axes.get_yticklabels()]
        for extents in ([label.get_window_extent() for label in side] for side in labels):
            assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
            assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in extents)


def test_means_are_over_the_seeds_of_what_has_not_diverged() -> None:
    for mixers, draw in ((MANY[:2], draw_bars), (MANY, draw_heat_map)):
        diverged, *others = standings_of(mixers, half_width=0.1)
        figure = draw([replace(diverged, test=None, seeds=0), *others])
        assert " 0 to" not in figure.get_supxlabel() + figure.get_suptitle()


def test_a_heat_map_calls_diverged_only_what_diverged() -> None:
    standings = [replace(s, test={}) if s.mixer == "rt" else s for s in standings_of(MANY, diverged=[("s5", "parity")])]
    axes = draw_heat_map(standings).axes[0]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert [texts[0, 3], texts[1, 3], texts[0, 5]] == ["–", "–", "div."]


def test_a_heat_map_marks_ones_own_layers_beside_reference_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    standings = standings_of(MANY)
    own, rows = [s for s in standings if s.mixer == "rt"], [s for s in standings if s.mixer != "rt"]
    plot_comparison(own, rows, tmp_path / "beside.png")
    plot_comparison(standings, [], tmp_path / "alone.png")
    bold = [
        [label.get_text() for label in figure.axes[0].get_yticklabels() if label.get_fontweight() == "bold"]
        for figure in drawn[::2]  # each is written twice
    ]
    assert bold == [["→ rt"], []]


def test_the_chart_of_many_mixers_is_a_heat_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    standings = [s for s in standings_of(MANY, diverged=[("s5", "mqar")]) if (s.mixer, s.setting) != ("rt", "mqar")]
    plot_comparison(standings, [], tmp_path / "many.png")
    plot_comparison([s for s in standings if s.mixer != "s5"], [], tmp_path / "few.png")
    assert {path.name for path in tmp_path.iterdir()} == {"many.png", "few.png", "many.pdf", "few.pdf"}
    heat_map, bars = drawn[::2]  # each is written twice
    assert not any(axes.images for axes in bars.axes)
    nan = np.nan
    sequence = [[0.98, 0.98], [0.00, 0.05], [0.03, 0.08], [0.01, nan], [0.04, 0.09], [0.02, nan], [0.2, 0.2]]
    token = np.array(sequence) + 0.5
    token[[0, -1]] = [0.9912, 0.9912], [0.5, 0.3]
    *panels, color_bar = heat_map.axes
    assert color_bar.get_xlabel() == "accuracy"
    for axes, expected in zip(panels, (sequence, token), strict=True):
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array().filled(nan), expected)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["parity", "mqar"]
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        written = {(column, row): f"{value:.2f}" for (row, column), value in np.ndenumerate(expected)}
        assert texts == {**written, (1, 3): "–", (1, 5): "div."}
    names = [label.get_text() for label in heat_map.axes[0].get_yticklabels()]
    assert names == ["ceiling", *(mixer for _, mixer in SORTED), "chance"]
    (side,) = heat_map.axes[1].child_axes
    families = {label.get_text(): y for label, y in zip(side.get_yticklabels(), side.get_yticks(), strict=True)}
    assert families == {"recurrent net": 1.5, "recurrent attention": 3.5, "state space": 5}
    assert heat_map.get_supxlabel().startswith("grey")
