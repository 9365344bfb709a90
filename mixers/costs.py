"""What one layer costs: parameters, state carried while decoding, and floating point operations of a forward pass.

All three are counted, none is derived: parameters and state from the tensors that are there, operations (FLOPs) by
PyTorch's ``FlopCounterMode`` on the CPU, where layers run in plain PyTorch. That counter sees matrix products and
convolutions as they are executed, two operations for each multiplication with addition, masked ones included (the
Transformer's attention counts as a whole square). It sees nothing else: norms, softmax, gates, elementwise
recurrences, scans, Fourier transforms and triangular solves count nothing. Embedding and readout are no part of a
layer.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mixers.base import Layer, Shape, log_once
from mixers.feedback_transformer import FeedbackTransformer
from mixers.hyena import Hyena
from mixers.lstm import LSTM
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer

LENGTHS = (128, 1024)
"""Sequence lengths N at which the state is stated; the first is also that of the operations."""
FOOTNOTE = (
    f"one layer, one sequence; state in floats after {LENGTHS[0]} and {LENGTHS[1]} positions; FLOPs of a forward pass "
    f"over {LENGTHS[0]} positions, matrix products and convolutions only, masked ones too: elementwise recurrences "
    "count nothing"
)
HEADINGS = ("parameters", *(f"state\n{length}" for length in LENGTHS), "FLOPs\n/ token")
"""Headings of ``Costs.cells``."""
Figure = Literal["params", "state", "flops"]
Counted = TypeVar("Counted")
TOLERANCE = 0.02
WIDEST = 8
"""Widths beyond this multiple of the given one are not tried."""
GROWING: dict[type[Layer], Callable[[Any], int]] = {
    Transformer: lambda config: 1,
    FeedbackTransformer: lambda config: 1,
    Hyena: lambda config: 1,
    RecurrentTransformer: lambda config: config.block,
}
"""Layers that remember every position: after so many, the state has grown by as much as it will after as many more."""
LOOPING: dict[type[Layer], Callable[[Any], int]] = {
    LSTM: lambda config: 1,
    FeedbackTransformer: lambda config: 1,
    RecurrentTransformer: lambda config: config.block,
}
"""Layers that loop over positions, so many at a time: what their plain forward pass computes, and what it keeps for the
backward, is a quadratic polynomial in the number of rounds."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one layer, for one sequence; None is what could not be counted on the CPU.

    Attributes:
        parameters: number of parameters.
        state_floats: floats in the state after N positions, by N.
        flops_per_token: operations of a forward pass over N positions, divided by N, by N.
    """

    parameters: int
    state_floats: dict[int, int] | None
    flops_per_token: dict[int, int] | None

    def sentence(self) -> str:
        """The figures in words."""
        parameters, *state, flops = self.cells()
        floats = ", ".join(f"{n} floats after {length} positions" for n, length in zip(state, LENGTHS, strict=True))
        return f"{parameters} parameters; state {floats}; {flops} FLOPs a token at N = {LENGTHS[0]}"

    def cells(self, number: Callable[[int], str] = "{:,}".format) -> list[str]:
        """Parameters, state at each N, operations, as cells of a table; ? where unknown."""
        state, flops = self.state_floats or {}, self.flops_per_token or {}
        figures = (self.parameters, *map(state.get, LENGTHS), flops.get(LENGTHS[0]))
        return ["?" if figure is None else number(figure) for figure in figures]


def short(number: int) -> str:
    """Three digits and a unit: 197k, 1.05M."""
    rounded = float(f"{number:.3g}")
    power = max(0, math.floor(math.log10(rounded)) // 3) if rounded else 0
    return f"{rounded / 1000**power:#.3g}".rstrip(".") + "kMGTP"[power - 1] if power else str(number)


_counted: dict[tuple[type[Layer], str, Shape], Costs] = {}


def costs(layer_class: type[Layer], config: Any, shape: Shape) -> Costs:
    """Costs of one layer; each is counted once in a process.

    Raises:
        ValueError: the layer cannot be built.
    """
    key = (layer_class, repr(config), shape)
    if key not in _counted:
        layer = _build(layer_class, config, shape)
        flops = attempt("FLOPs", layer_class, lambda: {LENGTHS[0]: round(_flops_at_first(layer) / LENGTHS[0])})
        _counted[key] = Costs(
            parameters=count_parameters(layer),
            state_floats=attempt("state", layer_class, lambda: count_state(layer, LENGTHS)),
            flops_per_token=flops,
        )
    return _counted[key]


def count_parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_state(layer: Layer, lengths: Sequence[int]) -> dict[int, int]:
    """Floats in the tensors that ``step`` has returned as the state after N positions, for each N of ``lengths``.

    Shapes follow from shapes (see ``mixers.base.State``), so no step is taken that must repeat what is known: where
    they have been seen before, all that came after comes again. ``GROWING`` layers do so but for what they have gained.
    """
    x_BD, state = torch.zeros(1, layer.shape.width), layer.init_state(1)
    grows_after = GROWING[type(layer)](layer.config) if type(layer) in GROWING else None
    counts: list[int] = []
    first_seen: dict[Any, int] = {}
    with torch.no_grad():
        for now in range(max(lengths) + 1):
            if now:
                _, state = layer.step(x_BD, state)
            counts.append(sum(y.numel() * (2 if y.is_complex() else 1) for y in state.values()))
            shapes = frozenset((name, y.shape, y.dtype) for name, y in state.items())
            start = 0 if now == grows_after else first_seen.setdefault(shapes, now)
            if start < now:
                break

    def after(length: int) -> int:
        if length <= now:
            return counts[length]
        periods, rest = divmod(length - start, now - start)
        return counts[start + rest] + periods * (counts[now] - counts[start])

    return {length: after(length) for length in lengths}


def countable(config: Any) -> Any:
    """Settings of the same layer in plain PyTorch: kernels hide their products from ``FlopCounterMode``."""
    has_kernels = isinstance(config, RecurrentTransformer.Config)
    return replace(config, implementation="naive") if has_kernels else config


def count_flops(layer: Layer, length: int) -> int:
    """Operations of a forward pass over one sequence, as far as ``FlopCounterMode`` sees them."""
    return operations(layer, torch.zeros(1, length, layer.shape.width))


def operations(module: nn.Module, inputs: Tensor) -> int:
    """Operations of a module's forward pass, as far as ``FlopCounterMode`` sees them."""
    counter = FlopCounterMode(display=False)
    with _unfused(), counter:
        module(inputs)
    return counter.get_total_flops()


