"""The theorems hold, and the checks notice where something does not."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mixers.ops.attention import alibi_slopes, attention
from mixers.rt.naive import Weights, naive_recurrence
from runners.theory import path_lengths, simulation
from runners.theory.__main__ import main
from runners.theory.checks import Check, largest
from runners.theory.path_lengths import stirling_gradient, uniform_layer
from runners.theory.simulation import NormFree, check_simulation, run_layer, simulate

WIDTH, HEADS, LENGTH, SCALE = 12, 3, 9, 0.5


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size[-1] ** -0.5


def layer(hidden: int = 20) -> NormFree:
    sizes = [(WIDTH, WIDTH)] * 4 + [(hidden, WIDTH), (WIDTH, hidden)]
    return NormFree(*(draw(*size, seed=seed) for seed, size in enumerate(sizes)))


def test_the_command_checks_everything_and_leaves_json_and_a_figure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["--out", str(tmp_path), "--seed", "3"])
    text = capsys.readouterr().out
    assert "theorem 1" in text
    assert "theorem 2" in text
    assert "NO" not in text
    checks = json.loads((tmp_path / "theory" / "theory.json").read_text())
    assert all(check["holds"] and check["error"] <= min(check["bound"], 1e-10) for check in checks)
    assert (tmp_path / "theory" / "path-lengths.png").stat().st_size > 10_000


def test_what_does_not_hold_is_noticed_and_ends_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not change places, and a wrong formula."""
    blocks = simulation.blocks
    monkeypatch.setattr("runners.theory.__main__.plot_path_lengths", lambda *_: None)
    monkeypatch.setattr(simulation, "blocks", lambda width, layer: blocks(width, 0))
    monkeypatch.setattr(path_lengths, "stirling_gradient", lambda k, matrix: stirling_gradient(k + 1, matrix))
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["--out", str(tmp_path)])
    checks = json.loads((tmp_path / "theory" / "theory.json").read_text())
    found = {check["setting"] for check in checks if check["holds"]}
    assert found == {"L 1, N 1, H 1, d' 8", "L 1, N 64, H 1, d' 16", "sum and mean"}  # a single layer, and no gradient


@pytest.mark.parametrize("part", range(6))
def test_the_simulation_fails_if_any_weight_is_wrong(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weights: NormFree, heads: int, scale: float, index: int) -> NormFree:
        right = simulate(weights, heads, scale, index)
        return NormFree(*(1.01 * weight if i == part else weight for i, weight in enumerate(right)))

    monkeypatch.setattr(simulation, "simulate", wrong)
    assert any(check.error > 1e-5 for check in check_simulation(0))


def test_an_error_that_is_no_number_does_not_hold() -> None:
    check = Check(check="", setting="", error=largest([0.0, math.nan, 0.0]), bound=1.0)
    assert not check.holds
    assert check.to_dict()["error"] is None


def test_the_simulating_mlp_fits_into_the_usual_one() -> None:
    weights = simulate(layer(hidden=4 * WIDTH), HEADS, SCALE, 0)
    assert weights.q_DD.shape == (3 * WIDTH, 3 * WIDTH)
    assert weights.up_FD.shape[0] <= 4 * 3 * WIDTH


def test_the_transformer_is_that_of_the_mixers_without_norms() -> None:
    weights, slopes, x = layer(), alibi_slopes(HEADS).double(), draw(LENGTH, WIDTH, seed=9)
    y, scores = run_layer(x, weights, slopes, SCALE, recurrent=False)
    q, k, v = (torch.nn.functional.linear(x, w)[None] for w in weights[:3])
    a = attention(q, k, v, slopes)[0]
    u = x + SCALE * a @ weights.out_DD.T
    expected = u + SCALE * torch.nn.functional.gelu(u @ weights.up_FD.T) @ weights.down_DF.T
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert scores.shape == (HEADS, LENGTH, LENGTH)
    assert (scores.triu(1) == 0).all()


def test_the_recurrent_layer_is_that_of_the_mixers_where_both_have_no_norm() -> None:
    """The oracle has a norm before the MLP, so the MLP is off."""
    weights, slopes, x = layer(), alibi_slopes(HEADS).double(), draw(LENGTH, WIDTH, seed=9)
    weights = weights._replace(down_DF=torch.zeros_like(weights.down_DF))
    z, _ = run_layer(x, weights, slopes, SCALE, recurrent=True)
    inside = Weights(
        wo_DD=weights.out_DD,
        mlp_norm_D=torch.ones(WIDTH).double(),
        up_FD=weights.up_FD,
        down_DF=weights.down_DF,
        kv_norm_D=None,
        wk_DD=weights.k_DD,
        k_norm_D=None,
        wv_DD=weights.v_DD,
    )
    q, k, v = (torch.nn.functional.linear(x, w)[None] for w in weights[:3])
    expected = naive_recurrence(x[None], q, k, v, inside, slopes, SCALE)[0]
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)


def test_the_layer_of_theorem_2_is_the_equation_of_the_paper() -> None:
    v, x, alpha, outputs = draw(4, 4), draw(7, 4, seed=1), 0.7, []
    for k, x_D in enumerate(x, start=1):
        outputs.append(x_D + alpha / k * (v @ x_D + v @ sum(outputs, torch.zeros(4).double())))
    torch.testing.assert_close(uniform_layer(x[None], v, alpha)[0], torch.stack(outputs), rtol=1e-12, atol=1e-12)


def test_the_formula_in_closed_form_and_its_start() -> None:
    """(1/k!) z (z + 1) ... (z + k - 1), z = alpha V; at k = 1 the gradient is I + z, which the formula leaves out."""
    z = draw(3, 3)
    product = torch.eye(3).double()
    for m in range(7):
        product = product @ (z + m * torch.eye(3)) / (m + 1)
    torch.testing.assert_close(stirling_gradient(7, z), product, rtol=1e-12, atol=1e-14)
    jacobian = torch.autograd.functional.jacobian(lambda x: uniform_layer(x[None, None], z, 1.0)[0, 0], draw(3))
    torch.testing.assert_close(jacobian, torch.eye(3).double() + z, rtol=1e-12, atol=1e-12)


def test_a_seed_that_pytorch_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--seed", "-1", "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "--seed -1 must be 0 or more, and below 2**64" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
