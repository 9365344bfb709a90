"""What PyTorch says of operations that cannot be computed for all runs at once, and what the project makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixers.base import ContractError, Shape
from mixers.models import LanguageModel
from mixers.transformer import Transformer
from mixers.vmap_errors import ADVICE, explaining_vmap


class Doubled(torch.autograd.Function):
    """A function without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


CALLS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "if": ("data-dependent control flow", lambda x: x if x.sum() > 0 else -x),
    "float": (".item()", lambda x: x * float(x[0, 0])),
    "range": (".item()", lambda x: x * len(range(int(x[0, 0])))),
    "tolist": ("data pointer", lambda x: x * x.tolist()[0][0]),
    "numpy": ("data pointer", lambda x: x * float(x.detach().numpy()[0, 0])),
    "nonzero": ("dynamic shape", lambda x: x + x.nonzero().sum()),
    "mask": ("dynamic shape", lambda x: x + x[x > 0].sum()),
    "dropout": ("random operation", lambda x: nn.functional.dropout(x, 0.5)),
    "add_": ("match the broadcast shape", lambda x: torch.zeros(x.shape).add_(x)),
    "index": ("is not possible because there exists", lambda x: torch.zeros(x.shape).index_put_((torch.tensor(0),), x)),
    "checkpoint": ("escaped from inside", lambda x: checkpoint(torch.sin, x, use_reentrant=False)),
    "function": ("setup_context", Doubled.apply),
}


def model() -> LanguageModel:
    return LanguageModel(Transformer, Transformer.Config(heads=2), Shape(width=16, mlp_width=32), 8)


def explained(call: Callable[[Tensor], Any], of: LanguageModel) -> str:
    with pytest.raises(ContractError) as caught, explaining_vmap(of):
        torch.func.vmap(call)(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_gets_its_advice_before_the_first_sentence_of_pytorch(name: str) -> None:
    part, call = CALLS[name]
    line = explained(call, model())
    assert line.startswith(f"mixer Transformer cannot be computed for all runs at once: {__file__}:")
    assert 0 < line.index(ADVICE[part]) < line.index("docs/own-layers.md (torch.func.vmap: ")
    assert not [word for word in ("please", "issue", "https:", "bug report", "\n", ". ") if word in line.lower()]


def test_each_advice_is_for_something_that_pytorch_says() -> None:
    of_other_versions = {"_NoopSaveInputs"}
    assert {part for part, _ in CALLS.values()} == {*ADVICE} - of_other_versions


def test_the_module_that_has_no_rule_is_named() -> None:
    whole = model()
    cells = nn.ModuleList([nn.GRU(4, 4), nn.GRUCell(4, 4)])
    assert "nn." not in explained(lambda x: cells[0](x)[0], whole).replace("torch.nn.", "")
    whole.cells = cells
    assert "vmap has no rule for nn.GRU (cells.0): write out its gates" in explained(lambda x: cells[0](x)[0], whole)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="Expected size"), explaining_vmap(model()):
        torch.func.vmap(lambda x: x @ x)(torch.randn(2, 3, 4))
