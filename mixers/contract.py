"""Checks of the properties of a layer that the trainer relies on, with random inputs before the first step.

They find faults that make results wrong without an error: outputs that depend on later inputs or on other sequences,
steps that differ from the parallel form, parameters that are not trained, and tensors that differ from run to run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mixers.adapt import AdaptedLayer
from mixers.base import ContractError, Layer, log_once, settled
from mixers.named import is_path
from mixers.ops.numerics import product_autocast, product_precision
from mixers.origin import advice_on_gpus, origin, where

POSITIONS = 32
SPIKED, TOGETHER = 2**14, 2**11
"""Largest numbers of positions in sequences of which one position is changed: of all together, and of one call."""
STEPS = 512
"""Number of positions that are also decoded one by one. This is checked only on a CPU, because decoding is float32."""
FIRST = 8
"""Number of positions from the first, in which rounding has hardly grown."""
FAR = 0.1
"""Relative difference of a step's output that no growth of rounding explains in a layer that can be decoded."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Change of an output that counts as rounding, relative to the largest output; ten times that for decoding."""
CLOSED = 1e-2
"""Numbers this small in a parameter hide faults in what they multiply, as in a gate or a map that starts at zero."""


def check_foreign(
    mixer: str, build: Callable[[], Layer], device: torch.device, positions: Callable[[], int], several: bool = True
) -> list[str]:
    """Check a layer from outside; ``tests/mixers/test_contract.py`` checks the registered ones.

    Args:
        mixer: name of the layer; a name with a colon is a layer from outside.
        build: builds the layer, with parameters from torch's global generator, which it leaves advanced.
        device: device on which the layer is called.
        positions: returns the length of the sequences to train on.
        several: whether several runs are trained at once, which share all but parameters.

    Returns:
        Names of parameters that no gradient reaches, for ``warn_unused``; none for a registered layer.

    Raises:
        ContractError: building the layer seeds the global generator; as ``check_seeded``, ``check_held`` and
            ``check_layer``.
    """
    if not is_path(mixer):
        return []
    (layer, next_of_layer), (same, _), (other, next_of_other) = (_built(build, seed) for seed in (0, 0, 1))
    check_seeded(mixer, layer, same)
    if equal(next_of_layer, next_of_other):
        raise ContractError(f"mixer {mixer!r}: it seeds PyTorch's generator itself: remove torch.manual_seed")

    # Constant parameters, and parts that all layers share, say nothing of the layer's own random numbers.
    of_other, shared = dict(other.named_parameters()), ("mlp.", "convolution.")
    own = {
        name: equal(parameter, of_other.get(name))
        for name, parameter in layer.named_parameters()
        if not name.removeprefix("layer.").startswith(shared) and (parameter != parameter.flatten()[:1]).any()
    }
    if own and all(own.values()):
        log_once(
            f"mixer {mixer!r}: no parameter depends on the seed, not even {min(own)}: if it is drawn at random, draw "
            "it without a seed or generator of its own, or intervals lack this variation"
        )

    check_held(mixer, layer, other if several else layer)
    unused = check_layer(mixer, layer, device, positions())

    # Ask about a layer within the layer; large inputs may be too much for it.
    if isinstance(same, AdaptedLayer) and same.config.whole_layer is None:
        x_BTD = torch.randn(1, positions(), same.shape.width, generator=torch.Generator().manual_seed(0))
        with suppress(Exception):
            if same.to(device).eval().seems_whole(x_BTD.to(device)):
                log_once(
                    f"mixer {mixer!r} looks like a whole layer, and gets a norm, residual branches and an MLP around "
                    "it: --mixer.whole-layer True uses it as it is, False keeps them without this line"
                )
    return unused


def _built(build: Callable[[], Layer], seed: int) -> tuple[Layer, Tensor]:
    """Return a layer built under a seed, and the random numbers that follow."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return settled(build()), torch.rand(4)


def check_seeded(mixer: str, layer: Layer, same: Layer) -> None:
    """Compare two layers that were built under one seed: a study must give the same results when it is trained again.

    Raises:
        ContractError: a parameter or a buffer differs.
    """
    tensors = {**dict(same.named_parameters()), **dict(same.named_buffers())}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if not equal(tensor, tensors.get(name)):
            raise ContractError(
                f"mixer {mixer!r}: {name!r} is another one when the layer is built again under the same seed: set all "
                "of its values, by PyTorch's random numbers if they are random, not NumPy's or Python's"
            )


def check_held(mixer: str, layer: Layer, other: Layer) -> None:
    """Compare what two layers hold beside parameters and buffers: all runs share it, and files of models lack it.

    Args:
        mixer: name of the layer in messages.
        layer: the layer.
        other: the same layer, built with another seed.

    Raises:
        ContractError: a module or a parameter is not registered, so that it is not trained; a tensor that is no
            buffer depends on the seed.
    """
    of_other = dict(_unregistered(other))
    for name, held in _unregistered(layer):
        if isinstance(held, nn.Module) or held.requires_grad:
            kind = "Module" if isinstance(held, nn.Module) else "Parameter"
            raise ContractError(
                f"mixer {mixer!r}: {name} is not trained, because PyTorch does not know it: let self.name be a "
                f"torch.nn.{kind}, or a torch.nn.{kind}List or {kind}Dict in place of a list or dict"
            )
        if not equal(held, of_other.get(name)):
            raise ContractError(
                f"mixer {mixer!r}: {name} depends on the seed, but all runs share it: keep it by self.register_buffer, "
                "of which each run has its own"
            )


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
    """Return the tensors, arrays and modules in a value and in the lists, tuples and dicts that it consists of."""
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


def equal(a: Any, b: Any) -> bool:
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
        ContractError: outputs or gradients are not finite, outputs have another shape or dtype than inputs, differ from
            call to call, or depend on later positions, on other sequences or their number, or on the module's mode;
            ``step`` gives other outputs, or a state that is not a dict of tensors; a parameter is not float32; the
            layer cannot be called, or writes into its inputs or buffers. Errors in the layer's own code are raised
            again with a note that names the mixer.
    """
    for name, parameter in layer.named_parameters():
        if parameter.dtype != torch.float32:
            raise ContractError(
                f"mixer {mixer!r}: parameter {name!r} is {parameter.dtype}, but parameters are torch.float32: "
                f"{_in_place_of(parameter)}"
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


def _check_outputs(
    mixer: str, layer: Layer, device: torch.device, positions: int, draw: torch.Generator, finite: bool = False
) -> None:
    """Call a layer with random inputs in several ways, and compare the outputs."""
    x_BTD = torch.randn(2, positions, layer.shape.width, generator=draw).to(device)
    other_BTD = torch.cat([torch.randn(1, positions, layer.shape.width, generator=draw).to(device), x_BTD[1:]])
    with product_autocast(device), _naming(mixer, "was called"):
        layer(x_BTD)  # may fill a table in a buffer
        buffers = {name: (buffer, buffer.clone()) for name, buffer in layer.named_buffers()}
        z_BTD, again_BTD, beside_BTD = layer(x_BTD), layer(x_BTD), layer(other_BTD)
        training = layer.training
        alone_BTD, evaluated_BTD = layer(x_BTD[:1].clone()), layer.eval()(x_BTD)
        layer.train(training)

    # Shape and dtype.
    low = getattr(torch, product_precision(device))
    if _form(z_BTD) != _form(x_BTD):
        raise ContractError(
            f"mixer {mixer!r}: forward must return one tensor of the shape of its inputs (batch, positions, width): "
            f"for {_form(x_BTD)} it returned {_form(z_BTD)}"
        )
    if z_BTD.dtype not in (torch.float32, low):
        raise ContractError(f"mixer {mixer!r}: forward must return float32 for float32, it returned {z_BTD.dtype}")
    finite_T = z_BTD.isfinite().all(-1).all(0)
    if finite and not finite_T.all():
        raise ContractError(
            f"mixer {mixer!r}: outputs are not finite for standard normal inputs, first at position "
            f"{int((~finite_T).nonzero()[0])} of {len(finite_T)}"
        )

    # Calls with the same inputs. A layer that draws random numbers in training alone is checked in evaluation mode.
    if differ(z_BTD, again_BTD):
        if training and not differ(_seeded(layer, x_BTD), _seeded(layer, x_BTD)):
            layer.eval()
            _check_outputs(mixer, layer, device, positions, draw, finite)
            return
        raise ContractError(
            f"mixer {mixer!r}: the same inputs give other outputs when it is called again: draw random numbers in "
            "training mode alone, as nn.Dropout does, and keep nothing from call to call"
        )
    if finite_T.all() and differ(z_BTD, evaluated_BTD):
        raise ContractError(
            f"mixer {mixer!r}: outputs differ between training and evaluation mode: let nothing depend on self.training"
        )
    if changed := [name for name, (buffer, before) in buffers.items() if not equal(buffer, before)]:
        raise ContractError(
            f"mixer {mixer!r}: a call changes its buffer {changed[0]!r}, which all runs share: keep nothing from call "
            "to call"
        )

    # Other sequences. Products of another size round otherwise, which grows along the sequence in a chaotic layer.
    if differ(z_BTD[1], beside_BTD[1]):
        raise ContractError(
            f"mixer {mixer!r}: outputs of a sequence change with the inputs of another one"
            + ("" if getattr(layer.config, "batch_first", True) else ": give --mixer.batch-first True")
        )
    if differ(z_BTD[:1, :FIRST], alone_BTD[:, :FIRST], times=10):
        raise ContractError(
            f"mixer {mixer!r}: outputs of a sequence change when the layer is called with it alone: let nothing depend "
            "on the number of sequences"
        )

    _check_causal(mixer, layer, x_BTD[0])
    if device.type == "cpu":
        _check_steps(mixer, layer, x_BTD[:, :STEPS], z_BTD)


def _seeded(layer: Layer, x_BTD: Tensor) -> Tensor:
    """Return outputs for which all random numbers are drawn from PyTorch's generator with seed 0."""
    devices = [x_BTD.device] if x_BTD.is_cuda else []
    with torch.random.fork_rng(devices), product_autocast(x_BTD.device):
        torch.manual_seed(0)
        return layer(x_BTD)


def differ(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
    """Return whether outputs differ by more than rounding, or are finite in ``a`` alone.

    ``times`` is a factor of the tolerance.
    """
    if a.isfinite().all() and not b.isfinite().all():
        return True
    tolerance = times * TOLERANCE[product_precision(a.device)]
    return bool((a - b).abs().max() > tolerance * a.abs().max())


def _check_causal(mixer: str, layer: Layer, x_TD: Tensor) -> None:
    """Refuse a layer whose outputs before a position change with the input there, for as many positions as fit.

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
                if differ(z_TD[:position], changed_TD[:position]):
                    raise ContractError(
                        f"mixer {mixer!r} is not causal: outputs at positions before {position} change with the input "
                        f"there{': it may need a mask (docs/your-layer.md)' * isinstance(layer, AdaptedLayer)}"
                    )


def _check_steps(mixer: str, layer: Layer, x_BTD: Tensor, z_BTD: Tensor) -> None:
    """Refuse a layer whose single steps give other outputs than its forward pass; decoding is float32."""
    state, source = None, "init_state"
    with _naming(mixer, "was called step by step"), suppress(NotImplementedError):
        state = layer.init_state(len(x_BTD))
        for t, x_BD in enumerate(x_BTD.unbind(1)):
            if not (isinstance(state, Mapping) and all(isinstance(y, Tensor) for y in state.values())):
                raise ContractError(
                    f"mixer {mixer!r}: a state is a dict of tensors by name, and {source} gave another one: "
                    "init_state(batch) returns the first, each step the output and the next"
                )
            z_BD, state = layer.step(x_BD, state)
            source = "a step"

            # Rounding grows in a chaotic layer, and leaps in one that rounds numbers.
            far = (z_BTD[:, t] - z_BD).norm() > FAR * z_BTD[:, t].norm()
            if far or (t < FIRST and differ(z_BTD[:, t], z_BD, times=10)) or not z_BD.isfinite().all():
                raise ContractError(
                    f"mixer {mixer!r}: step gives another output at position {t} than forward; a layer without a step "
                    "form defines neither init_state nor step"
                )


@torch.enable_grad()
def _unused(mixer: str, layer: Layer, x_BTD: Tensor) -> list[str]:
    """Return the names of parameters that get no gradient from the outputs.

    Raises:
        ContractError: the outputs are others than without gradients, or a gradient is not finite.
    """
    names, parameters = [*dict(layer.named_parameters())], [*layer.parameters()]
    anchor = torch.zeros((), device=x_BTD.device, requires_grad=True)  # so that some output always needs a gradient

    with _naming(mixer, "was called, and its gradients computed"):
        with product_autocast(x_BTD.device):
            z_BTD = layer(x_BTD + anchor)
            with torch.no_grad():
                plain_BTD = layer(x_BTD)
        _, *gradients = torch.autograd.grad(z_BTD.sum() + anchor, [anchor, *parameters], allow_unused=True)

    if differ(plain_BTD, z_BTD.detach(), times=10):
        raise ContractError(f"mixer {mixer!r}: outputs differ when gradients are computed: let nothing depend on that")
    found = dict(zip(names, gradients, strict=True))
    if bad := [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]:
        raise ContractError(f"mixer {mixer!r}: the gradient of {bad[0]!r} is not finite for standard normal inputs")
    return [name for name, gradient in found.items() if gradient is None]


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
        if is_path(mixer) and (advice := advice_on_gpus(error)):
            said = " ".join(str(error).split())
            raise ContractError(f"mixer {mixer!r}: {where(error)}{said}{advice}") from error
        if is_path(mixer) and origin(error) is None and not isinstance(error, torch.OutOfMemoryError):
            said = " ".join(str(error).split())
            if isinstance(error, TypeError) and "required positional" in said:
                said += "; a layer is called with its inputs alone: write one that adds the rest (docs/your-layer.md)"
            raise ContractError(f"mixer {mixer!r}: {type(error).__name__} while it {doing}: {said}") from error
        error.add_note(f"while mixer {mixer!r} {doing}")
        raise


def _form(y: Any) -> str:
    return f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
