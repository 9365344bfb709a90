"""Compiled training steps: on a GPU every registered layer, and what happens if a layer cannot be compiled."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from mixers import MIXERS, find_mixer
from mixers.base import Shape, log_once
from mixers.models import LanguageModel
from mixers.named import members_of
from mixers.ops.method import Method
from mixers.ops.runs import over_runs
from runners.mad.training.compiled import compiled
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run

VOCABULARY = 16


def ensemble(mixer: str, device: torch.device) -> tuple[Ensemble, Tensor, Tensor]:
    """Runs of a layer, with inputs and targets; on a GPU as many as in a search."""
    count, batch, length = (10, 128, 24) if device.type == "cuda" else (2, 4, 20)
    layer, shape = find_mixer(mixer), Shape(width=64, mlp_width=128, layers=len(members_of(mixer)))
    build = partial(LanguageModel, layer, layer.Config(), shape, VOCABULARY)
    runs = [Run(lr=1e-3, weight_decay=0.1, seed=seed) for seed in range(count)]
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.randint(VOCABULARY, (count, batch, length), generator=generator).to(device) for _ in range(2)
    )
    return Ensemble(build, runs, Protocol().optimizer, 10, device), inputs, targets


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mixer", [*(name for name, layer in MIXERS.items() if layer.compile_step), "2*rt+gated-deltanet+transformer"]
)
def test_a_compiled_step_computes_what_the_plain_one_computes(mixer: str, caplog: pytest.LogCaptureFixture) -> None:
    """Losses and gradients, up to the rounding of bfloat16; and they repeat bitwise."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    members, inputs, targets = ensemble(mixer, torch.device("cuda"))

    loss_R, gradient_RP = members.gradient(members.params_RP, inputs, targets)
    members.compile(inputs, targets)
    assert "without TorchInductor" not in caplog.text
    got_R, got_RP = members.gradient(members.params_RP, inputs, targets)

    torch.testing.assert_close(got_R, loss_R, rtol=5e-3, atol=5e-3)
    assert (got_RP - gradient_RP).norm() <= 0.03 * gradient_RP.norm()

    for _ in range(2):
        again_R, again_RP = members.gradient(members.params_RP, inputs, targets)
        assert torch.equal(again_R, got_R)
        assert torch.equal(again_RP, got_RP)


def test_without_a_compiler_a_step_is_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: object, **settings: object) -> object:
        raise RuntimeError("no compiler\nand more lines")

    monkeypatch.setattr(compile_fx, "compile_fx", failing)
    log_once.cache_clear()
    members, inputs, targets = ensemble("gla", torch.device("cpu"))
    step = members.gradient
    with caplog.at_level(logging.WARNING):
        members.compile(inputs, targets)

    assert members.gradient == step
    (record,) = caplog.records
    assert record.message == (
        "mixer GatedLinearAttention is trained without TorchInductor, which failed: RuntimeError: no compiler"
    )


def test_the_record_of_a_step_computes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TorchInductor left out: losses, gradients, and parameters that are not those of the record."""
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **settings: graph)
    members, inputs, targets = ensemble("retnet+transformer", torch.device("cpu"))
    record = compiled(members.gradient, (members.params_RP, inputs, targets), "retnet")
    assert record is not members.gradient

    params_RP, tokens = members.params_RP + 0.01, inputs.flip(1)
    for got, want in zip(record(params_RP, tokens, targets), members.gradient(params_RP, tokens, targets), strict=True):
        torch.testing.assert_close(got, want)


def test_layers_of_kernels_alone_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **settings: pytest.fail("compiled"))
    for mixer in ("rt", "transformer"):
        members, inputs, targets = ensemble(mixer, torch.device("cpu"))
        step = members.gradient
        members.compile(inputs, targets)
        assert members.gradient == step


@pytest.mark.parametrize(("in_place", "casts"), [(False, 1), (True, 2)])
def test_repeats_are_merged_unless_tensors_change_in_place(
    in_place: bool, casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two casts of one tensor, between which it changes in place or not."""

    def step(params: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        w = params.clone()
        first = w.bfloat16()
        if in_place:
            w.add_(1)
        return first.float() + inputs, w.bfloat16().float() + targets

    graphs: list[Any] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **settings: graphs.append(graph) or graph)
    arguments = torch.randn(3), torch.randn(3), torch.randn(3)
    record = compiled(step, arguments, "twice")

    names = [str(node.target) + str(node.kwargs) for node in graphs[0].graph.nodes]
    assert sum("_to_copy" in name and "bfloat16" in name for name in names) == casts
    for got, want in zip(record(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


def test_an_equal_step_comes_from_the_cache_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled operations are told apart by what they return, and run those of their own step."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    arguments = torch.randn(2, 3), torch.randn(3), torch.randn(3)

    def compiled_step(factor: int, dtype: torch.dtype) -> Any:
        method = Method(lambda x: ((factor * x.to(dtype),), ()), lambda *_: [None])
        return compiled(lambda params, inputs, targets: (over_runs(method, params)[0], inputs), arguments, "scaled")

    cases = (2, torch.float32), (3, torch.float32), (3, torch.float64)
    steps = [compiled_step(*case) for case in cases]
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (1, 2)
    for step, (factor, dtype) in zip(steps, cases, strict=True):
        torch.testing.assert_close(step(*arguments)[0], factor * arguments[0].to(dtype))