def from_short(layer_class: type[Layer], config: Any, length: int, measure: Callable[[int], int]) -> int:
    """``measure(length)``, which for a ``LOOPING`` layer follows, exactly, from the measures of three short lengths."""
    at_a_time = (positions(config) for kind, positions in LOOPING.items() if issubclass(layer_class, kind))
    step = next(at_a_time, length)  # others take all in one round
    shorter = [length % step + rounds * step for rounds in (2, 3, 4)]
    if length <= shorter[-1]:
        return measure(length)
    return int(sum(_lagrange(length, n, shorter) * measure(n) for n in shorter))


def _lagrange(x: int, node: int, nodes: Sequence[int]) -> Fraction:
    """Weight of the value at ``node`` in the polynomial through all ``nodes``, at ``x``."""
    return math.prod((Fraction(x - other, node - other) for other in nodes if other != node), start=Fraction(1))


def _flops_at_first(layer: Layer) -> int:
    return from_short(type(layer), layer.config, LENGTHS[0], partial(count_flops, layer))


FIGURES: dict[Figure, tuple[str, Callable[[Layer], int]]] = {
    "params": ("parameters", count_parameters),
    "state": (f"state floats at N = {LENGTHS[0]}", lambda layer: count_state(layer, LENGTHS[:1])[LENGTHS[0]]),
    "flops": (f"FLOPs at N = {LENGTHS[0]}", _flops_at_first),
}
"""What layers can be matched by: what it is called, and how it is counted."""


