"""Costs of one layer, or of a whole stack: parameters, state while decoding, and operations of a forward pass.

All three are counted. Parameters and state are counted in the tensors themselves; floating point operations (FLOPs)
are counted by PyTorch's ``FlopCounterMode`` on the CPU, where layers run in plain PyTorch. That counter sees matrix
products and convolutions as they are executed, masked entries included (the Transformer's attention counts as a full
square). A multiply-add is two operations, a complex one eight. All other operations count as zero: norms, softmax,
gates, elementwise recurrences, scans, Fourier transforms and triangular solves. Embedding and readout are not part of a
layer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixers.base import Layer, Shape, State, log_once, settled
from mixers.models import LanguageModel
from mixers.named import members_of
from mixers.registry import building
from mixers.stack import StackLayer

LENGTHS = (128, 1024)
"""Sequence lengths N for which the state is counted; operations are counted for the first one."""
Counted = TypeVar("Counted")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one layer, or of a whole stack, for one sequence; None if a figure cannot be counted on the CPU.

    Attributes:
        parameters: number of parameters.
        state_floats: by length N, the number of floats in the largest state up to N positions.
        flops_per_token: by length N, the operations of a forward pass over N positions, divided by N.
    """

    parameters: int
    state_floats: dict[int, int] | None
    flops_per_token: dict[int, int] | None

    def times(self, layers: int) -> "Costs":
        """Return the costs of several such layers."""
        by_length = (self.state_floats, self.flops_per_token)
        state, flops = (y and {length: layers * figure for length, figure in y.items()} for y in by_length)
        return Costs(parameters=layers * self.parameters, state_floats=state, flops_per_token=flops)


_counted: dict[tuple[type[Layer], str, Shape], Costs] = {}


def costs(layer_class: type[Layer], config: Any, shape: Shape, say: Callable[[str], None] = log_once) -> Costs:
    """Return the costs of one layer, or of a whole stack; each is counted once per process.

    Args:
        layer_class: class of the layer.
        config: its ``Config``.
        shape: widths and number of layers.
        say: takes a line for each figure that cannot be counted.

    Raises:
        ValueError: the layer cannot be built.
    """
    key = (layer_class, repr(config), shape)
    if key in _counted:
        return _counted[key]

    layer = build_frozen(layer_class, config, shape)
    flops = attempt(
        f"FLOPs over {LENGTHS[0]} positions",
        layer_class,
        lambda: {LENGTHS[0]: round(flops_at_first(layer) / LENGTHS[0])},
        say,
    )
    state = attempt("state", layer_class, lambda: count_state(layer, LENGTHS), say)
    _counted[key] = Costs(parameters=count_parameters(layer), state_floats=state, flops_per_token=flops)
    return _counted[key]


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_model(layer_class: type[Layer], config: Any, shape: Shape, vocab_size: int, mixer: str) -> int:
    """Count the parameters of a language model from those of small ones, without memory if the layer allows it.

    Args:
        layer_class: class of the layers.
        config: their ``Config``.
        shape: widths and number of layers.
        vocab_size: tokens of the vocabulary.
        mixer: name of the layer.

    Raises:
        ValueError: the layer cannot be built.
    """
    unit = len(members_of(mixer))

    def of_rounds(rounds: int) -> int:
        return count_parameters(LanguageModel(layer_class, config, replace(shape, layers=rounds * unit), vocab_size=1))

    try:
        with torch.device("meta"):
            one, two = of_rounds(1), of_rounds(2)
    except Exception:  # a user's layer may read values while it is built, which meta tensors do not have
        with torch.random.fork_rng(devices=[]), building(mixer):
            one, two = of_rounds(1), of_rounds(2)
    return one + (shape.layers // unit - 1) * (two - one) + 2 * (vocab_size - 1) * shape.width


def count_state(layer: Layer, lengths: Sequence[int]) -> dict[int, int]:
    """Count the floats in the largest state that ``step`` has returned up to N positions, for each N of ``lengths``."""
    after_each = [_state_after(part, max(lengths)) for part in _parts(layer)]

    # A state may be emptied, for example at the end of a segment. It needs room for its largest size.
    together = [sum(floats) for floats in zip(*after_each, strict=True)]
    return {length: max(together[: length + 1]) for length in lengths}


def _parts(layer: Layer) -> list[Layer]:
    """Return the layers of a stack, or a layer itself."""
    return [*layer.layers] if isinstance(layer, StackLayer) else [layer]


def _state_after(layer: Layer, longest: int) -> list[int]:
    """Return the floats in the state before the first position, and after each of ``longest`` positions.

    The shapes of a state determine the shapes of the next one (see ``mixers.base.State``), so steps whose result is
    known are not run. When the shapes of an earlier position occur again, the shapes after it repeat as well. A layer
    with a ``growth_period`` repeats its shapes except for a fixed gain per period.
    """
    x_BD, state = torch.zeros(1, layer.shape.width), layer.init_state(1)
    period = _own_growth_period(layer)
    counts: list[int] = []
    first_seen: dict[Any, int] = {}

    # Step until the shapes repeat those after ``start`` positions.
    with torch.no_grad():
        for now in range(longest + 1):
            if now:
                _, state = layer.step(x_BD, state)
            counts.append(_floats(state))
            shapes = frozenset((name, y.shape, y.dtype) for name, y in state.items())
            start = 0 if now == period else first_seen.setdefault(shapes, now)
            if start < now:
                break

    def after(length: int) -> int:
        if length <= now:
            return counts[length]
        periods, rest = divmod(length - start, now - start)
        return counts[start + rest] + periods * (counts[now] - counts[start])

    return [after(length) for length in range(longest + 1)]


def _floats(state: State) -> int:
    return sum(y.numel() * (2 if y.is_complex() else 1) for y in state.values())


def _own_growth_period(layer: Layer) -> int | None:
    """Return the layer's ``growth_period``, unless its class inherits it, because a subclass may have another state."""
    layer_class = type(layer)
    return layer_class.growth_period(layer.config) if "growth_period" in vars(layer_class) else None


def count_flops(layer: Layer, length: int) -> int:
    """Count the operations of a forward pass over one sequence, as far as ``FlopCounterMode`` sees them."""
    return operations(layer, torch.zeros(1, length, layer.shape.width))


def operations(module: nn.Module, inputs: Tensor) -> int:
    """Count the operations of a module's forward pass, as far as ``FlopCounterMode`` sees them."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which takes a second

    counter = FlopCounterMode(display=False)
    counter.flop_registry = {operation: _real(formula) for operation, formula in counter.flop_registry.items()}
    with _unfused(), counter:
        module(inputs)
    return counter.get_total_flops()


def _real(formula: Callable[..., int]) -> Callable[..., int]:
    """Return a formula of ``FlopCounterMode`` that counts a complex multiply-add as four real ones."""

    def counted(*inputs: Any, out_val: Any, **options: Any) -> int:
        is_complex = isinstance(out_val, Tensor) and out_val.is_complex()
        return (4 if is_complex else 1) * formula(*inputs, out_val=out_val, **options)

    return counted


def from_short(layer_class: type[Layer], config: Any, length: int, measure: Callable[[int], int]) -> int:
    """Return ``measure(length)``; for a layer with a ``loop_period``, compute it from three short lengths.

    The result is exact, because the measure is a quadratic polynomial in the number of iterations.
    """
    period = layer_class.loop_period(config) or length  # other layers take all positions in one iteration
    shorter = [length % period + rounds * period for rounds in (2, 3, 4)]
    if length <= shorter[-1]:
        return measure(length)
    return int(sum(_lagrange(length, n, shorter) * measure(n) for n in shorter))


def _lagrange(x: int, node: int, nodes: Sequence[int]) -> Fraction:
    """Return the weight of the value at ``node`` in the polynomial through all ``nodes``, at ``x``."""
    return math.prod((Fraction(x - other, node - other) for other in nodes if other != node), start=Fraction(1))


def flops_at_first(layer: Layer) -> int:
    """Count the operations of a forward pass over one sequence of the first of ``LENGTHS``."""
    parts = _parts(layer)
    return sum(from_short(type(part), part.config, LENGTHS[0], partial(count_flops, part)) for part in parts)


def build_frozen(layer_class: type[Layer], config: Any, shape: Shape) -> Layer:
    """Build a frozen layer for counting; the global random state is restored."""
    with torch.random.fork_rng(devices=[]):
        return settled(layer_class(layer_class.plain_config(config), shape)).requires_grad_(False)


def attempt(
    what: str, layer_class: type[Layer], figure: Callable[[], Counted], say: Callable[[str], None] = log_once
) -> Counted | None:
    """Return a figure; if the layer fails, for example because it needs a GPU, ``say`` the error and return None."""
    try:
        return figure()
    except Exception as error:  # a user's layer may raise anything, and can still be trained
        kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
        say(f"{what} of {layer_class.__name__} not counted: {kind}{error}")
        return None


@contextmanager
def _unfused() -> Iterator[None]:
    """Turn off attention, LSTM and recurrences for CPUs that hide their products from ``FlopCounterMode``."""
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        with sdpa_kernel(SDPBackend.MATH), patch("mixers.ops.native.recurrence.recurrence_library", lambda _: None):
            yield
    finally:
        mkldnn.enabled = before
