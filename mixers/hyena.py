"""Hyena."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, ShortConvolution, linear

DIRECT = 64
"""Sequences up to this length are convolved by a matrix product, which is causal to the last bit; longer by the FFT."""


class Hyena(MixerLayer):
    """Long convolutions and gates in turn: ``v <- h * (gate v)`` for each filter h, then ``y = gate v``.

    Gates and v are projections of the input after short convolutions. An order N has N gates and, as in the authors'
    code, N - 1 long filters (the first filter of definition 3.1 is the short one). Filters are functions of the
    distance of two positions, which is what tells positions apart. State: it grows with the length, as the inputs of
    every long convolution are kept and summed up explicitly, and a step at position t costs O(t).
    """

    family: ClassVar[str] = "convolution"
    paper: ClassVar[str] = "Poli et al. 2023, arXiv:2302.10866"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of Hyena.

        Attributes:
            order: number of gates, at least 2; there is one long filter fewer.
            convolution: positions that the short convolution spans.
            filter_width: hidden width of the network that makes the filters.
            bands: number of frequencies by which that network knows a distance, of periods 4, 8, 16, ...
            reach: distance at which the slowest channel of a filter has decayed to 1/100; the fastest takes a fifth.
        """

        order: int = 2
        convolution: int = 3
        filter_width: int = 64
        bands: int = 8
        reach: int = 1024

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        if config.order < 2:
            raise ValueError(f"order: {config.order} must be at least 2")
        width, filters = shape.width, config.order - 1
        self.project, self.out = linear(width, (config.order + 1) * width), linear(width, width)
        self.convolution = ShortConvolution((config.order + 1) * width, config.convolution, bias=True)
        self.filters = ImplicitFilters(config, width, filters)
        self.skip = nn.Parameter(torch.randn(filters * width))

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1

    def mix(self, x_BTD: Tensor) -> Tensor:
        v_BTD, *gates, last_BTD = self._split(self.convolution(self.project(x_BTD)))
        for gate_BTD, h_TD, skip_D in zip(gates, self.filters(x_BTD.shape[1]), self._skips(), strict=True):
            v_BTD = gate_BTD * v_BTD
            v_BTD = long_convolution(v_BTD, h_TD) + skip_D * v_BTD
        return self.out(last_BTD * v_BTD)

    def init_state(self, batch: int) -> State:
        weight, filters = self.out.weight, self.config.order - 1
        past_BTID = weight.new_zeros(batch, 0, filters, self.shape.width)
        return {"convolution": self.convolution.init_state(batch), "past": past_BTID}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y, newest_BWC = self.convolution.step(self.project(x_BD), state["convolution"])
        v_BD, *gates, last_BD = self._split(y)
        filters, inputs = self.filters(state["past"].shape[1] + 1), []
        for i, (gate_BD, h_TD, skip_D) in enumerate(zip(gates, filters, self._skips(), strict=True)):
            v_BD = gate_BD * v_BD
            inputs.append(v_BD)
            past_BD = (state["past"][:, :, i] * h_TD[1:].flip(0)).sum(1)
            v_BD = past_BD + (h_TD[0] + skip_D) * v_BD
        past_BTID = torch.cat([state["past"], torch.stack(inputs, dim=1)[:, None]], dim=1)
        return self.out(last_BD * v_BD), {"convolution": newest_BWC, "past": past_BTID}

    def _split(self, y: Tensor) -> tuple[Tensor, ...]:
        return at_least_float32(y).chunk(self.config.order + 1, dim=-1)

    def _skips(self) -> tuple[Tensor, ...]:
        return self.skip.chunk(self.config.order - 1)


class ImplicitFilters(nn.Module):
    """Filters of any length as a network with sine activations over distances, in an exponentially decaying window.

    Distances are known absolutely, not relative to a length, so a filter does not depend on how far it is evaluated.
    """

    def __init__(self, config: Hyena.Config, width: int, filters: int) -> None:
        super().__init__()
        for name in ("filter_width", "bands", "reach"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name}: {getattr(config, name)} must be at least 1")
        self.config, self.width, self.filters = config, width, filters
        hidden = config.filter_width
        sizes = [2 * config.bands, hidden, hidden, hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(hidden, filters * width, bias=False)
        self.frequency = nn.Parameter(torch.ones(hidden))

    def forward(self, length: int) -> tuple[Tensor, ...]:
        """The filters, each (T, D), at distances 0 to T - 1; float32 also under autocast."""
        with torch.autocast(self.frequency.device.type, enabled=False):
            device, dtype = self.frequency.device, self.frequency.dtype
            position_T1 = torch.arange(length, device=device, dtype=dtype)[:, None]
            periods = torch.exp2(torch.arange(2, 2 + self.config.bands, device=device, dtype=dtype))
            phase = 2 * torch.pi * (position_T1 / periods).frac()
            y = torch.cat([phase.cos(), phase.sin()], dim=-1)
            for layer in self.layers:
                y = torch.sin(self.frequency * layer(y))
            rate_D = math.log(100) / self.config.reach * torch.linspace(1, 5, self.width, device=device, dtype=dtype)
            h_TID = self.out(y).unflatten(-1, (self.filters, self.width))
            return (h_TID * torch.exp(-position_T1 * rate_D)[:, None]).unbind(1)


def long_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """``y_t = sum_s h_{t-s} x_s`` over s <= t, each channel by itself."""
    convolve = direct_convolution if len(h_TD) <= DIRECT else fft_convolution
    with torch.autocast(x_BTD.device.type, enabled=False):
        return convolve(at_least_float32(x_BTD), h_TD)


def direct_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """By windows of the filter, padded with zeros: O(T^2)."""
    length = len(h_TD)
    windows_TDS = F.pad(h_TD, (0, 0, length - 1, 0)).unfold(0, length, 1)
    return torch.einsum("tds,bsd->btd", windows_TDS, x_BTD.flip(1))


def fft_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """By the FFT of twice the length, so that nothing wraps round: O(T log T); causal up to rounding."""
    length = len(h_TD)
    product = torch.fft.rfft(x_BTD, 2 * length, dim=1) * torch.fft.rfft(h_TD, 2 * length, dim=0)
    return torch.fft.irfft(product, 2 * length, dim=1)[:, :length]
