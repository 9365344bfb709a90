"""The parametrisation of the authors' code: layer norms by a plain loop, initial weights, warm-up, and trained runs."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.decoding import Decoder, has_static_cache
from mixers.models import LanguageModel
from runners.c4.__main__ import main
from runners.c4.config import Config
from runners.c4.export import export, load_model
from runners.c4.loop import Loop
from runners.c4.model import build, fold
from runners.c4.step import learning_rate
from tests.runners.c4.runs import ALONE, At, Interruption, configured, corpus_of, folder_of, interrupt, losses, run

VOCAB, HEADS, LENGTH = 30, 2, 9
SMALL = Config(mixer="rt", width=8, mlp_width=12, heads=HEADS, layers=3, parametrisation="authors")
ORIGINAL = "parametrizations.weight.original"


def trained_parameters(model: LanguageModel) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer sees, by the names that they have in the paper's parametrisation."""
    return {name.replace(ORIGINAL, "weight"): parameter for name, parameter in model.named_parameters()}


def norm(x: Tensor, gain: Tensor | None) -> Tensor:
    return x if gain is None else F.layer_norm(x, x.shape[-1:], weight=gain, eps=1e-6)


def attend(q_D: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the newest position with ALiBi."""
    outputs, size = [], len(q_D) // HEADS
    for h in range(HEADS):
        at = slice(h * size, (h + 1) * size)
        distances = torch.arange(len(pairs) - 1, -1, -1)
        logits = torch.stack([q_D[at] @ k[at] for k, _ in pairs]) / math.sqrt(size)
        weights = (logits - 2.0 ** (-8 * (h + 1) / HEADS) * distances).softmax(0)
        outputs.append(weights @ torch.stack([v[at] for _, v in pairs]))
    return torch.cat(outputs)


def plain_layer(p: dict[str, Any], x_TD: Tensor, recurrent: bool, persistent_norm: bool) -> Tensor:
    """A layer of the authors' code, position by position."""

    def pair(normed_D: Tensor) -> tuple[Tensor, Tensor]:
        return norm(p["k.weight"] @ normed_D, p.get("k_norm.gain")), p["v.weight"] @ normed_D

    known: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for x_D in x_TD:
        normed_D = norm(x_D, p["attention_norm.gain"])
        q_D = norm(p["q.weight"] @ normed_D, p.get("q_norm.gain"))
        temporary = pair(normed_D)
        u_D = x_D + p["out.weight"] @ attend(q_D, [*known, temporary])
        z_D = u_D + p["mlp.down.weight"] @ F.gelu(p["mlp.up.weight"] @ norm(u_D, p["mlp_norm.gain"]))
        of_z_D = norm(z_D, p["attention_norm.gain"]) if persistent_norm else z_D - z_D.mean()
        known.append(pair(of_z_D) if recurrent else temporary)
        outputs.append(z_D)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("transformer", {}),
        ("transformer", {"qk_norm": False}),
        ("rt", {}),
        ("rt", {"implementation": "tiled"}),
        ("rt", {"persistent_norm": False}),
    ],
)
def test_logits_and_gradients_are_those_of_a_plain_loop_with_layer_norms(mixer: str, options: dict[str, Any]) -> None:
    model = build(replace(SMALL, mixer=mixer), options, VOCAB).double()
    p = trained_parameters(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # rows and columns with means, gains of all sizes
        for parameter in p.values():
            parameter += 0.3 + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    tokens_T = torch.randint(VOCAB, (LENGTH,), generator=generator)
    logits_TV = model(tokens_T[None])[0]

    x_TD = p["embedding.weight"][tokens_T]
    for n in range(SMALL.layers):
        of_layer = {k.removeprefix(f"layers.{n}."): y for k, y in p.items() if k.startswith(f"layers.{n}.")}
        x_TD = plain_layer(of_layer, x_TD, mixer == "rt", options.get("persistent_norm", True))
    expected_TV = norm(x_TD, p["norm.gain"]) @ p["readout.weight"].mT

    torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-9, atol=1e-9)
    probe_TV = torch.randn(expected_TV.shape, generator=generator, dtype=torch.float64)
    found, expected = (torch.autograd.grad((y * probe_TV).sum(), list(p.values())) for y in (logits_TV, expected_TV))
    for name, ours, theirs in zip(p, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_the_initial_weights_have_the_authors_standard_deviations() -> None:
    config = replace(SMALL, width=64, mlp_width=256)
    p = trained_parameters(build(config, {}, 500))
    expected = {"embedding.weight": 64**-0.5, "readout.weight": 64**-0.5}
    for n in range(SMALL.layers):
        expected |= {f"layers.{n}.{name}.weight": 64**-0.5 for name in ("q", "k", "v", "mlp.up")}
        expected |= {f"layers.{n}.out.weight": (2 * 64 * (n + 1)) ** -0.5}
        expected |= {f"layers.{n}.mlp.down.weight": (2 * 256 * (n + 1)) ** -0.5}
    assert expected.keys() == {name for name, parameter in p.items() if parameter.ndim > 1}
    for name, std in expected.items():
        assert p[name].std().item() == pytest.approx(std, rel=0.05), name


def test_a_trained_step_adds_no_mean_to_the_stream() -> None:
    """Or the RMS norms would be no layer norms."""
    model = build(SMALL, {}, VOCAB)
    x_BTD = model.layers(model.embedding(torch.arange(VOCAB)[None]))
    assert x_BTD.std() > 0.1
    assert x_BTD.mean(-1).abs().max() < 1e-6


def test_the_learning_rate_rises_from_a_tenth_of_the_peak() -> None:
    config = Config(lr=1.0, steps=1000, parametrisation="authors")
    rates = [learning_rate(config, step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.1 + 0.9 / 400)
    assert rates[199] == pytest.approx(0.55)
    assert rates[399] == pytest.approx(1.0)
    of_paper = replace(config, parametrisation="paper")
    assert rates[400:] == [learning_rate(of_paper, step) for step in range(400, 1000)]


@pytest.mark.parametrize("mixer", ["gla", "sliding-attention", "staircase", "tests.mixers.strangers:Plain"])
def test_a_layer_that_the_authors_do_not_have_is_refused(mixer: str, ended: Callable[..., str]) -> None:
    said = f"error: --parametrisation authors is defined for rt and transformer, not for {mixer}: leave it out\n"
    assert ended(main, ["--mixer", mixer, "--parametrisation", "authors", "--dry-run"]) == said


@pytest.mark.parametrize("mixer", ["rt", "transformer"])
def test_a_folded_model_has_static_cache(mixer: str) -> None:
    """Before, its embedding and maps are modules of other classes, whose weights are computed at each use."""
    model = build(replace(SMALL, mixer=mixer), {}, VOCAB).double().requires_grad_(False)
    tokens_TB = torch.arange(2 * LENGTH).view(LENGTH, 2)
    expected_TBV = model(tokens_TB.mT).transpose(0, 1)

    assert not has_static_cache(model)
    fold(model)
    assert has_static_cache(model)
    decoder = Decoder(model, 2, LENGTH)
    found_TBV = torch.stack([decoder.step(tokens_B).clone() for tokens_B in tokens_TB])
    assert torch.allclose(found_TBV, expected_TBV, rtol=0, atol=1e-12)


def test_a_run_continues_and_its_model_and_export_are_what_was_trained(texts: Path, tmp_path: Path) -> None:
    whole = configured(texts, tmp_path / "whole", mixer="rt", parametrisation="authors", steps=4, evaluations=1)
    parts = replace(whole, out=tmp_path / "parts")
    run(whole)
    with pytest.raises(Interruption):
        run(parts, At(4, interrupt))
    run(parts)
    assert losses(parts) == losses(whole)

    # The model in training, and what is read back.
    loop = Loop(folder_of(whole), whole, {}, {}, corpus_of(whole), ALONE)
    export(folder_of(whole), tmp_path / "exported")
    tokens_BT = torch.arange(12)[None]
    expected_BTV = loop.stepper.model(tokens_BT)
    for place in (folder_of(whole), tmp_path / "exported"):
        model, _ = load_model(place)
        torch.testing.assert_close(model(tokens_BT), expected_BTV, rtol=1e-6, atol=1e-6)
        assert model.state_dict().keys() == build(replace(whole, parametrisation="paper"), {}, 1).state_dict().keys()
