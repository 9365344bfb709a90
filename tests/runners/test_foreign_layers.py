"""What is refused of a layer before it is trained, and that no layer of the project would be."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mixers import MIXERS
from mixers.attention import Transformer
from mixers.base import Shape
from runners.contract import ContractError, check_layer
from runners.experiment import find_mixer

CPU = torch.device("cpu")
COMMAND = [
    *("--task", "in-context-recall", "--task.length", "16", "--task.train-examples", "64", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--steps", "3"),
]


class Faulty(Transformer):
    """A Transformer whose outputs ``fault`` changes."""

    fault: Callable[[Tensor], Any]

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = type(self).fault(super().forward(x_BTD))
        return result


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "later": (lambda z: z + z.roll(-1, 1), "is not causal"),
    "all positions": (lambda z: z + z.mean(1, keepdim=True), "is not causal"),
    "other sequences": (lambda z: z - z.mean(0), "of another one"),
    "random": (lambda z: F.dropout(z, 0.1), "other outputs when it is called again"),
    "one position less": (lambda z: z[:, :-1], "it returned (2, 31, 16)"),
    "narrower": (lambda z: z[..., :-1], "it returned (2, 32, 15)"),
    "two": (lambda z: (z, z), "it returned tuple"),
    "nothing": (lambda z: None, "it returned NoneType"),
}

UNCOUNTED = ("narrower", "two", "nothing")
"""Layers whose operations cannot be counted, for which a dry run has a question mark."""


def faulty(fault: Callable[[Tensor], Any]) -> type[Faulty]:
    return type("L", (Faulty,), {"fault": staticmethod(fault)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_layer_that_makes_results_wrong_is_refused_in_one_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault, message = FAULTS[name]
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=faulty(fault)))
    command = [*COMMAND, "--mixer", "transformer", "layers_of_others:L", "--mixer.heads", "2"]
    assert message in refused(*command)
    if name not in UNCOUNTED:
        assert message in refused(*command, "--dry-run")


def test_what_the_layer_raises_is_passed_on_with_its_name() -> None:
    layer = faulty(lambda z: z.no_such_thing)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        check_layer("faulty", layer, CPU)
    assert caught.value.__notes__ == ["while mixer 'faulty' was called"]


def test_outputs_that_are_not_finite_are_left_to_training() -> None:
    layer = faulty(lambda z: z * torch.nan)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    check_layer("faulty", layer, CPU)


@pytest.mark.parametrize("name", MIXERS)
def test_no_layer_of_the_project_would_be_refused(name: str) -> None:
    torch.manual_seed(0)
    check_layer(name, MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128)), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MIXERS)
def test_nor_would_it_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    check_layer(name, MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128)), torch.device("cuda"))


def test_the_layer_that_the_documentation_shows_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (tmp_path / "shown_layer.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    layer = find_mixer("shown_layer:RunningMean")
    check_layer("shown_layer:RunningMean", layer(layer.Config(), Shape(width=16, mlp_width=32)), CPU)


def test_small_leaks_are_found_and_rounding_is_allowed() -> None:
    def check(leak: float) -> None:
        layer = faulty(lambda z: z + leak * z.roll(-1, 1))(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
        check_layer("leaking", layer, CPU)

    check(2.0**-9)
    with pytest.raises(ContractError, match="not causal"):
        check(0.05)
