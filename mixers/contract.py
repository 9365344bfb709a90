"""Checks of the properties of a layer that the trainer relies on, with random inputs before the first step.

They find faults that make results wrong without an error: outputs that depend on later inputs or on other sequences,
steps that differ from the parallel form, parameters that are not trained, and tensors that differ from run to run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mixers.base import ContractError, Layer, log_once
from mixers.named import is_path
from mixers.ops.numerics import product_autocast, product_precision
from mixers.origin import origin, where
from mixers.parts import MixerLayer

POSITIONS = 32
SPIKED, TOGETHER = 2**14, 2**11
"""Largest numbers of positions in sequences of which one position is changed: of all together, and of one call."""
STEPS = 512
"""Number of positions that are also decoded one by one. This is checked only on a CPU, because decoding is float32."""
FIRST_STEPS = 8
"""Number of the first of these, in which differences have hardly grown."""
DISTURBANCE = 1e-5
"""Change of the inputs that shows how differences grow from position to position."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Change of an output that counts as rounding, relative to the largest output; ten times that for decoding."""
SHARED = (
    "depends on the seed, but all runs share one: draw it from a generator of its own, torch.Generator().manual_seed(0)"
)
"""What is wrong with a tensor that is no parameter and differs from run to run, and what to do."""
CLOSED = 1e-2
"""Numbers this small in a parameter hide faults in what they multiply, as in a gate or a map that starts at zero."""


def check_foreign(
    mixer: str, build: Callable[[], Layer], device: torch.device, positions: Callable[[], int], several: bool = True
) -> list[str]:
    """Check a layer from outside; ``tests/mixers/test_contract.py`` checks the registered ones.

    Args:
        mixer: name of the layer; a name with a colon is a layer from outside.
        build: builds the layer, with parameters from torch's global generator.
        device: device on which the layer is called.
        positions: returns the length of the sequences to train on.
        several: whether several runs are trained at once, which share all but parameters.

    Returns:
        Names of parameters that no gradient reaches, for ``warn_unused``; none for a registered layer.

    Raises:
        ContractError: as ``check_held`` and ``check_layer``.
    """
    if not is_path(mixer):
        return []
    layer, other = _built(build, seed=0), _built(build, seed=1)
    check_held(mixer, layer, other if several else layer)
    return check_layer(mixer, layer, device, positions())


def _built(build: Callable[[], Layer], seed: int) -> Layer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def check_held(mixer: str, layer: Layer, other: Layer) -> None:
    """Compare what two layers hold beside their parameters: all runs share it, and files of models lack it.

    Args:
        mixer: name of the layer in messages.
        layer: the layer.
        other: the same layer, built with another seed.

    Raises:
        ContractError: a module or a parameter is not registered, so that it is not trained; a buffer or another tensor
            depends on the seed.
    """
    of_other = dict(_unregistered(other))
    for name, held in _unregistered(layer):
        if isinstance(held, nn.Module) or held.requires_grad:
            kind = "Module" if isinstance(held, nn.Module) else "Parameter"
            raise ContractError(
                f"mixer {mixer!r}: {name} is not trained, because PyTorch does not know it: let self.name be a "
                f"torch.nn.{kind}, or a torch.nn.{kind}List or {kind}Dict in place of a list or dict"
            )
        if not _equal(held, of_other.get(name)):
            raise ContractError(f"mixer {mixer!r}: {name} {SHARED}, and keep it by self.register_buffer")

    buffers = dict(other.named_buffers())
    for name, buffer in layer.named_buffers():
        if not _equal(buffer, buffers.get(name)):
            raise ContractError(f"mixer {mixer!r}: buffer {name!r} {SHARED}, and leave no values unset")


