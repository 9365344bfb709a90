"""What a layer is.

Dimensions, used as suffixes of names everywhere: R runs trained together, B batch, T positions (N in the paper),
D model width, H heads, K head dim (H * K = D), F hidden width of the MLP, V vocabulary, S sequences of a data set,
L layers, P parameters of one run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

State = dict[str, Tensor]
"""What a layer carries from one position to the next while decoding; every tensor is batch-first."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the backbone fixes for each of its layers.

    Attributes:
        width: model width D.
        mlp_width: hidden width F of the MLP.
        layers: number L of stacked layers; residual branches are scaled by 1/sqrt(L).
    """

    width: int = 128
    mlp_width: int = 512
    layers: int = 1

    @property
    def residual_scale(self) -> float:
        return float(self.layers**-0.5)


class Layer(nn.Module, ABC):
    """One whole layer ``z = layer(x)``, residual branches and MLP included, causal over positions.

    A subclass holds a nested frozen ``Config`` dataclass, the only source of its defaults, and is built as
    ``Layer(config, shape)``. It is written for one run; the trainer adds the run axis.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the layer; a subclass replaces it with its own."""

    paper: ClassVar[str] = ""
    """Source that defines the layer, shown beside its results."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map a whole sequence ``x_BTD`` to ``z_BTD``; position t depends on positions up to t alone."""

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """State before the first position."""

    @abstractmethod
    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position: ``(z_BD, next state)``, equal to that position of ``forward``."""


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis with a learnable gain (Zhang & Sennrich 2019)."""

    eps: ClassVar[float] = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """``gain * x / sqrt(mean(x^2) + eps)`` over the last axis; statistics in float32 for 16-bit inputs."""
    normalise = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=RMSNorm.eps)
    return over_batch(normalise, x).type_as(x) * gain.type_as(x)


def over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, whose tensors and result all have the batch as their first axis.

    Under ``torch.func.vmap`` the runs become further batch entries, so that PyTorch's fused kernels are used, which its
    own batching rules take apart or, for attention with a bias on CUDA (seen with 2.11), misalign. The backward
    computes the forward once more and saves nothing but the inputs.
    """
    result: Tensor = _OverBatch.apply(function, *tensors)
    return result


class _OverBatch(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = ctx.function(*leaves)
        return None, *torch.autograd.grad(output, leaves, gradient)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        def fold(y: Tensor, dim: int | None) -> Tensor:
            return (y.expand(info.batch_size, *y.shape) if dim is None else y.movedim(dim, 0)).flatten(0, 1)

        folded = (fold(y, dim) for y, dim in zip(tensors, in_dims[1:], strict=True))
        return over_batch(function, *folded).unflatten(0, (info.batch_size, -1)), 0


class MLP(nn.Module):
    """D -> F -> D with GELU and no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = linear(shape.width, shape.mlp_width)
        self.down = linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Linear map without bias, weights normal with standard deviation 1/sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer
