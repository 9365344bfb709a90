"""Modules that know nothing of this project, in the style of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from somewhere import Cache


class GatedToy(nn.Module):
    """A layer as flash-linear-attention writes them: many arguments, of which few matter, and a tuple as the output."""

    def __init__(
        self,
        hidden_size: int = 1024,
        num_heads: int = 4,
        use_gate: bool = True,
        mode: str = "chunk",
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert not kwargs
        self.num_heads, self.mode, self.layer_idx = num_heads, mode, layer_idx
        self.v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decay = nn.Linear(hidden_size, num_heads)
        self.gate = nn.Linear(hidden_size, hidden_size) if use_gate else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Cache | None]:
        v = self.v(hidden_states).unflatten(-1, (self.num_heads, -1))
        keep = self.decay(hidden_states).sigmoid()[..., None]
        o, h = torch.empty_like(v), v[:, 0] * 0
        for t in range(v.shape[1]):
            h = keep[:, t] * h + v[:, t]
            o[:, t] = h
        o = o.flatten(-2)
        return (o if self.gate is None else o * self.gate(hidden_states).sigmoid()), None, past_key_values


class Plain(nn.Module):
    """Arguments of every kind, also of those that a command line cannot give."""

    def __init__(
        self,
        dim: int,
        *,
        scale: float = 2,
        kind: Literal["sum", "mean"] = "mean",
        layer_idx: int = None,  # type: ignore[assignment]  # noqa: RUF013  # as many write it
        untyped=0.5,
        norm: nn.Module | None = None,
        cache: Cache | None = None,
    ) -> None:
        super().__init__()
        self.settings = (scale, kind, layer_idx, untyped, norm, cache)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class OwnName(nn.Module):
    """Its width has a name of its own, and no default."""

    def __init__(self, size: int, heads: int = 2) -> None:
        super().__init__()
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class TwoNames(OwnName):
    """Two arguments have usual names of a width, and defaults."""

    def __init__(self, embed_dim: int = 8, hidden_size: int = 32) -> None:
        super().__init__(embed_dim)
        self.hidden_size = hidden_size


class NeedsDim(TwoNames):
    """The argument without a default is not the first of the usual names."""

    def __init__(self, dim: int, hidden_size: int = 32) -> None:
        super().__init__(dim, hidden_size)


class NeedsChannels(OwnName):
    """The argument without a default has no usual name, and another one has."""

    def __init__(self, channels: int, dim: int = 8) -> None:
        super().__init__(channels, dim)


class Defaulted(OwnName):
    """Its width has a name of its own, and a default."""

    def __init__(self, size: int = 64) -> None:
        super().__init__(size)


class Demanding(OwnName):
    """Two arguments without a default."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)


class DemandingOwnName(OwnName):
    """Two arguments without a default, neither of a usual name."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__(size, heads)


class LastPosition(OwnName):
    """Outputs of another shape, which would be broadcast over all positions."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)[:, -1:]
