"""Hyena."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.convolution import gated_convolution
from mixers.ops.numerics import at_least_float32, no_autocast
from mixers.parts import MixerLayer, ShortConvolution, WideLinear, check_at_least, linear


class Hyena(MixerLayer):
    """Long convolutions and gates in turn: ``v <- h * (gate v)`` for each filter h, then ``y = gate v``.

    Gates and v are projections of the input after short convolutions. An order N has N gates and, as in the authors'
    code, N - 1 long filters (the first filter of definition 3.1 is the short one). Filters are functions of the
    distance between two positions, which distinguishes positions. State: all inputs of every long convolution, so it
    grows with the length, and a step at position t costs O(t).

    The parametrisation of the filters is our own, because the authors' filters depend on a maximal length N: their
    network reads the share t / N, by sinusoids of at most a few periods in N. Ours reads absolute distances
    (``ImplicitFilters``). The authors' model for associative recall (experiment/synthetics/associative_recall in
    https://github.com/HazyResearch/safari) also has order 2, a short convolution of 3 and a width of 64 in three sine
    layers. Its network reads 5 numbers (here 2 bands). Its sines start at frequency 10, because its inputs change
    slowly, and its window corresponds to a reach of 1.5 N. Both exclude the network of the filters from weight decay.

    Dimensions beside those of ``mixers.base``: I long filters.

    Differs from the reference:
        Poli et al. 2023, section 3, and https://github.com/HazyResearch/safari, src/models/sequence/hyena.py and
        long_conv_lm.py.

        - block: theirs has layer norms, an MLP with biases and the tanh approximation of GELU, and dropout; its
          projections have biases.
        - positions: the filters' network reads cosines and sines of absolute distances, of periods 4, 8, 16, ...;
          theirs reads the share t/N of a largest length N, and cosines and sines of 2π f t/N with f from 0 to F - 1, F
          = 16 for the Pile and F = 2 for associative recall. Theirs learns these inputs unless ``lr_pos_emb`` is 0.
        - computation: the slowest window decays to 1/100 at distance 1024 (``reach``), the fastest at a fifth of it;
          theirs at 1.5 N and 0.3 N. The sines' frequency starts at 1, the default of their layer; theirs starts at 14
          for the Pile and 10 for associative recall, here the option ``frequency``.
        - initialisation: theirs is normal with standard deviation 0.02 for all linear maps, the filters' network
          included, and 0.02/√(2L) for the output map; here the filters' network has PyTorch's default. Theirs has
          PyTorch's default for the short convolution and its bias (uniform in ±1/√W, W = 3); here it is normal with
          1/√W and its bias zero.
        - training: theirs has a learning rate of its own for the filters (``lr``); weight decay leaves them out, as in
          theirs.
    """

    family: ClassVar[str] = "convolution"
    paper: ClassVar[str] = "Poli et al. 2023, arXiv:2302.10866"
    undecayed: ClassVar[tuple[str, ...]] = ("filters.",)

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of Hyena.

        Attributes:
            order: number of gates, at least 2; there is one long filter fewer.
            convolution: positions that the short convolution spans.
            filter_width: hidden width of the network that computes the filters.
            bands: number of frequencies that encode a distance, with periods 4, 8, 16, ...
            reach: distance at which the slowest channel of a filter has decayed to 1/100; the fastest takes a fifth.
            frequency: factor of the sines' arguments at the start of training; greater than 0.
        """

        order: int = 2
        convolution: int = 3
        filter_width: int = 64
        bands: int = 8
        reach: int = 1024
        frequency: float = 1.0

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(2, config, "order")

        width, filters = shape.width, config.order - 1
        self.project, self.out = linear(width, (config.order + 1) * width), linear(width, width)
        self.convolution = ShortConvolution((config.order + 1) * width, config.convolution, bias=True)
        self.filters = ImplicitFilters(config, width, filters)
        self.skip = nn.Parameter(torch.randn(filters * width))

    def mix(self, x_BTD: Tensor) -> Tensor:
        v_BTD, *gates, last_BTD = self._split(self.convolution(self.project(x_BTD)))

        for gate_BTD, h_TD, skip_D in zip(gates, self.filters(x_BTD.shape[1]), self._skips(), strict=True):
            v_BTD = gated_convolution(v_BTD, gate_BTD, h_TD, skip_D)

        return self.out(last_BTD * v_BTD)

    def init_state(self, batch: int) -> State:
        weight, filters = self.out.weight, self.config.order - 1
        past_BTID = weight.new_zeros(batch, 0, filters, self.shape.width)
        return {"convolution": self.convolution.init_state(batch), "past": past_BTID}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y, newest_BWC = self.convolution.step(self.project(x_BD), state["convolution"])
        v_BD, *gates, last_BD = self._split(at_least_float32(y))

        # Apply each filter to the stored inputs and the newest one.
        filters, inputs = self.filters(state["past"].shape[1] + 1), []
        for i, (gate_BD, h_TD, skip_D) in enumerate(zip(gates, filters, self._skips(), strict=True)):
            v_BD = gate_BD * v_BD
            inputs.append(v_BD)
            past_BD = (state["past"][:, :, i] * h_TD[1:].flip(0)).sum(1)
            v_BD = past_BD + (h_TD[0] + skip_D) * v_BD

        past_BTID = torch.cat([state["past"], torch.stack(inputs, dim=1)[:, None]], dim=1)
        return self.out(last_BD * v_BD), {"convolution": newest_BWC, "past": past_BTID}

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1

    def _split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return v, the gates of the filters, and the last gate."""
        return y.chunk(self.config.order + 1, dim=-1)

    def _skips(self) -> tuple[Tensor, ...]:
        """Return for each filter the weights (D,) of the inputs that bypass it."""
        return self.skip.chunk(self.config.order - 1)


class ImplicitFilters(nn.Module):
    """Filters of any length: a network with sine activations over distances, times exponentially decaying windows.

    The network reads absolute distances, not shares of a length, so a filter's values do not depend on its length.
    """

    def __init__(self, config: Hyena.Config, width: int, filters: int) -> None:
        super().__init__()
        check_at_least(1, config, "filter_width", "bands", "reach")
        if not config.frequency > 0:
            raise ValueError(f"frequency: {config.frequency} must be greater than 0")

        self.config, self.width, self.filters = config, width, filters
        hidden = config.filter_width
        sizes = [2 * config.bands, hidden, hidden, hidden]
        self.layers = nn.ModuleList(WideLinear(a, b) for a, b in pairwise(sizes))
        self.out = WideLinear(hidden, filters * width, bias=False)
        self.frequency = nn.Parameter(config.frequency * torch.ones(hidden))

    def forward(self, length: int) -> tuple[Tensor, ...]:
        """Return the filters, each (T, D), at distances 0 to T - 1, in at least float32."""
        with no_autocast(self.frequency.device):
            frequency = at_least_float32(self.frequency)
            device, dtype = frequency.device, frequency.dtype

            # Code of the distances.
            position_T1 = torch.arange(length, device=device, dtype=dtype)[:, None]
            periods = torch.exp2(torch.arange(2, 2 + self.config.bands, device=device, dtype=dtype))
            phase = 2 * torch.pi * (position_T1 / periods).frac()
            y = torch.cat([phase.cos(), phase.sin()], dim=-1)

            # Network.
            for layer in self.layers:
                y = torch.sin(frequency * layer(y))

            # Window.
            rate_D = math.log(100) / self.config.reach * torch.linspace(1, 5, self.width, device=device, dtype=dtype)
            h_TID = self.out(y).unflatten(-1, (self.filters, self.width))
            return (h_TID * torch.exp(-position_T1 * rate_D)[:, None]).unbind(1)
