"""What the trainer takes for granted of a layer, tried on random inputs before the first step.

It finds what makes results wrong without a word: outputs that know later inputs, or those of other sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Layer
from runners.environment import product_autocast

POSITIONS = 32
TOLERANCE = 1e-2
"""Share of the largest output by which rounding, in bfloat16 where that is trained in, may change one."""


class ContractError(ValueError):
    """A layer does not do what ``mixers.base.Layer`` asks of it."""


def check_foreign(mixer: str, build: Callable[[], Layer], device: torch.device) -> None:
    """``check_layer`` of a layer from outside; ``tests/mixers/test_contract.py`` asks more of the registered ones."""
    if mixer not in MIXERS:
        check_layer(mixer, build(), device)


@torch.no_grad()
def check_layer(mixer: str, layer: Layer, device: torch.device) -> None:
    """Call a layer three times on two sequences, in the precision of training.

    Raises:
        ContractError: outputs have another shape than inputs, differ from call to call, or depend on later positions
            or on other sequences. What goes wrong in the layer's own code names the mixer and is passed on.
    """
    draw = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, POSITIONS, layer.shape.width, generator=draw).to(device)
    later = POSITIONS // 2
    changed_BTD = x_BTD.clone()
    changed_BTD[0, later:] = torch.randn(POSITIONS - later, layer.shape.width, generator=draw).to(device)
    layer = layer.to(device)
    try:
        with product_autocast(device):
            z_BTD, again_BTD, after_BTD = layer(x_BTD), layer(x_BTD), layer(changed_BTD)
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was called")
        raise
    if _form(z_BTD) != _form(x_BTD):
        raise ContractError(
            f"mixer {mixer!r}: forward must return one tensor of the shape of its inputs (batch, positions, width): "
            f"for {_form(x_BTD)} it returned {_form(z_BTD)}"
        )
    allowed = TOLERANCE * z_BTD.abs().max()

    def differ(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() > allowed)

    if differ(z_BTD, again_BTD):
        raise ContractError(
            f"mixer {mixer!r}: the same inputs give other outputs when it is called again: draw no random numbers and "
            "keep nothing from call to call"
        )
    if differ(z_BTD[0, :later], after_BTD[0, :later]):
        raise ContractError(
            f"mixer {mixer!r} is not causal: outputs at positions before {later} change with the inputs from there on"
        )
    if differ(z_BTD[1], after_BTD[1]):
        raise ContractError(f"mixer {mixer!r}: outputs of a sequence change with the inputs of another one")


def _form(y: Any) -> str:
    return f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