def count(figure: Figure, layer_class: type[Layer], config: Any, shape: Shape) -> int:
    """One figure of a layer.

    Raises:
        ValueError: the layer cannot be built.
    """
    return FIGURES[figure][1](_build(layer_class, config, shape))


def match(figure: Figure, target: int, layer_class: type[Layer], config: Any, shape: Shape) -> tuple[Shape, int]:
    """The shape at which a layer's figure is nearest to ``target``, and the figure there.

    Widths are multiples of the heads, if the layer has any, and also of 8 if such a width meets the target; the MLP
    keeps its ratio to the width.

    Raises:
        ValueError: the layer cannot be built, or no width within reach meets the target to 2%; the message then names
            the nearest, how far off it is, and what may come nearer.
    """

    def scaled(width: int) -> Shape:
        return replace(shape, width=width, mlp_width=max(1, round(width * shape.mlp_width / shape.width)))

    @cache
    def builds(width: int) -> bool:
        try:
            _build(layer_class, config, scaled(width))
        except (ValueError, TypeError, RuntimeError):
            return False
        return True

    @cache
    def figure_at(width: int) -> int:
        return count(figure, layer_class, config, scaled(width)) if builds(width) else 0

    def distance(width: int) -> float:
        return abs(figure_at(width) / target - 1)

    heads, widest = max(1, getattr(config, "heads", 1)), WIDEST * shape.width
    candidates: list[int] = []
    for unit in dict.fromkeys((math.lcm(8, heads), heads)):
        while unit <= widest and not all(builds(unit * (shape.width // unit + more)) for more in (1, 2)):
            unit *= 2
        candidates += filter(builds, _around(target, range(unit, widest + 1, unit), shape.width, figure_at))
        if candidates and distance(best := min(candidates, key=distance)) <= TOLERANCE:
            return scaled(best), figure_at(best)
    label = f"no width up to {widest} meets the Transformer's {target:,} {FIGURES[figure][0]} within {TOLERANCE:.0%}"
    if not candidates:
        _build(layer_class, config, shape)
        raise ValueError(f"{label}: no multiple of {heads} can be built")
    best = min(candidates, key=distance)
    nearest = f"the nearest, {best}, has {figure_at(best):,} ({figure_at(best) / target - 1:+.1%})"
    finer = max(map(figure_at, candidates)) > target  # or else even the widest has too little
    others = ["fewer heads"] * (heads > 1) + ["a larger width" if finer else "another figure"]
    raise ValueError(f"{label}: {nearest}; try {' or '.join(others)}")


def _around(target: int, widths: Sequence[int], start: int, figure_at: Callable[[int], int]) -> Sequence[int]:
    """The widths just below and above a target that grows with the width; few figures of large widths are counted."""
    low, high = 0, sum(width <= start for width in widths)
    while high < len(widths) and (high == 0 or figure_at(widths[high - 1]) < target):
        low, high = high, min(max(1, 2 * high), len(widths))
    if not widths or figure_at(widths[high - 1]) < target:
        return widths[-1:]
    above = bisect_left(widths, target, low, high, key=figure_at)
    return widths[max(0, above - 1) : above + 1]


def _build(layer_class: type[Layer], config: Any, shape: Shape) -> Layer:
    """A frozen layer to count in; the global generator of random numbers is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return layer_class(countable(config), shape).requires_grad_(False)


def attempt(what: str, layer_class: type[Layer], figure: Callable[[], Counted]) -> Counted | None:
    """A figure, or None for a layer that does not run on the CPU or has no step form."""
    try:
        return figure()
    except Exception as error:  # a user's layer may fail in any way, and can still be trained
        log_once(f"{what} of {layer_class.__name__} not counted: {type(error).__name__}: {error}")
        return None


@contextmanager
def _unfused() -> Iterator[None]:
    """No fused CPU attention and no fused CPU LSTM: their products are hidden from ``FlopCounterMode``."""
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mkldnn.enabled = before
