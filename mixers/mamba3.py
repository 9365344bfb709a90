"""Mamba-3."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.mamba2 import step_bias
from mixers.ops.linear_recurrence import matrix_recurrence
from mixers.ops.numerics import at_least_float32
from mixers.ops.rotation import of_heads, products, rotated, rotated_pairs
from mixers.ops.token_shift import shifted
from mixers.parts import MixerLayer, RMSNorm, check_at_least, check_heads, joined, linear

SLOWEST = 1e-4
"""Least rate of decay, -A."""


class Mamba3(MixerLayer):
    """The trapezoidal rule S_t = α_t S_{t-1} + α_t (1 - λ_t) Δ_t k_{t-1} v_{t-1}^T + λ_t Δ_t k_t v_t^T, read by q_t.

    Decays α = exp(A Δ), steps Δ = softplus, A = -softplus and weights λ = sigmoid depend on the input, for each head.
    Keys B and queries C are common to all heads; they have an RMS norm and a bias for each head, and no convolution. A
    share of their channels is rotated by the sum of all π tanh(θ) Δ so far, as if the state were complex and turned at
    each position. Reads plus D times the values go through a gate. With a rank R > 1 (the paper's MIMO) a position
    writes R pairs and reads with R queries; the values and gates of a rank are those of the head times learned numbers,
    and a learned sum joins the outputs.

    At all later positions the pair of position t has the weight λ_t Δ_t + (1 - λ_{t+1}) Δ_{t+1}, at its own λ_t Δ_t. So
    one recurrence with one write a position is enough: position t writes the pair before it, times
    α_t (λ_{t-1} Δ_{t-1} + (1 - λ_t) Δ_t), and reads its own pair past the state. No output depends on a later input,
    not even by rounding.

    The decays, the rotations and the pair before distinguish positions. State: for each head a matrix (N, 2 D / H), the
    angles, and the newest keys and values.

    Differs from the reference:
        Lahoti et al. 2026, section 3, and https://github.com/state-spaces/mamba, mamba_ssm/modules/mamba3.py and
        tests/ops/triton/test_mamba3_siso.py.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 64 states and 4 heads of D/2 channels; theirs has 128 states and heads of 64 channels (the same heads
          at D = 128).
        - computation: the norms of keys and queries have ε 1e-6; theirs have 1e-5.
        - initialisation: theirs has PyTorch's default for all linear maps (uniform, standard deviation 1/√(3 inputs));
          here only the map to Δ, A, λ and θ has it. Theirs divides the output map by √(2 L), where here the branch has
          the factor 1/√L.
        - left out: the norm before the gate, which theirs has as an option; several groups of heads with keys and
          queries of their own.
    """

    family: ClassVar[str] = "state space"
    paper: ClassVar[str] = "Lahoti et al. 2026, arXiv:2603.15569"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of Mamba-3.

        Attributes:
            heads: number of heads; must divide the model width.
            state_size: number of rows N of a head's state; even.
            expand: width inside the mixer, in model widths.
            rotated: share of the state's rows that is rotated.
            rank: pairs that a position writes, and queries with which it reads.
        """

        heads: int = 4
        state_size: int = 64
        expand: int = 2
        rotated: float = 0.5
        rank: int = 1

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        check_at_least(1, config, "state_size", "expand", "rank")
        if config.state_size % 2 or not 2 <= config.rotated * config.state_size <= config.state_size:
            raise ValueError(
                f"state_size: {config.state_size}, rotated: {config.rotated}: rows are rotated in pairs, so give an "
                "even number of rows, and a share of at most 1 that has two rows or more"
            )

        heads, rank, states, inner = config.heads, config.rank, config.state_size, config.expand * shape.width
        self.angles = int(config.rotated * states) // 2

        # One map gives the gate, x, B and C; one gives Δ, A, λ and θ, and starts as PyTorch's default.
        self.sizes = [inner, inner, rank * states, rank * states]
        self.inputs = linear(shape.width, sum(self.sizes))
        self.controls = linear(shape.width, 3 * heads + self.angles)
        nn.init.uniform_(self.controls.weight, -(shape.width**-0.5), shape.width**-0.5)
        self.step_bias_H = nn.Parameter(step_bias(heads))

        self.k_norm, self.q_norm = RMSNorm(states), RMSNorm(states)
        self.k_bias_RHN, self.q_bias_RHN = (nn.Parameter(torch.ones(rank, heads, states)) for _ in range(2))
        self.skip_H = nn.Parameter(torch.ones(heads))
        if rank > 1:
            ones_RHV = torch.ones(rank, heads, inner // heads)
            self.value_RHV, self.gate_RHV = nn.Parameter(ones_RHV / rank), nn.Parameter(ones_RHV.clone())
            self.output_RHV = nn.Parameter(ones_RHV / rank)
        self.out = linear(inner, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        inputs, controls = joined(x_BTD, self.inputs, self.controls)
        gate, x, k, q = self._project(inputs)
        v = self._values(x)
        step, log_decay, now, turn = self._control(controls)

        # A pair is read at its own position without rotations, which cancel there. Each position writes the pairs of
        # the one before it.
        q, k, qk = rotated_pairs(q, k, self.q_bias_RHN, self.k_bias_RHN, turn.cumsum(1))
        own = now[..., None, None, :] * qk + self.skip_H * torch.eye(self.config.rank, device=qk.device)[..., None]
        strength = log_decay.exp() * (shifted(now) + step - now)
        o = self._recurrence(q, k, strength[..., None, :, None] * shifted(v), log_decay)
        return self._output(o + _weighted(own, v), gate)

    def init_state(self, batch: int) -> State:
        config, weight = self.config, self.out.weight
        heads, states, size = config.heads, config.state_size, config.expand * self.shape.width // config.heads
        return {
            "S": weight.new_zeros(batch, heads, states, size),
            "angle": weight.new_zeros(batch, heads, self.angles),
            "k": weight.new_zeros(batch, config.rank, heads, states),
            "x": weight.new_zeros(batch, heads, size),
        }

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, controls = joined(x_BD, self.inputs, self.controls)
        gate, x, k, q = self._project(inputs)
        v, v_before = self._values(x), self._values(state["x"])
        step, log_decay, now, turn = self._control(controls)
        angle = (state["angle"] + turn).remainder(2 * math.pi)
        q, k = rotated(of_heads(q, self.q_bias_RHN), angle), rotated(of_heads(k, self.k_bias_RHN), angle)

        # The state decays, and with it the pairs of the position before.
        S_BHNV = state["S"] + _pairs(state["k"], (step - now)[:, None, :, None] * v_before)
        S_BHNV = log_decay.exp()[..., None, None] * S_BHNV + _pairs(k, now[:, None, :, None] * v)
        o = (q[..., None] * S_BHNV[:, None]).sum(-2)
        return self._output(o + self.skip_H[:, None] * v, gate), {"S": S_BHNV, "angle": angle, "k": k, "x": x}

    def _project(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return gates and inputs (..., H, V), and keys and queries (..., R, N), which heads share."""
        heads, states = self.config.heads, self.config.state_size
        gate, x, B, C = inputs.split(self.sizes, dim=-1)
        gate, x = (rearrange(y, "... (h v) -> ... h v", h=heads) for y in (gate, x))

        # Norms read rows without gaps, which are copied here once for both passes.
        B, C = (rearrange(y, "... (r n) -> ... r n", n=states).contiguous() for y in (B, C))
        return gate, x, self.k_norm(B), self.q_norm(C)

    def _control(self, controls: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Δ, A Δ and λ Δ (..., H), and by how much keys and queries turn (..., H, A)."""
        heads = self.config.heads
        step, rate, share, angle = at_least_float32(controls).split([heads, heads, heads, self.angles], dim=-1)
        step = F.softplus(step + self.step_bias_H)
        log_decay = -F.softplus(rate).clamp(min=SLOWEST) * step
        return step, log_decay, share.sigmoid() * step, math.pi * angle.tanh()[..., None, :] * step[..., None]

    def _values(self, x: Tensor) -> Tensor:
        """Return the values (..., R, H, V) of all ranks."""
        return x[..., None, :, :] if self.config.rank == 1 else x[..., None, :, :] * self.value_RHV

    def _recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        """Return what queries read after their position has written all of its pairs; all tensors (B, T, R, H, ...).

        The pairs of a position are written one after another, as if at R positions of which the first one decays.
        """
        length, rank = q.shape[1:3]
        log_decay = F.pad(log_decay[:, :, None], (0, 0, 0, rank - 1))[..., None]
        o = matrix_recurrence(*(y.flatten(1, 2) for y in (q, k, v, log_decay))).unflatten(1, (length, rank))
        if rank == 1:
            return o

        # A query of one rank is early for the pairs of the ranks after it.
        missed = torch.ones(rank, rank, dtype=q.dtype, device=q.device).triu(1)
        return o + _weighted(missed[..., None] * products(q, k), v)

    def _output(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from reads with the values that bypass the state (..., R, H, V), and gates."""
        if self.config.rank == 1:
            y = y.squeeze(-3) * F.silu(gate)
        else:
            y = (y * F.silu(gate[..., None, :, :] * self.gate_RHV) * self.output_RHV).sum(-3)
        return self.out(y.flatten(-2))


def _weighted(weight: Tensor, v: Tensor) -> Tensor:
    """Return the sums (..., R, H, V) over ranks S of values (..., S, H, V) times weights (..., R, S, H)."""
    y = weight[..., None] * v[..., None, :, :, :]
    return y.squeeze(-3) if y.shape[-3] == 1 else y.sum(-3)


def _pairs(k: Tensor, v: Tensor) -> Tensor:
    """Return the sums (B, H, N, V) over ranks of the outer products of keys (B, R, H, N) and values (B, R, H, V)."""
    return (k[..., None] * v[..., None, :]).sum(1)
