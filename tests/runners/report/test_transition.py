"""The table of RT against the Transformer: what it says of made-up losses."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runners.c4.reference.cells import Run, read_cell, write_cell
from runners.c4.reference.experiments import AGAINST, EXPERIMENTS
from runners.c4.reference.order import RATES
from runners.report.pictures import Picture
from runners.report.pictures.models import (
    VARIANTS,
    WIDEST,
    _curves,
    gradient_picture,
    loss_picture,
    panels_of_families,
    panels_of_parametrisations,
    panels_of_variants,
)
from runners.report.transition import (
    HEADINGS,
    ROWS,
    Models,
    Transition,
    current_models,
    finished,
    table_of_runs,
)
from tests.runners.report.made_up import DIVERGED_RUN, LANGUAGE_MODEL, LANGUAGE_RUN

SIZE = {"layers": 6, "width": 640, "batch_size": 64, "seq_len": 512}


def write(
    folder: Path, name: str, losses: tuple[float, float], best: float = 3e-3, code: str = "", corpus: str = "a",
    layer: str = "rt", **config: Any,
) -> None:  # fmt: skip
    """Write a finished model whose seeds have these losses at the best of its learning rates."""
    rates = {3e-4, 1e-3, 3e-3, 1e-2, 3e-2}
    places = [(rate, 0, losses[0] if rate == best else 9.0) for rate in sorted(rates)]
    runs = [
        replace(
            LANGUAGE_RUN, code=code, lr=lr, seed=seed, validation_loss=loss, curve=[(1, 9.5, 9.0), (10, loss, loss)]
        )
        for lr, seed, loss in [*places, (best, 1, losses[1])]
    ]
    text = replace(LANGUAGE_MODEL.corpus, name=corpus)
    model = replace(LANGUAGE_MODEL, runs=runs, config={**SIZE, **config}, layer=layer, corpus=text)
    write_cell(folder / f"{name}.json", model)


def run(lr: float, loss: float | None, seed: int = 0) -> Run:
    if loss is None:
        return replace(DIVERGED_RUN, lr=lr, seed=seed)
    return replace(LANGUAGE_RUN, lr=lr, seed=seed, validation_loss=loss)


def rows(folder: Path) -> dict[str, list[str]]:
    heading, *lines = [line.split(" | ") for line in Transition(current_models(folder)).table()]
    assert tuple(heading) == HEADINGS
    assert {len(line) for line in lines} == {len(HEADINGS)}
    return {line[0]: line[2:] for line in lines}


def test_without_models_nothing_is_shown(tmp_path: Path) -> None:
    found = Transition(current_models(tmp_path))
    assert found.verdict() == "not shown"
    assert {tuple(cells) for cells in rows(tmp_path).values()} == {("not trained",) * 3}
    assert found.took() == "not known: no model is trained"


def test_an_order_holds_if_it_holds_for_every_seed(tmp_path: Path) -> None:
    write(tmp_path, "rt-6", (3.0, 3.02))
    write(tmp_path, "transformer-6", (3.1, 3.04))
    write(tmp_path, "transformer-12", (2.9, 2.92))
    claim = "6 RT layers have a lower loss than 6 Transformer layers"
    assert rows(tmp_path)[claim] == [
        "3.010 ± 0.010 (lr 0.003) against 3.070 ± 0.030 (lr 0.003)",
        "not trained",
        "paper's: yes",
    ]
    assert rows(tmp_path)[f"{claim.replace('6 Tr', '12 Tr')} of as many parameters"][2] == "paper's: no"
    assert rows(tmp_path)["the best learning rate of RT"] == ["0.003", "not trained", "paper's: yes"]
    assert Transition(current_models(tmp_path)).verdict() == "partly"
    assert Transition(current_models(tmp_path)).took() == "3.0 h of training on one H200 for 18 runs"

    # Both parametrisations; seeds that overlap.
    write(tmp_path, "rt-6-authors", (3.0, 3.2), best=1e-3)
    write(tmp_path, "transformer-6-authors", (3.1, 3.3))
    assert rows(tmp_path)[claim][2] == "paper's: yes; authors': within the seeds"
    assert rows(tmp_path)["the best learning rate of RT"][1:] == ["0.001", "paper's: yes; authors': no"]
    write(tmp_path, "rt-6-authors", (3.0, 3.05))
    assert rows(tmp_path)[claim][2] == "yes"


def test_depth_against_width(tmp_path: Path) -> None:
    write(tmp_path, "rt-3", (3.0, 3.0), layers=3, width=896)
    write(tmp_path, "transformer-6", (3.1, 3.1))
    cache = rows(tmp_path)["and keep less of each token while decoding"]
    assert cache == ["5,376 against 7,680 floats per token", "not trained", "paper's: yes"]
    assert Transition(current_models(tmp_path)).verdict() == "partly"


def test_arithmetic_and_even_losses_are_no_evidence(tmp_path: Path) -> None:
    """RT keeps less of each token by its shape alone; that is no measured claim."""
    write(tmp_path, "rt-6-batch-32", (3.0, 3.2))
    write(tmp_path, "transformer-6-batch-32", (3.1, 3.3))
    assert Transition(current_models(tmp_path)).verdict() == "not shown"
    write(tmp_path, "rt-3", (3.2, 3.2), layers=3, width=896)
    write(tmp_path, "transformer-6", (3.1, 3.1))
    assert Transition(current_models(tmp_path)).verdict() == "differs"


def test_the_paper_is_agreed_with_once_every_claim_is_checked(tmp_path: Path) -> None:
    losses = {"rt-6": 3.0, "rt-6-batch-32": 3.0, "rt-3": 3.0}
    names = {name for row in ROWS if row.claimed for name in row.models}
    for name in sorted(names - {"rt-3"}):
        best = 1e-3 if name == "rt-6-no-persistent-norm" else 3e-3
        write(tmp_path, name, (losses.get(name, 3.1),) * 2, best)
    assert Transition(current_models(tmp_path)).verdict() == "partly"
    write(tmp_path, "rt-3", (3.0, 3.0), layers=3)
    assert Transition(current_models(tmp_path)).verdict() == "agrees"


def test_a_stale_model_is_not_trained(tmp_path: Path) -> None:
    for name, loss in {"rt-6": 3.0, "transformer-6": 3.1, "transformer-12": 3.2}.items():
        write(tmp_path, name, (loss, loss), code="stale" if name == "transformer-12" else "")
    assert set(finished(current_models(tmp_path))) == {"rt-6", "transformer-6"}


def test_models_of_different_texts_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, "rt-6", (3.0, 3.0))
    write(tmp_path, "transformer-6", (3.1, 3.1), corpus="another")
    with pytest.raises(ValueError, match=r"rt-6.json and transformer-6.json are of different texts: move one"):
        finished(current_models(tmp_path))


def test_what_the_paper_does_not_claim_decides_nothing(tmp_path: Path) -> None:
    write(tmp_path, "rt-6-beta2-0.99", (3.0, 3.0))
    write(tmp_path, "transformer-6-beta2-0.99", (3.1, 3.1))
    assert rows(tmp_path)["RT has a lower loss with β2 = 0.99, too"][2] == "no claim"
    assert Transition(current_models(tmp_path)).verdict() == "not shown"


def test_a_model_that_is_not_finished_decides_nothing(tmp_path: Path) -> None:
    write_cell(tmp_path / "transformer-6.json", replace(LANGUAGE_MODEL, runs=[run(3e-3, 2.0)]))
    (tmp_path / ".transformer-6-a1b2c3d4.json").write_text("{")  # left by a killed process
    claim = "6 RT layers have a lower loss than 6 Transformer layers"
    assert rows(tmp_path)[claim] == ["not trained"] * 3
    assert Transition(current_models(tmp_path)).missing() == "Not finished yet. "

    write(tmp_path, "rt-6", (3.0, 3.0))
    assert rows(tmp_path)[claim] == ["not finished", "not trained", "not finished"]
    assert Transition(current_models(tmp_path)).missing() == ""


def test_losses_are_compared_at_rates_that_both_have(tmp_path: Path) -> None:
    assert Transition({}).at_equal_rates() == ""
    for name, losses in {"rt-6": {3e-3: 3.0, 1e-2: 2.9, 3e-2: None}, "transformer-12": {1e-2: 3.05, 3e-2: 2.8}}.items():
        runs = [run(lr, loss) for lr, loss in losses.items()]
        write_cell(tmp_path / f"{name}.json", replace(LANGUAGE_MODEL, runs=runs))
    assert Transition(current_models(tmp_path)).at_equal_rates() == (
        "At 30M parameters on another text, after 1.00k tokens and with seed 0, RT's loss minus that of the "
        "Transformer is: with 12 layers -0.150 (lr 0.01). Below zero, RT is ahead. Not finished. "
    )


@pytest.mark.parametrize(
    ("with_norm", "without", "verdict"),
    [
        ([run(3e-3, 2.8)], [run(1e-2, None)], "not shown"),  # no rate in common
        ([run(3e-3, 2.8), run(1e-2, 2.7)], [run(3e-3, 2.9), run(1e-2, 2.9)], "not shown"),
        ([run(3e-3, 2.8), run(1e-2, 2.7)], [run(3e-3, 2.6), run(1e-2, None)], "agrees"),
        ([run(1e-2, 2.7), run(1e-2, 2.7, seed=1)], [run(1e-2, 2.7), run(1e-2, None, seed=1)], "agrees"),
        ([run(1e-2, None), run(3e-2, 2.7)], [run(1e-2, 2.6), run(3e-2, None)], "differs"),
        ([run(1e-2, None)], [run(1e-2, None)], "not shown"),
    ],
)
def test_stability_is_compared_at_rates_that_both_have(
    with_norm: list[Run], without: list[Run], verdict: str, tmp_path: Path
) -> None:
    for name, runs in (("rt-6", with_norm), ("rt-6-no-persistent-norm", without)):
        write(tmp_path, name, (2.7, 2.7))
        cell = read_cell(tmp_path / f"{name}.json")
        assert cell is not None
        write_cell(tmp_path / f"{name}.json", replace(cell, runs=runs))
    assert Transition(current_models(tmp_path)).stability() == verdict


def test_stability_in_words(tmp_path: Path) -> None:
    assert (Transition({}).stability(), Transition({}).of_norm()) == ("not shown", "Not trained yet.")
    model = replace(LANGUAGE_MODEL, runs=[run(3e-3, 2.8), run(1e-2, None), run(3e-2, None)])
    assert Transition({"rt-6-no-persistent-norm": model}).of_norm() == (
        "RT without it converged at 0.003 and diverged at 0.01, 0.03 (paper's parametrisation)."
    )


def test_the_ablation_of_the_norm(tmp_path: Path) -> None:
    def answers() -> tuple[str, str]:
        found = Transition(current_models(tmp_path))
        return found.ablation(), found.of_ablation()

    assert answers() == ("not shown", "not finished yet.")
    write(tmp_path, "rt-6", (2.69, 2.71), best=1e-2)
    write(tmp_path, "rt-6-no-persistent-norm", (2.73, 2.72))
    losses = "2.700 ± 0.010 (lr 0.01) against 2.725 ± 0.005 (lr 0.003) (paper's parametrisation)"
    assert answers() == ("partly", f"{losses}.")  # the paper's best rate without the norm is 0.001
    write(tmp_path, "rt-6-no-persistent-norm", (2.73, 2.72), best=1e-3)
    assert answers()[0] == "agrees"

    write(tmp_path, "rt-6-authors", (2.69, 2.71))
    write(tmp_path, "rt-6-no-persistent-norm-authors", (2.68, 2.67), best=1e-3)
    of_authors = "2.700 ± 0.010 (lr 0.003) against 2.675 ± 0.005 (lr 0.001) (authors' parametrisation)"
    assert answers() == ("partly", f"{losses.replace('0.003', '0.001')}; {of_authors}.")


def test_a_model_whose_runs_all_diverged_is_no_unfinished_one(tmp_path: Path) -> None:
    write(tmp_path, "transformer-6", (3.0, 3.0))
    write_cell(tmp_path / "rt-6.json", replace(LANGUAGE_MODEL, runs=[run(lr, None) for lr in RATES]))
    claim = "6 RT layers have a lower loss than 6 Transformer layers"
    assert rows(tmp_path)[claim] == ["diverged", "not trained", "diverged"]


def test_the_table_of_runs_has_all_of_them(tmp_path: Path) -> None:
    assert table_of_runs({}) == [["model", "parameters", "second seed"]]
    write(tmp_path, "rt-6", (3.0, 3.1))
    write_cell(tmp_path / "transformer-6.json", replace(LANGUAGE_MODEL, runs=[run(3e-3, 2.0), run(1e-1, None)]))
    assert table_of_runs(current_models(tmp_path)) == [
        ["model", "parameters", "lr 0.0003", "lr 0.001", "lr 0.003", "lr 0.01", "lr 0.03", "lr 0.1", "second seed"],
        ["rt-6", "3.00M", "9.000", "9.000", "3.000*", "9.000", "9.000", "–", "3.100 (lr 0.003)"],
        ["transformer-6", "3.00M", "–", "–", "2.000", "–", "–", "diverged", "–"],
    ]


def drawn(picture: Callable[..., Picture], models: Models) -> Mapping[str, Mapping[str, str]]:
    return picture(panels_of_parametrisations(models), "name", "title").panels


def test_curves_are_those_of_the_best_rate(tmp_path: Path) -> None:
    assert drawn(loss_picture, {}) == {}
    write(tmp_path, "rt-6", (3.0, 3.1))
    write(tmp_path, "rt-6-authors", (3.2, 3.1))
    write(tmp_path, "transformer-6", (3.4, 3.3))
    models = finished(current_models(tmp_path))
    tokens_E, losses_SE = _curves(models["rt-6"])
    assert tokens_E.tolist() == [64 * 512, 640 * 512]
    assert losses_SE.tolist() == [[9.0, 3.0], [9.0, 3.1]]
    panels = drawn(loss_picture, models)
    assert list(panels) == ["paper's parametrisation"]  # the other one lacks the Transformer
    svg = panels["paper's parametrisation"]["both"]
    assert "rt-6 3.050, transformer-6 3.350" in svg
    assert "<title>rt-6: 3.050 at the end, -0.300 from transformer-6</title>" in svg
    assert "<title>transformer-6: 3.350 at the end</title>" in svg

    # A model that read less than the panel shows has no line.
    write(tmp_path, "transformer-12", (3.4, 3.3), batch_size=1)
    (panel,) = drawn(loss_picture, finished(current_models(tmp_path))).values()
    assert "rt-6 3.050, transformer-6 3.350" in panel["both"]
    assert "transformer-12" not in panel["both"]


def test_variants_are_drawn_beside_rt_and_the_transformer(tmp_path: Path) -> None:
    for name in ("rt-6", "transformer-6", "rt-6-authors"):
        write(tmp_path, name, (3.0, 3.1))
    assert panels_of_variants(finished(current_models(tmp_path))) == {}

    for name in ("rt-3", "rt-6-block-16", "rt-6-batch-32-authors", "transformer-6-beta2-0.99"):
        write(tmp_path, name, (3.2, 3.2))
    panels = panels_of_variants(finished(current_models(tmp_path)))
    assert {title: list(models) for title, models in panels.items()} == {
        "variants of the layer": ["rt-6", "rt-3", "rt-6-block-16", "transformer-6"],
        "variants of training": ["rt-6", "transformer-6-beta2-0.99", "transformer-6"],
        "variants of training, authors'": ["rt-6", "rt-6-batch-32"],
    }
    drawn = {row for rows in VARIANTS.values() for row in rows}
    assert drawn == {*EXPERIMENTS["variants"].rows}


def test_the_end_of_training_decides_the_range_of_differences(tmp_path: Path) -> None:
    for name, early, loss in (("rt-6", 30.0, 3.1), ("transformer-6", 9.0, 3.4)):
        write(tmp_path, name, (loss, loss))
        cell = read_cell(tmp_path / f"{name}.json")
        assert cell is not None
        runs = [replace(run, curve=[(1, 9.5, early), *run.curve[1:]]) for run in cell.converged]
        write_cell(tmp_path / f"{name}.json", replace(cell, runs=runs))
    (panel,) = drawn(loss_picture, finished(current_models(tmp_path))).values()
    ticks = [float(text.replace("−", "-")) for text in re.findall(r">\s*(−?\d+\.\d+)\s*</text>", panel["both"])]
    assert 0.3 < max(map(abs, ticks)) <= WIDEST * 0.3  # the difference is 21 at the start, and -0.3 at the end


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.claim)
def test_the_experiments_train_every_model_of_the_table(row: Any, tmp_path: Path) -> None:
    """With all their models, no row is left without an answer."""
    experiments = [experiment for experiment in EXPERIMENTS.values() if experiment.folder == AGAINST]
    for name in (name for experiment in experiments for name in experiment.rows):
        write(tmp_path, name, (3.0, 3.1))
    assert "not trained" not in rows(tmp_path)[row.claim]


def test_gradients_are_relative_to_those_at_the_position_itself(tmp_path: Path) -> None:
    assert drawn(gradient_picture, {}) == {}
    write(tmp_path, "rt-6", (3.0, 3.1))
    write(tmp_path, "transformer-6", (3.4, 3.3))
    cell = read_cell(tmp_path / "rt-6.json")
    assert cell is not None
    first = replace(cell.runs[0], gradient=[1.0] * 3, gradient_half_width=[0.1] * 3)  # not the best rate
    last = replace(cell.runs[-1], gradient=[4.0, 2.0, 0.5], gradient_half_width=[0.4, 3.0, 0.1])
    write_cell(tmp_path / "rt-6.json", replace(cell, runs=[first, *cell.runs[1:-1], last]))
    (panel,) = drawn(gradient_picture, finished(current_models(tmp_path))).values()
    assert "s parametrisation; at the largest distance rt-6 0.12" in panel["both"]
    assert "transformer-6" not in panel["both"]


def test_each_family_of_layers_has_a_panel_with_the_transformer_beside(tmp_path: Path) -> None:
    for layer, losses in {"gla": (3.3, 3.4), "retnet": (3.5, 3.5), "transformer": (3.1, 3.1)}.items():
        write(tmp_path, layer, losses)
    panels = panels_of_families(finished(current_models(tmp_path)))
    assert {title: list(models) for title, models in panels.items()} == {
        "attention": ["transformer"],
        "linear attention": ["retnet", "gla", "transformer"],
    }
    drawn = loss_picture(panels, "name", "title").panels["linear attention"]["both"]
    assert "retnet 3.500, gla 3.350, transformer 3.100" in drawn
    assert "<title>gla: 3.350 at the end, +0.250 from transformer</title>" in drawn

    # A layer of a user's own.
    write(tmp_path, "a.module.GatedMovingAverage", (3.2, 3.2), layer="a.module:GatedMovingAverage")
    write(tmp_path, "other.GatedMovingAverageTwo", (3.2, 3.2), layer="other:GatedMovingAverageTwo")
    panels = panels_of_families(finished(current_models(tmp_path)))
    assert list(panels["yours"]) == ["GatedMovingAver ★", "GatedMovingAver 2 ★", "transformer"]
