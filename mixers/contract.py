"""What the trainer takes for granted of a layer, tried on random inputs before the first step.

It finds what makes results wrong without a word: outputs that know later inputs, or those of other sequences; steps
that differ from the whole; parameters that are not to be trained.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixers.base import ContractError, Layer, log_once
from mixers.ops.numerics import product_autocast, product_precision

POSITIONS = 32
STEPS = 8
"""Positions that are also tried one by one, on a CPU: decoding is in float32."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Share of the largest output by which rounding may change one; ten times that between steps and the whole."""
CLOSED = 1e-2
"""Parameters no larger hide what they multiply, as in a gate or an output projection that starts at zero."""


def check_foreign(mixer: str, build: Callable[[], Layer], device: torch.device, positions: Callable[[], int]) -> None:
    """``check_layer`` of a layer from outside; ``tests/mixers/test_contract.py`` asks more of the registered ones."""
    if ":" in mixer:
        check_layer(mixer, build(), device, positions())


@torch.no_grad()
def check_layer(mixer: str, layer: Layer, device: torch.device, positions: int = POSITIONS) -> None:
    """Call a layer several times on two sequences, in the precision of training.

    Once as it is, and once more with random values for parameters that are next to zero, so that it is of no further
    use. What is not finite is left to training. Parameters that get no gradient are a warning.

    Raises:
        ContractError: outputs have another shape than inputs, differ from call to call, or depend on later positions
            or on other sequences; ``step`` gives other outputs; a parameter is frozen. What goes wrong in the layer's
            own code names the mixer and is passed on.
    """
    if frozen := [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]:
        raise ContractError(
            f"mixer {mixer!r}: parameter {frozen[0]!r} does not require a gradient, but all parameters are trained: "
            "make it a buffer"
        )
    draw, layer = torch.Generator().manual_seed(0), layer.to(device)
    _check_outputs(mixer, layer, device, positions, draw)
    if unused := _unused(mixer, layer, torch.randn(1, positions, layer.shape.width, generator=draw).to(device)):
        log_once(f"mixer {mixer!r}: no gradient reaches {', '.join(unused)}, which count as parameters all the same")
    closed = [p for p in layer.parameters() if p.numel() and p.abs().max() < CLOSED]
    for parameter in closed:
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    if closed:
        _check_outputs(mixer, layer, device, positions, draw)


def _check_outputs(mixer: str, layer: Layer, device: torch.device, positions: int, draw: torch.Generator) -> None:
    x_BTD = torch.randn(2, positions, layer.shape.width, generator=draw).to(device)
    other_TD = torch.randn(positions, layer.shape.width, generator=draw).to(device)
    cuts = sorted({max(1, cut) for cut in (positions // 3, positions // 2, positions - 1)})
    after = []
    with product_autocast(device):
        try:
            z_BTD, again_BTD = layer(x_BTD), layer(x_BTD)
            for cut in cuts:
                changed_BTD = x_BTD.clone()
                changed_BTD[0, cut:] = other_TD[cut:]
                after.append(layer(changed_BTD))
            stepped = _steps(layer, x_BTD[:, :STEPS]) if device.type == "cpu" else []
        except Exception as error:
            error.add_note(f"while mixer {mixer!r} was called")
            raise
    if _form(z_BTD) != _form(x_BTD):
        raise ContractError(
            f"mixer {mixer!r}: forward must return one tensor of the shape of its inputs (batch, positions, width): "
            f"for {_form(x_BTD)} it returned {_form(z_BTD)}"
        )
    tolerance = TOLERANCE[product_precision(device)]

    def differ(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
        return a.numel() > 0 and bool((a - b).abs().max() > times * tolerance * a.abs().max())

    if differ(z_BTD, again_BTD):
        raise ContractError(
            f"mixer {mixer!r}: the same inputs give other outputs when it is called again: draw no random numbers and "
            "keep nothing from call to call"
        )
    for cut, after_BTD in zip(cuts, after, strict=True):
        if differ(z_BTD[0, :cut], after_BTD[0, :cut]):
            raise ContractError(
                f"mixer {mixer!r} is not causal: outputs at positions before {cut} change with the inputs from there on"
            )
        if differ(z_BTD[1], after_BTD[1]):
            raise ContractError(f"mixer {mixer!r}: outputs of a sequence change with the inputs of another one")
    for t, step_BD in enumerate(stepped):
        if differ(z_BTD[:, t], step_BD, times=10):
            raise ContractError(
                f"mixer {mixer!r}: step gives another output at position {t} than forward; a layer that has no such "
                "form raises NotImplementedError in init_state"
            )


@torch.enable_grad()
def _unused(mixer: str, layer: Layer, x_BTD: Tensor) -> list[str]:
    """Names of parameters that outputs do not depend on, as far as gradients know."""
    names, parameters = [*dict(layer.named_parameters())], [*layer.parameters()]
    anchor = torch.zeros((), device=x_BTD.device, requires_grad=True)
    try:
        with product_autocast(x_BTD.device):
            z_BTD = layer(x_BTD + anchor)
        _, *gradients = torch.autograd.grad(z_BTD.sum() + anchor, [anchor, *parameters], allow_unused=True)
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was called, and its gradients computed")
        raise
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def _steps(layer: Layer, x_BTD: Tensor) -> list[Tensor]:
    """Outputs (B, D) of ``step`` at each position; none of a layer that has no such form."""
    outputs = []
    try:
        state = layer.init_state(len(x_BTD))
        for x_BD in x_BTD.unbind(1):
            z_BD, state = layer.step(x_BD, state)
            outputs.append(z_BD.clone())  # which the next step may write into
    except NotImplementedError:
        return []
    return outputs


def _form(y: Any) -> str:
    return f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
