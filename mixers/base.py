"""What a layer is.

Dimensions, used as suffixes of names everywhere: R runs trained together, B batch, T positions (N in the paper),
D model width, H heads, K head dim (H * K = D), F hidden width of the MLP, V vocabulary, S sequences of a data set,
L layers, P parameters of one run.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.runs import over_batch, over_runs

log = logging.getLogger(__name__)

State = dict[str, Tensor]
"""What a layer carries from one position to the next while decoding; every tensor is batch-first.

Which tensors there are next, and their shapes, follow from those that there are now, not from values in them.
"""


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


@cache
def log_once(message: str) -> None:
    """Warn of what a process may meet many times."""
    log.warning(message)


class ContractError(ValueError):
    """A layer does not do what ``Layer`` asks of it."""


class Layer(nn.Module, ABC):
    """One whole layer ``z = layer(x)``, residual branches and MLP included, causal over positions.

    A subclass holds a nested frozen ``Config`` dataclass, the only source of its defaults, and is built as
    ``Layer(config, shape)``. It is written for one run; the trainer adds the run axis.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the layer; a subclass replaces it with its own."""

    family: ClassVar[str] = "other"
    """Kind of layer, under which tables and charts show it."""
    paper: ClassVar[str] = ""
    """Source that defines the layer, shown beside its results."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map a whole sequence ``x_BTD`` to ``z_BTD``; position t depends on positions up to t alone."""

    @classmethod
    def through(cls, layers: Sequence[Self], x_BTD: Tensor) -> Tensor:
        """Outputs of the last of layers on top of each other; a kind may override in which order they work."""
        for layer in layers:
            x_BTD = layer(x_BTD)
        return x_BTD

    @classmethod
    def at_once(cls, layers: Sequence[Self], x_BTD: Tensor) -> bool:
        """Whether ``through`` lets these layers work at the same time; they must not draw random numbers then."""
        return False

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """State before the first position."""

    @abstractmethod
    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position: ``(z_BD, next state)``, equal to that position of ``forward``."""


class Embedding(nn.Embedding):
    """Token embedding. The gradient of a small table repeats bitwise on a GPU, where PyTorch's adds atomically."""

    def forward(self, tokens: Tensor) -> Tensor:
        kernels = fused_kernels(self.weight)
        if kernels and kernels.fits_embedding(*self.weight.shape):
            return over_runs(kernels.embedding_method(), tokens, self.weight)[0]
        return super().forward(tokens)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis with a learnable gain (Zhang & Sennrich 2019)."""

    eps: ClassVar[float] = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """``gain * x / sqrt(mean(x^2) + eps)`` over the last axis; statistics in float32 for 16-bit inputs.

    Under bfloat16 autocast on a GPU the result is bfloat16, for it goes into products.
    """
    if kernels := fused_kernels(x):
        return over_runs(kernels.rms_norm_method(torch.bfloat16), x, gain)[0]
    normalise = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=RMSNorm.eps)
    return over_batch(normalise, x).type_as(x) * gain.type_as(x)


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of x run in: its dtype, or that of autocast where it is on, which leaves float64 alone."""
    device = x.device.type
    if x.dtype == torch.float64 or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x.dtype
    return torch.get_autocast_dtype(device)


def at_least_float32(y: Tensor | None) -> Any:
    """16-bit tensors widened, for statistics and for sums over whole sequences; others, and None, as they are."""
    return y.float() if y is not None and y.dtype in (torch.bfloat16, torch.float16) else y


def fused_kernels(x: Tensor) -> ModuleType | None:
    """``mixers.kernels`` where an operation on x should run in them: on a GPU under bfloat16 autocast."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    wanted = x.is_cuda and autocast and x.dtype in (torch.float32, torch.bfloat16)
    if not wanted or find_spec("triton") is None:
        return None
    from mixers import kernels  # Triton is not there on every platform

    return kernels


class MLP(nn.Module):
    """D -> F -> D with GELU and no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = linear(shape.width, shape.mlp_width)
        self.down = linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def residual_mlp(x: Tensor, y: Tensor, norm: RMSNorm, mlp: MLP, scale: float) -> Tensor:
    """``u + scale mlp(norm(u))`` for ``u = x + scale y``: what ends a pre-norm layer whose mixer has the output y."""
    kernels = fused_kernels(x)
    if kernels and kernels.fits_mlp(*mlp.down.weight.shape):
        return over_runs(kernels.mlp_method(scale), x, y.bfloat16(), norm.gain, mlp.up.weight, mlp.down.weight)[0]
    u = x + scale * y
    return u + scale * mlp(norm(u))


class MixerLayer(Layer):
    """Pre-norm layer around a sequence mixer: ``u = x + s mix(norm(x))``, then ``u + s mlp(norm(u))``, s = 1/sqrt(L).

    A subclass gives ``mix`` over a whole sequence and ``mix_one`` for one position, which agree.
    """

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.mixer_norm = RMSNorm(shape.width)
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = MLP(shape)

    @abstractmethod
    def mix(self, x_BTD: Tensor) -> Tensor:
        """Output (B, T, D) of the mixer for normed inputs; position t depends on positions up to t alone."""

    @abstractmethod
    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """The mixer at one position: output (B, D) and next state."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._finish(x_BTD, self.mix(self.mixer_norm(x_BTD)))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BD, state = self.mix_one(self.mixer_norm(x_BD), state)
        return self._finish(x_BD, y_BD), state

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        return residual_mlp(x, y, self.mlp_norm, self.mlp, self.shape.residual_scale)


def check_heads(heads: int, width: int) -> None:
    """Raise ValueError unless the heads divide the model width."""
    if heads < 1 or width % heads:
        raise ValueError(f"heads: {heads} must divide the model width {width}")


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Linear map without bias, weights normal with standard deviation 1/sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Sinusoidal position codes (T, D), sines then cosines (Vaswani et al. 2017, section 3.5)."""
    half = (width + 1) // 2
    frequency = torch.exp(torch.arange(half, device=device) * (-torch.log(torch.tensor(10_000.0)).item() / half))
    angle = torch.arange(length, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]