def _unregistered(layer: Layer) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Return tensors and modules with parameters that plain attributes hold, by the names that code would give them."""
    known = {id(item) for item in (*layer.parameters(), *layer.buffers(), *layer.modules())}
    for module in layer.modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for name, item in _items(f"{type(module).__name__}.{attribute}", value):
                    if id(item) in known or (isinstance(item, Tensor) and not item.is_leaf):  # computed from others
                        continue
                    if isinstance(item, nn.Module) and not any(p.requires_grad for p in item.parameters()):
                        held = (*item.named_parameters(), *item.named_buffers())
                        yield from ((f"{name}.{inner}", tensor) for inner, tensor in held)
                    else:
                        yield name, item


def _items(name: str, value: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Return the tensors and modules in a value and in the lists, tuples and dicts that it consists of.

    Arrays of NumPy count as tensors.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield name, torch.tensor(value.astype(np.complex128))
    elif isinstance(value, Tensor | nn.Module):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _items(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _items(f"{name}[{index}]", item)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two tensors are equal, NaN counting as NaN; what is no tensor differs."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
        return False
    a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def warn_unused(mixer: str, names: Sequence[str]) -> None:
    """Warn of the parameters ``names`` that no gradient reaches, once the layer has passed all other checks."""
    if names:
        counted = "counts as a parameter" if len(names) == 1 else "count as parameters"
        log_once(f"mixer {mixer!r}: no gradient reaches {', '.join(names)}, which {counted} all the same")


@torch.no_grad()
def check_layer(mixer: str, layer: Layer, device: torch.device, positions: int = POSITIONS) -> list[str]:
    """Call a layer several times on two sequences, in the precision of training.

    The layer is checked as it is, then again with random values in place of those parameters that are close to zero, so
    it must not be used afterwards.

    Args:
        mixer: name of the layer in messages.
        layer: the layer, whose parameters may be overwritten.
        device: device on which it is called.
        positions: length of the sequences.

    Returns:
        Names of parameters that no gradient reaches.

    Raises:
        ContractError: outputs are not finite, have another shape or dtype than inputs, differ from call to call, or
            depend on later positions, on the number of positions or sequences, on other sequences, or on the module's
            mode; ``step`` gives other outputs, or a state that is not a dict of tensors; a parameter is frozen or not
            float32; the layer cannot be called, or writes into its inputs or buffers. Errors in the layer's own code
            are raised again with a note that names the mixer.
    """
    for name, parameter in layer.named_parameters():
        if parameter.dtype != torch.float32:
            raise ContractError(
                f"mixer {mixer!r}: parameter {name!r} is {parameter.dtype}, but parameters are torch.float32: "
                f"{_in_place_of(parameter)}"
            )
    if frozen := [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]:
        raise ContractError(
            f"mixer {mixer!r}: parameter {frozen[0]!r} does not require a gradient, but all parameters are trained: "
            "make it a buffer"
        )

    draw, layer = torch.Generator().manual_seed(0), layer.to(device)
    _check_outputs(mixer, layer, device, positions, draw, finite=True)
    unused = _unused(mixer, layer, torch.randn(1, positions, layer.shape.width, generator=draw).to(device))

    # Open the gates that start closed, and check again.
    closed = [p for p in layer.parameters() if (p.abs() < CLOSED).any()]
    for parameter in closed:
        parameter.copy_(_opened(parameter, draw))
    if closed:
        _check_outputs(mixer, layer, device, positions, draw)
    return unused


def _opened(parameter: Tensor, draw: torch.Generator) -> Tensor:
    """Return a parameter with random numbers in place of those near zero, which keep their signs, as rates need."""
    random = 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.device)
    random = torch.where(parameter == 0, random, random.abs() * parameter.sign())
    return torch.where(parameter.abs() < CLOSED, random, parameter)


def _in_place_of(parameter: Tensor) -> str:
    """Return what to do in place of a parameter that is not float32."""
    if parameter.is_complex():
        return "store real and imaginary part, and join them in forward by torch.view_as_complex"
    return "give it that dtype" if parameter.is_floating_point() else "make it a buffer"


class _Outputs(NamedTuple):
    """What a layer returned for the inputs x.

    Attributes:
        x_BTD: the inputs.
        z_BTD: their outputs.
        again_BTD: their outputs in a second call.
        evaluated_BTD: their outputs in evaluation mode.
        after: outputs (B, T, D) of inputs whose first sequence is another from a position on, by this position.
        ended: outputs (B, t, D) of the first t positions alone, by t, for lengths that the layer takes.
        alone_BTD: outputs of the first sequence alone.
        steps: outputs (B, D) of single steps, of up to ``STEPS`` positions; none if the layer has no step form.
        disturbed: outputs (B, T, D) of inputs that are a little larger, and as much smaller; none without steps.
        mixed: outputs (B, T, D) of the sequence mixers alone, whose dtype the residual sum hides.
    """

    x_BTD: Tensor
    z_BTD: Tensor
    again_BTD: Tensor
    evaluated_BTD: Tensor
    after: dict[int, Tensor]
    ended: dict[int, Tensor]
    alone_BTD: Tensor
    steps: list[Tensor]
    disturbed: list[Tensor]
    mixed: list[Tensor]


def _check_outputs(
    mixer: str, layer: Layer, device: torch.device, positions: int, draw: torch.Generator, finite: bool = False
) -> None:
    with product_autocast(device), _naming(mixer, "was called"):
        layer(torch.randn(2, positions, layer.shape.width, generator=draw).to(device))  # may fill a table in a buffer
    buffers = {name: (buffer, buffer.clone()) for name, buffer in layer.named_buffers()}
    outputs = _call(mixer, layer, device, positions, draw)
    _check_form(mixer, outputs)
    if finite:
        _check_finite(mixer, outputs)
    _check_equal_calls(mixer, outputs)
    for name, (buffer, before) in buffers.items():
        if not _equal(buffer, before):
            raise ContractError(
                f"mixer {mixer!r}: a call changes its buffer {name!r}, which all runs share: keep nothing from call to "
                "call"
            )
    _check_causal(mixer, outputs)
    _check_each_position(mixer, layer, outputs.x_BTD[0])
    _check_ends(mixer, outputs)
    _check_steps(mixer, outputs)


def _call(mixer: str, layer: Layer, device: torch.device, positions: int, draw: torch.Generator) -> _Outputs:
    """Call a layer with random inputs in the ways that the checks compare; step by step on a CPU alone."""
    x_BTD = torch.randn(2, positions, layer.shape.width, generator=draw).to(device)
    other_TD = torch.randn(positions, layer.shape.width, generator=draw).to(device)

    cuts, after = sorted({max(1, cut) for cut in (positions // 3, positions // 2, positions - 1)}), {}
    ended = {}
    with product_autocast(device), _naming(mixer, "was called"):
        z_BTD, again_BTD = layer(x_BTD), layer(x_BTD)
        evaluated_BTD = layer.eval()(x_BTD)
        layer.train()
        for cut in (0, *cuts):
            changed_BTD = x_BTD.clone()
            changed_BTD[0, cut:] = other_TD[cut:]
            after[cut] = layer(changed_BTD)
        alone_BTD = layer(x_BTD[:1].clone())
        steps = _steps(mixer, layer, x_BTD[:, :STEPS]) if device.type == "cpu" else []
        noise_BTD = torch.randn(x_BTD.shape, generator=draw).to(device)
        disturbed = [layer(x_BTD + change * noise_BTD) for change in (DISTURBANCE, -DISTURBANCE)] if steps else []
        inner = [part for part in layer.modules() if isinstance(part, MixerLayer)]
        mixed = [part.mix(part.mixer_norm(x_BTD)) for part in inner]

        for length in cuts:
            part_BTD = x_BTD[:, :length].clone()
            with suppress(Exception):  # a layer may take some lengths alone
                ended[length] = layer(part_BTD)
            if length in ended and _form(ended[length]) != _form(part_BTD):
                del ended[length]

    return _Outputs(x_BTD, z_BTD, again_BTD, evaluated_BTD, after, ended, alone_BTD, steps, disturbed, mixed)


def _differ(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
    """Return whether outputs differ by more than rounding, or are finite in ``a`` alone.

    ``times`` is a factor of the tolerance.
    """
    if a.numel() == 0:
        return False
    if a.isfinite().all() and not b.isfinite().all():
        return True
    tolerance = times * TOLERANCE[product_precision(a.device)]
    return bool((a - b).abs().max() > tolerance * a.abs().max())


def _check_form(mixer: str, outputs: _Outputs) -> None:
    if _form(outputs.z_BTD) != _form(outputs.x_BTD):
        raise ContractError(
            f"mixer {mixer!r}: forward must return one tensor of the shape of its inputs (batch, positions, width): "
            f"for {_form(outputs.x_BTD)} it returned {_form(outputs.z_BTD)}"
        )
    low = getattr(torch, product_precision(outputs.x_BTD.device))
    for function, y_BTD in (("forward", outputs.z_BTD), *(("the sequence mixer", y_BTD) for y_BTD in outputs.mixed)):
        if y_BTD.dtype not in (torch.float32, low):
            raise ContractError(
                f"mixer {mixer!r}: {function} must return float32 for float32, it returned {y_BTD.dtype}"
            )


def _check_finite(mixer: str, outputs: _Outputs) -> None:
    finite_T = outputs.z_BTD.isfinite().all(-1).all(0)
    if not finite_T.all():
        raise ContractError(
            f"mixer {mixer!r}: outputs are not finite for standard normal inputs, first at position "
            f"{int((~finite_T).nonzero()[0])} of {len(finite_T)}"
        )


def _check_equal_calls(mixer: str, outputs: _Outputs) -> None:
    """Refuse a layer whose calls differ from each other, or between training and evaluation mode."""
    if _differ(outputs.z_BTD, outputs.again_BTD):
        raise ContractError(
            f"mixer {mixer!r}: the same inputs give other outputs when it is called again: draw no random numbers, "
            "as dropout does, and keep nothing from call to call"
        )
    if outputs.z_BTD.isfinite().all() and _differ(outputs.z_BTD, outputs.evaluated_BTD):
        raise ContractError(
            f"mixer {mixer!r}: outputs differ between training and evaluation mode: let nothing depend on self.training"
        )


def _check_causal(mixer: str, outputs: _Outputs) -> None:
    """Refuse a layer whose outputs depend on later inputs, or on another sequence."""
    for cut, after_BTD in outputs.after.items():
        if _differ(outputs.z_BTD[0, :cut], after_BTD[0, :cut]):
            raise ContractError(
                f"mixer {mixer!r} is not causal: outputs at positions before {cut} change with the inputs from there on"
            )
        if _differ(outputs.z_BTD[1], after_BTD[1]):
            raise ContractError(f"mixer {mixer!r}: outputs of a sequence change with the inputs of another one")
    # Products of another size round otherwise, which grows from position to position in a chaotic layer.
    if _differ(outputs.z_BTD[:1, :FIRST_STEPS], outputs.alone_BTD[:, :FIRST_STEPS], times=10):
        raise ContractError(
            f"mixer {mixer!r}: outputs of a sequence change when the layer is called with it alone: let nothing depend "
            "on the number of sequences"
        )


def _check_each_position(mixer: str, layer: Layer, x_TD: Tensor) -> None:
    """Refuse a layer whose outputs before a position change with the input there alone, for as many positions as fit.

    The other input is a spike: zero but for one channel. It has the norm of the others, and a larger maximum, on which
    a scale of the whole sequence depends. All calls have the same shape, so that even chaotic layers round alike.
    """
    positions, width = x_TD.shape
    if positions == 1:
        return
    count = min(positions - 1, max(1, SPIKED // positions))
    chosen = torch.linspace(1, positions - 1, count).long().unique()
    together = min(len(chosen), max(2, TOGETHER // positions))

    with product_autocast(x_TD.device), _naming(mixer, "was called"):
        plain_BTD = layer(x_TD.repeat(together, 1, 1))
        for at in chosen.split(together):
            changed_BTD = x_TD.repeat(together, 1, 1)
            for changed_TD, position in zip(changed_BTD, at.tolist(), strict=False):
                changed_TD[position] = 0
                changed_TD[position, position % width] = width**0.5
            for z_TD, changed_TD, position in zip(plain_BTD, layer(changed_BTD), at.tolist(), strict=False):
                if _differ(z_TD[:position], changed_TD[:position]):
                    raise ContractError(
                        f"mixer {mixer!r} is not causal: outputs at positions before {position} change with the input "
                        "there"
                    )


def _check_ends(mixer: str, outputs: _Outputs) -> None:
    """Refuse a layer whose outputs depend on the number of positions, at the first positions if at any."""
    for length, ended_BTD in outputs.ended.items():
        shown = min(length, FIRST_STEPS)
        if _differ(outputs.z_BTD[:, :shown], ended_BTD[:, :shown], times=10):
            raise ContractError(
                f"mixer {mixer!r}: outputs of the first {length} positions change when the sequence ends there: let "
                "nothing depend on the number of positions, as a mean over all of them does"
            )


def _check_steps(mixer: str, outputs: _Outputs) -> None:
    """Refuse a layer whose single steps give other outputs than its forward pass.

    Rounding grows in a layer as other small differences do: fast in a chaotic one, by leaps in one that rounds numbers.
    """
    if not outputs.steps:
        return
    moved_2T = torch.stack([(y_BTD - outputs.z_BTD).abs().amax((0, 2)) for y_BTD in outputs.disturbed])
    first = min((moved for moved in moved_2T[:, :FIRST_STEPS].flatten().tolist() if moved > 0), default=math.inf)
    for t, step_BD in enumerate(outputs.steps):
        growth = max(1.0, float(moved_2T[:, : t + 1].max()) / first)
        if _differ(outputs.z_BTD[:, t], step_BD, times=10 * growth):
            raise ContractError(
                f"mixer {mixer!r}: step gives another output at position {t} than forward; a layer without a step form "
                "defines neither init_state nor step"
            )


@torch.enable_grad()
def _unused(mixer: str, layer: Layer, x_BTD: Tensor) -> list[str]:
    """Return the names of parameters that get no gradient from the outputs.

    Raises:
        ContractError: the outputs are others than without gradients.
    """
    names, parameters = [*dict(layer.named_parameters())], [*layer.parameters()]
    anchor = torch.zeros((), device=x_BTD.device, requires_grad=True)  # so that some output always needs a gradient

    with _naming(mixer, "was called, and its gradients computed"):
        with product_autocast(x_BTD.device):
            z_BTD = layer(x_BTD + anchor)
            with torch.no_grad():
                plain_BTD = layer(x_BTD)
        _, *gradients = torch.autograd.grad(z_BTD.sum() + anchor, [anchor, *parameters], allow_unused=True)

    if _differ(plain_BTD, z_BTD.detach(), times=10):
        raise ContractError(f"mixer {mixer!r}: outputs differ when gradients are computed: let nothing depend on that")
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


@contextmanager
def _naming(mixer: str, doing: str) -> Iterator[None]:
    """Add a note that names the mixer to errors of its code.

    Raises:
        ContractError: the error arose outside of that code, because of a wrong or missing result; one line.
    """
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        if "modified inplace" in str(error):
            raise ContractError(
                f"mixer {mixer!r}: {where(error)}it writes into its inputs, or into a view of them: make new tensors, "
                "x = x + 1 in place of x += 1"
            ) from error
        if is_path(mixer) and origin(error) is None and not isinstance(error, torch.OutOfMemoryError):
            said = " ".join(str(error).split())
            raise ContractError(f"mixer {mixer!r}: {type(error).__name__} while it {doing}: {said}") from error
        error.add_note(f"while mixer {mixer!r} {doing}")
        raise


def _steps(mixer: str, layer: Layer, x_BTD: Tensor) -> list[Tensor]:
    """Return the outputs (B, D) of ``step`` at each position; none for a layer without a step form.

    Raises:
        ContractError: A state is not a dict of tensors.
    """
    outputs, source = [], "init_state"
    try:
        state = layer.init_state(len(x_BTD))
        for x_BD in x_BTD.unbind(1):
            if not (isinstance(state, Mapping) and all(isinstance(y, Tensor) for y in state.values())):
                raise ContractError(
                    f"mixer {mixer!r}: a state is a dict of tensors by name, but {source} gave {_contents(state)}: "
                    "init_state(batch) returns the first one, each step the output and the next one"
                )
            z_BD, state = layer.step(x_BD, state)
            outputs.append(z_BD.clone())  # the next step may write into it
            source = "a step"
    except NotImplementedError:
        return []
    return outputs


def _contents(state: Any) -> str:
    """Return what a state is that is no dict of tensors: its type, or what is no tensor in a dict."""
    if not isinstance(state, Mapping):
        return type(state).__name__
    name, value = next((name, value) for name, value in state.items() if not isinstance(value, Tensor))
    return f"a dict with {type(value).__name__} under {name!r}"


def _form(y: Any) -> str:
    return f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
