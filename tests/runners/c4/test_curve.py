"""The curve of a run as a file and as a chart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.charts import plot_curves, smoothed  # noqa: E402
from runners.c4.curve import Row, read_curve, write_curve  # noqa: E402
from runners.c4.identity import describe_run  # noqa: E402
from runners.c4.presets import PRESETS  # noqa: E402
from runners.c4.stored import labels_of  # noqa: E402
from runners.files import DamagedFileError  # noqa: E402


@pytest.mark.parametrize(("old", "new"), [("0.0", "x"), ("mfu", "share"), ("step", "number"), (",0.5", "")])
def test_a_damaged_curve_is_named(old: str, new: str, tmp_path: Path) -> None:
    row = Row(
        step=1,
        tokens=48,
        loss=2.0,
        lr=1e-2,
        grad_norm=0.0,
        tokens_per_second=9.0,
        mfu=None,
        memory_gib=1.0,
        seconds=3.0,
        validation_loss=0.5,
    )
    write_curve(tmp_path, [row])
    assert read_curve(tmp_path) == [row]
    path = tmp_path / "curve.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(
        DamagedFileError, match=f"^{path} is damaged .*: delete the folder {tmp_path} and run the same command again$"
    ):
        read_curve(tmp_path)


def test_runs_of_a_chart_are_told_apart_whether_or_not_they_were_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(step=1, tokens=48, loss=3.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, mfu=None, memory_gib=0.0,
              seconds=1.0)  # fmt: skip
    curves = {
        f"__main__:L-{i:02}": [[row, replace(row, step=2, tokens=96, validation_loss=2.0 if i else None)]]
        for i in range(12)
    }
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, format, **_: figures.extend([self] * (format == "png")))
    plot_curves(curves, tmp_path / "chart.png")
    legend = figures[0].axes[0].get_legend()
    *names, validation, training = [text.get_text() for text in legend.get_texts()]
    assert names == list(curves)
    *lines, thick, thin = legend.get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12
    assert (validation, training) == ("validation", "training, mean of some steps")
    drawn_thin, drawn_thick = figures[0].axes[0].get_lines()[:2]
    for shown, drawn in ((thick, drawn_thick), (thin, drawn_thin)):
        assert (shown.get_linewidth(), shown.get_marker()) == (drawn.get_linewidth(), drawn.get_marker())


def test_seeds_of_a_model_look_alike_and_its_end_is_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(step=1, tokens=48, loss=3.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, mfu=None, memory_gib=0.0,
              seconds=1.0)  # fmt: skip
    seeds = [[replace(row, validation_loss=loss)] for loss in (2.0, 2.5)]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, format, **_: figures.extend([self] * (format == "png")))
    plot_curves({"rt": [*seeds, []], "mine:L": seeds[:1], "waiting": [[]]}, tmp_path / "chart.png")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["rt 2.250 (mean of 2)", "mine:L 2.000"]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()[:4]}) == 1
    assert axes.get_title() == "loss of 5 runs of 1 steps"


def test_training_losses_of_a_chart_are_means_over_steps_of_nearly_equal_numbers() -> None:
    losses = np.random.default_rng(0).random(1000) + 1
    rows = [
        Row(step=n, tokens=10 * n, loss=loss, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, mfu=None, memory_gib=0.0,
            seconds=1.0)
        for n, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    tokens, means = smoothed(rows)
    assert tokens[:5] == [10, 20, 30, 40, 50]
    assert means[:5] == losses[:5].tolist()
    assert len(tokens) == len(means) < 8 * 10
    assert min(means[-10:]) > 1.3
    assert max(means[-10:]) < 1.7
    steps = np.arange(1, 1001)
    last = np.rint(8 * np.log2(steps)) == np.rint(8 * np.log2(1000))
    assert means[-1] == pytest.approx(losses[last].mean())
    assert tokens[-1] == pytest.approx(10 * steps[last].mean())


def test_labels_of_runs_name_the_options_and_the_settings_in_which_they_differ() -> None:
    def run(mixer: str, options: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
        return describe_run(replace(PRESETS["tiny"], mixer=mixer, **config), options or {}, {})

    runs = {"a": run("rt"), "b": run("transformer"), "c": run("rt", {"block": 4, "persistent_norm": False})}
    assert labels_of(runs) == {"a": "rt", "b": "transformer", "c": "rt-block-4-no-persistent-norm"}
    runs |= {"d": run("rt", lr=0.003, out=Path("elsewhere"))}
    assert labels_of(runs)["d"] == "rt, lr 0.003"
    assert labels_of(runs)["c"] == "rt-block-4-no-persistent-norm, lr 0.01"

    # Runs of earlier versions may differ in a setting that is gone.
    former = run("rt")
    former["config"]["former"] = 2
    assert labels_of({"a": run("rt"), "former": former}) == {"a": "rt", "former": "rt, former 2"}
    assert labels_of({"a": run("rt"), "again": run("rt")}) == {"a": "a", "again": "again"}
