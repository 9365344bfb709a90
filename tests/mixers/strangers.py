"""Modules that know nothing of this project, in the style of other libraries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Arguments without a default, and of several types."""

    def __init__(
        self,
        dim: int,
        heads: int,
        untyped,
        window: int | tuple = 4,
        activation: str | Callable[[Tensor], Tensor] | None = nn.functional.gelu,
        axes: list = [3],  # noqa: B006  # as some write it
    ) -> None:
        super().__init__(dim)
        self.settings = (heads, window, getattr(activation, "__name__", activation), untyped, tuple(axes))


class Optionally(OwnName):
    """Arguments that may be None, without a default and with one."""

    def __init__(self, dim: int, extra: int | None, more: int | None = 4, act: str | Callable | None = max) -> None:
        super().__init__(dim)
        self.settings = (extra, more, act)


class Hidden(OwnName):
    """Its constructor hides its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@dataclass
class Settings:
    """A configuration object."""

    d_model: int
    states: int = 8
    factor: int | str = "auto"
    sizes: list[int] = field(default_factory=lambda: [1])
    kernel: Callable[[Tensor], Tensor] | None = None


class Configured(OwnName):
    """It takes a configuration object."""

    def __init__(self, config: Settings, layer_idx: int = 0) -> None:
        super().__init__(config.d_model)
        self.settings = (config, layer_idx)


class Config:
    """A configuration object with arguments by keyword."""

    def __init__(self, **values: int) -> None:
        vars(self).update(values)


class Mixer(OwnName):
    """It takes a configuration object without saying its type."""

    def __init__(self, config) -> None:
        super().__init__(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(1)


class Rotary(nn.Module):
    """Angles of positions, from frozen frequencies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(10_000.0 ** -torch.linspace(0, 1, width // 2), requires_grad=False)

    def forward(self, length: int) -> Tensor:
        return torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies


class Attention(nn.Module):
    """Attention that is called with its inputs, angles of positions, and a mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        turned = [torch.cat([y[..., ::2] * angles.cos(), y[..., 1::2] * angles.sin()], -1) for y in (q, k)]
        scores = (turned[0] @ turned[1].mT).masked_fill(~mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Wrapping(OwnName):
    """It returns its output in a collection."""

    def __init__(self, dim: int, wrap: Literal["tuple", "list", "dict"] = "tuple") -> None:
        super().__init__(dim)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"tuple": (y, None), "list": [y], "dict": OrderedDict(last_hidden_state=y, cache=None)}[self.wrap]


class Complex(nn.Module):
    """It has a complex parameter, without weight decay."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim, dtype=torch.complex64))
        self.w._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        return (x.cumsum(1).to(torch.complex64) @ self.w).real


class PostNorm(nn.TransformerEncoderLayer):
    """A whole layer of PyTorch, with its norms behind the branches."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__(dim, 2, 4 * dim, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


class Dropping(PostNorm):
    """A whole layer with dropout, and with a random buffer that no file keeps."""

    whole_layer = True

    def __init__(self, dim: int, dropout: float = 0.1) -> None:
        super().__init__(dim, dropout)
        self.register_buffer("gain", torch.rand(dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


class PreNorm(OwnName):
    """A mixer with a norm before it and a residual branch, as public code calls a block."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(x).cumsum(1))


class SaysWhole(PreNorm):
    """It says that it is a whole layer."""

    whole_layer = True


class OfPyTorch(nn.Module):
    """PyTorch's attention, which is no whole layer."""

    def __init__(self, embed_dim: int, num_heads: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True)


class Expanding(nn.Module):
    """A gated mixer of twice the width with a norm, as some write linear attention; it is no whole layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.v, self.g, self.norm = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim)
        self.out = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.v(x).cumsum(1)) * self.g(x).sigmoid())


class LastPosition(OwnName):
    """Outputs of another shape, which would be broadcast over all positions."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)[:, -1:]
