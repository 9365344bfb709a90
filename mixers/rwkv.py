"""RWKV-6 and RWKV-7: their time mixing, with the MLP of this project in place of their channel mixing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step, unit
from mixers.ops.numerics import at_least_float32
from mixers.ops.token_shift import token_shifts
from mixers.options import switch
from mixers.parts import HeadNorm, MixerLayer, check_at_least, check_heads, linear


class LowRank(nn.Module):
    """``bias + f(x A) B``. Initially within about a tenth of its bias (the papers' code starts with A = 0)."""

    def __init__(self, bias_D: Tensor, rank: int, f: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.f = f
        self.down, self.up = linear(len(bias_D), rank), linear(rank, len(bias_D))
        nn.init.normal_(self.up.weight, std=0.1 * rank**-0.5)
        self.bias_D = nn.Parameter(bias_D)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias_D + self.change(x)

    def change(self, x: Tensor) -> Tensor:
        """Return what ``x`` adds to the bias."""
        return self.up(self.f(self.down(x)))


class RWKV(MixerLayer):
    """The common part of the two versions: token shift, the recurrence, group norm over heads.

    State: for each head a matrix (K, K), and the input of the position before.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of RWKV.

        Attributes:
            heads: number of heads; must divide the model width.
        """

        heads: int = 4

    MIXED: ClassVar[tuple[str, ...]]
    """Maps whose inputs are mixed with those of the position before."""
    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        if shape.width // config.heads < 2:
            raise ValueError(f"heads: {config.heads} leave heads of size 1, whose norm is always 0")
        check_at_least(1, config, *(name for name, value in vars(config).items() if not isinstance(value, bool)))

        self.r, self.k, self.v, self.out = (linear(shape.width, shape.width) for _ in range(4))
        self.norm = HeadNorm(config.heads, shape.width, eps=64e-5)

    def init_state(self, batch: int) -> State:
        heads, weight = self.config.heads, self.r.weight
        size = self.shape.width // heads
        return {"S": weight.new_zeros(batch, heads, size, size), "x": weight.new_zeros(batch, self.shape.width)}

    def heads(self, y: Tensor) -> Tensor:
        """Split the last axis into heads (..., H, K)."""
        return rearrange(y, "... (h k) -> ... h k", h=self.config.heads)

    def head_norm(self, o: Tensor) -> Tensor:
        """Return the layer norm of each head of ``o`` (..., H, K), heads concatenated."""
        return self.norm(o.reshape(-1, self.shape.width)).view(*o.shape[:-2], self.shape.width)


class RWKV6(RWKV):
    """Finch: linear attention with a bonus u; decays of key channels and token shifts depend on the input.

    o_t = r_t^T (S_{t-1} + diag(u) k_t v_t^T), S_t = diag(exp(-exp(d_t))) S_{t-1} + k_t v_t^T. d is at most 5, where a
    decay is 0 in float32. The decays and the token shift distinguish positions.

    Differs from the reference:
        Peng et al. 2024, section 4, and https://github.com/BlinkDL/RWKV-LM, RWKV-v5/src/model.py (``RWKV_Tmix_x060``).

        - block: theirs has layer norms, one more behind the embedding, and channel mixing in place of the MLP: a token
          shift, squared ReLU, and a sigmoid gate.
        - sizes: 4 heads of D/4 channels; theirs has heads of 64.
        - computation: the logarithm d of the decay's rate is at most 5, where a decay is 0 in float32.
        - initialisation: theirs is orthogonal for receptance and values, a tenth of it for keys and gate, and zero for
          the output map. Its low-rank maps start with a first factor of zero and a second one uniform in ±0.01; here
          they start within about a tenth of their biases. Its shifts, decays, bonus and the gain of the head norm
          depend on the depth; here every layer starts as the first of several does, but with gain 1.
        - training: theirs trains the biases of the decays with twice the learning rate (``layerwise_lr``), and weight
          decay leaves out the low-rank maps.
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Peng et al. 2024, arXiv:2404.05892"

    @dataclass(frozen=True, kw_only=True)
    class Config(RWKV.Config):
        """Settings of RWKV-6.

        Attributes:
            heads: number of heads; must divide the model width.
            shift_rank: rank of the maps that give the token shifts.
            decay_rank: rank of the map that gives the decays.
        """

        shift_rank: int = 32
        decay_rank: int = 64

    MIXED = ("r", "k", "v", "gate", "decay")
    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        width = shape.width
        self.gate = linear(width, width)

        # Token shifts.
        channel_D = torch.arange(width) / width
        self.shift_D = nn.Parameter(1 - channel_D)
        powers = {"r": 0.5, "k": 1.0, "v": 1.0, "gate": 0.5, "decay": 1.0}
        self.shifts = nn.ModuleDict({name: LowRank(1 - channel_D**p, config.shift_rank) for name, p in powers.items()})

        # Decays and bonus.
        self.decay = LowRank(5 * torch.linspace(0, 1, width) ** 0.7 - 6, config.decay_rank)
        self.bonus_D = nn.Parameter(0.1 * ((torch.arange(width) + 1) % 3 - 1))

    def mix(self, x_BTD: Tensor) -> Tensor:
        (guide_BTD,) = token_shifts(x_BTD, self.shift_D[None])
        shifts = [cast(LowRank, self.shifts[name]) for name in self.MIXED]
        biases_ND = torch.stack([shift.bias_D for shift in shifts])
        mixed = token_shifts(x_BTD, biases_ND, *(shift.change(guide_BTD) for shift in shifts))
        tensors, gate = self._project(mixed)
        o_BTHK = matrix_recurrence(*tensors, bonus_HK=self.heads(self.bonus_D))
        return self.out(self.head_norm(o_BTHK) * gate)

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        step_BD = state["x"] - x_BD
        guide_BD = x_BD + step_BD * self.shift_D
        tensors, gate = self._project([x_BD + step_BD * self.shifts[name](guide_BD) for name in self.MIXED])
        o_BHK, S_BHKK = matrix_step(state["S"], *tensors, bonus_HK=self.heads(self.bonus_D))
        return self.out(self.head_norm(o_BHK) * gate), {"S": S_BHKK, "x": x_BD}

    def _project(self, mixed: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the arguments q, k, v, g of ``matrix_recurrence``, and the gate."""
        r, k, v, gate, decay = (self.get_submodule(name)(y) for name, y in zip(self.MIXED, mixed, strict=True))
        r, k, v, log_decay = (self.heads(y) for y in (r, k, v, -at_least_float32(decay).clamp(max=5).exp()))
        return (r, k, v, log_decay), F.silu(gate)


class RWKV7(RWKV):
    """Goose: a delta rule with a decay w, a removal key κ̂ and a learning rate a of each key channel.

    S_t = (diag(w_t) - (a_t κ̂_t) κ̂_t^T) S_{t-1} + k̃_t v_t^T, o_t = r_t^T S_t, here with keys as rows of S. The decays
    and the token shift distinguish positions. The paper mixes the values of the first layer into those of deeper
    layers; this is left out, because a single layer has no layer below it.

    The transition matrix is similar to the symmetric diag(w) - u u^T with u_i = √a_i κ̂_i. Its eigenvalues are real,
    below 1, and above min(w) - max(a). With w in (e^(-1/√e), 1) = (0.545, 1) and a in (0, 1) they lie in (-0.455, 1);
    none is negative if no decay w is below a learning rate a.

    With ``negative_eigenvalues`` a is in (0, 1 + w), also in k̃, and the eigenvalues lie in (-1, 1), because
    diag(1 + w) - u u^T is positive definite for a < 1 + w. Grazzi et al. 2024, arXiv:2411.12537, double the learning
    rate, which is the same without decay. With decay, 2 a would allow -1.455, and states would grow.

    Differs from the reference:
        Peng et al. 2025, section 4, and https://github.com/BlinkDL/RWKV-LM, RWKV-v7/train_temp/src/model.py
        (``RWKV_Tmix_x070``).

        - block: theirs has layer norms, one more behind the embedding, and channel mixing in place of the MLP: a token
          shift and squared ReLU.
        - sizes: 4 heads of D/4 channels; theirs has heads of 64. The ranks 32 and 64 are theirs at D = 128; theirs grow
          as √D.
        - computation: a removal key is divided by the root of its square plus 1e-6; theirs by its length, at least
          1e-12.
        - initialisation: theirs is uniform in ±0.5/√D for receptance and values and in ±0.05/√D for keys, and zero for
          the output map. Its low-rank maps, the gate's included, start with a first factor of zero and an orthogonal
          second one times 0.1; here they start within about a tenth of their biases, and the gate's two maps normal as
          other linear maps. Its shifts and decays depend on the depth; here every layer starts as the first of several
          does.
        - training: theirs trains the bias of the decays with twice the learning rate, and weight decay leaves out the
          low-rank maps.
        - left out: the values of the first layer, which theirs mixes into those of deeper layers.
        - added: negative eigenvalues as an option, off by default.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Peng et al. 2025, arXiv:2503.14456"

    @dataclass(frozen=True, kw_only=True)
    class Config(RWKV.Config):
        """Settings of RWKV-7.

        Attributes:
            heads: number of heads; must divide the model width.
            rank: rank of the maps that give decays and learning rates.
            gate_rank: rank of the map that gives the gate.
            negative_eigenvalues: multiply the learning rate by 1 + w, for eigenvalues of the state's transition between
                -1 and 1 in place of -0.455 and 1.
        """

        rank: int = 32
        gate_rank: int = 64
        negative_eigenvalues: bool = switch(False)

    MIXED = (*RWKV6.MIXED, "rate")
    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        width = shape.width
        channel_D, centred_D = torch.arange(width) / width, torch.linspace(-0.5, 0.5, width)

        # Token shifts.
        powers = {"r": 0.2, "decay": 0.9, "k": 0.7, "v": 0.7, "rate": 0.9, "gate": 0.2}
        self.shifts_D = nn.ParameterDict({name: nn.Parameter(1 - channel_D**p) for name, p in powers.items()})

        # Decays, learning rates and gate.
        within_K = torch.linspace(-1, 1, width // config.heads)
        zigzag_D = (within_K * within_K.abs()).repeat(config.heads)
        self.decay = LowRank(6 * centred_D - 2.5 + 2.5 * zigzag_D, config.rank)
        self.rate = LowRank(0.4 * centred_D - 0.19 + 0.3 * zigzag_D, config.rank, nn.Identity())
        self.gate = nn.Sequential(linear(width, config.gate_rank), nn.Sigmoid(), linear(config.gate_rank, width))

        # Removal keys, replacement keys and bonus.
        self.removal_D = nn.Parameter(0.71 - 0.1 * centred_D)
        self.replacement_D = nn.Parameter(torch.full((width,), 1.02))
        self.bonus_D = nn.Parameter(torch.full((width,), -0.04))

    def mix(self, x_BTD: Tensor) -> Tensor:
        tensors, gate = self._project(self._mixed(x_BTD))
        return self._output(matrix_recurrence(*tensors), *tensors[:3], gate)

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        change_BD = state["x"] - x_BD
        tensors, gate = self._project([x_BD + change_BD * self.shifts_D[name] for name in self.MIXED])
        o_BHK, S_BHKK = matrix_step(state["S"], *tensors)
        return self._output(o_BHK, *tensors[:3], gate), {"S": S_BHKK, "x": x_BD}

    def _mixed(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the maps that ``MIXED`` names."""
        return token_shifts(x_BTD, torch.stack([self.shifts_D[name] for name in self.MIXED]))

    def _project(self, mixed: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the arguments q, k, v, g, a, b of ``matrix_recurrence``, and the gate."""
        r, k, v, gate, decay, rate = (self.get_submodule(name)(y) for name, y in zip(self.MIXED, mixed, strict=True))

        # Learning rates, decays, removal keys and replacement keys.
        rate = rate.sigmoid()
        log_decay = -(torch.e**-0.5) * decay.sigmoid()
        if self.config.negative_eigenvalues:
            rate = rate * (1 + log_decay.exp())
        removal = unit(self.heads(k * self.removal_D))
        replacement = k * (1 + (rate - 1) * self.replacement_D)

        r, k, v, log_decay, rate = (self.heads(y) for y in (r, replacement, v, log_decay, rate))
        return (r, k, v, log_decay, -rate * removal, removal), gate

    def _output(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from the outputs ``o`` (..., H, K) of the recurrence, with the bonus."""
        bonus = (r * self.heads(self.bonus_D) * k).sum(-1, keepdim=True) * v
        return self.out((self.head_norm(o) + bonus.flatten(-2)) * gate)
