"""Parts of layers: embedding, norm, MLP, short convolution, and the pre-norm layer around a sequence mixer."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Layer, Shape, State
from mixers.ops.convolution import short_convolution, short_convolution_step, split_convolution
from mixers.ops.embedding import embedding
from mixers.ops.mlp import residual_mlp
from mixers.ops.norm import branching_rms_norm, rms_norm
from mixers.ops.numerics import HALF, at_least_float32, runs_fused


class Embedding(nn.Embedding):
    """Token embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis with a learnable gain (Zhang & Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain)


class MLP(nn.Module):
    """D -> F -> D with GELU and no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        check_at_least(1, shape, "mlp_width")
        self.up = linear(shape.width, shape.mlp_width)
        self.down = linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ShortConvolution(nn.Module):
    """Causal convolution ``y_t = sum_w weight_w x_{t-W+1+w}`` of each channel, with zeros before the first position.

    With ``silu``, a SiLU follows. Weights are normal with standard deviation 1/sqrt(W), which keeps the scale of
    uncorrelated inputs; a bias starts at zero.
    """

    def __init__(self, width: int, size: int = 4, bias: bool = False, silu: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"convolution size: {size} must be at least 1")

        self.weight_DW = nn.Parameter(torch.randn(width, size) * size**-0.5)
        self.bias_D = nn.Parameter(torch.zeros(width)) if bias else None
        self.silu = silu

    def forward(self, x_BTD: Tensor) -> Tensor:
        return short_convolution(x_BTD, self.weight_DW, self.bias_D, silu=self.silu)

    def parts(self, x_BTD: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Return the outputs of the first channels, of the next ones, and so on, with channels of these shapes."""
        return split_convolution(x_BTD, self.weight_DW, self.bias_D, shapes, silu=self.silu)

    def init_state(self, batch: int) -> Tensor:
        """Return the W - 1 newest inputs (B, W-1, D), oldest first: zeros."""
        width, size = self.weight_DW.shape
        return self.weight_DW.new_zeros(batch, size - 1, width)

    def step(self, x_BD: Tensor, newest_BWD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, D) at one position, and the newest inputs."""
        return short_convolution_step(x_BD, newest_BWD, self.weight_DW, self.bias_D, silu=self.silu)


class MixerLayer(Layer):
    """Pre-norm layer around a sequence mixer: ``u = x + s mix(norm(x))``, then ``u + s mlp(norm(u))``, s = 1/sqrt(L).

    With an MLP of width 0, the layer is ``u``. A subclass defines ``mix`` over a whole sequence. For a step form it
    also defines ``init_state`` and ``mix_one``, which mixes one position and agrees with ``mix``.
    """

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.mixer_norm = RMSNorm(shape.width)
        if shape.mlp_width:
            self.mlp_norm = RMSNorm(shape.width)
            self.mlp = MLP(shape)

    @abstractmethod
    def mix(self, x_BTD: Tensor) -> Tensor:
        """Map normed inputs to the mixer's output (B, T, D); outputs at t do not depend on inputs after t."""

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one position: output (B, D) and next state.

        Raises:
            NotImplementedError: the layer has no step form.
        """
        raise self._no_step_form()

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD, x_BTD = branching_rms_norm(x_BTD, self.mixer_norm.gain)
        return with_mlp(self, x_BTD, self.mix(normed_BTD))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BD, state = self.mix_one(self.mixer_norm(x_BD), state)
        return with_mlp(self, x_BD, y_BD), state


def with_mlp(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the outputs of a layer with ``mlp_norm`` and ``mlp`` from its inputs and its mixer's outputs (..., D).

    A layer without MLP has neither.
    """
    if not layer.shape.mlp_width:
        return x + layer.shape.residual_scale * y
    gain_D, up_FD, down_DF = layer.mlp_norm.gain, layer.mlp.up.weight, layer.mlp.down.weight
    return residual_mlp(x, y, gain_D, up_FD, down_DF, layer.shape.residual_scale)


def check_heads(heads: int, width: int) -> None:
    """Check that the heads divide the model width.

    Raises:
        ValueError: they do not.
    """
    if heads < 1 or width % heads:
        raise ValueError(f"heads: {heads} must divide the model width {width}")


def check_at_least(least: int, config: Any, *names: str) -> None:
    """Check settings of a layer against a lower bound.

    Raises:
        ValueError: one of the named fields of ``config`` is smaller.
    """
    for name in names:
        if (value := getattr(config, name)) < least:
            raise ValueError(f"{name}: {value} must be at least {least}")


class Linear(nn.Linear):
    """Linear map; with 16-bit weights, it rounds inputs that were computed in higher precision."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype in HALF and not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.weight.dtype)
        return super().forward(x)


class WideLinear(nn.Linear):
    """Linear map in at least float32, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, at_least_float32(self.weight), at_least_float32(self.bias))


class HeadNorm(nn.GroupNorm):
    """Layer norm of each head's channels, in at least float32 (Wu & He 2018, with heads as groups)."""

    def forward(self, y: Tensor) -> Tensor:
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        return F.group_norm(at_least_float32(y), self.num_groups, weight, bias, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear map without bias, weights normal with standard deviation 1/sqrt(inputs)."""
    layer = Linear(inputs, outputs, bias=False)
    if not layer.weight.is_meta:  # there are no numbers to draw, which takes PyTorch a millisecond
        nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def joined(x: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """Return the outputs of linear maps without biases of the same inputs, in fused kernels as one product.

    A product of few outputs takes as long as one of many, because it reads the inputs, too. Its results are slices of
    rows that are 16 n numbers apart; at other distances Triton's kernels read numbers one by one.
    """
    if not runs_fused(x):
        return tuple(y(x) for y in maps)
    sizes = [y.out_features for y in maps]
    rest = -sum(sizes) % 16
    weight_ED = F.pad(torch.cat([y.weight for y in maps]), (0, 0, 0, rest))
    return tuple(F.linear(x, weight_ED).split([*sizes, rest], dim=-1)[:-1])


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return the sinusoidal codes (T, D) of positions 0 to T - 1."""
    return sinusoids_at(torch.arange(length, device=device)[:, None], width)


def sinusoids_at(position: Tensor, width: int) -> Tensor:
    """Return the codes (..., D) of positions (..., 1), sines then cosines (Vaswani et al. 2017, section 3.5)."""
    half, device = (width + 1) // 2, position.device
    frequency = torch.exp(torch.arange(half, device=device) * (-torch.log(torch.tensor(10_000.0)).item() / half))
    angle = position * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :width]
