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
from mixers.ops.numerics import at_least_float32, runs_fused
from mixers.ops.rotation import biased, biased_rotation, one_later, rotated
from mixers.parts import MixerLayer, RMSNorm, check_at_least, check_heads, linear

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
          here only the map to Δ, A, λ and θ has it.
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

        # One map gives gates, x, B and C, then Δ, A, λ and θ, for which it starts as PyTorch's default.
        self.sizes = [inner, inner, rank * states, rank * states, 3 * heads + self.angles]
        self.inputs = linear(shape.width, sum(self.sizes))
        nn.init.uniform_(self.inputs.weight.data[-self.sizes[-1] :], -(shape.width**-0.5), shape.width**-0.5)
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
        gate, x, B, C, (step, log_decay, now, turn) = self._project(x_BTD)
        v = self._values(x)

        # A pair is read at its own position without rotations, which cancel there.
        identity = torch.eye(self.config.rank, dtype=now.dtype, device=now.device)[..., None]
        own = now[..., None, None, :] * self._own_products(C, B) + identity * self.skip_H

        # Each position writes the pairs of the one before it.
        angle = turn.cumsum(1)
        q = biased_rotation(C, self.q_bias_RHN, angle)
        k = biased_rotation(B, self.k_bias_RHN, angle, late=True)
        strength = log_decay.exp() * (one_later(now) + step - now)
        o = self._recurrence(q, k, strength[..., None, :, None] * one_later(v), log_decay)
        return self._output(o + _weighted(own, v).to(o), gate)

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
        gate, x, B, C, (step, log_decay, now, turn) = self._project(x_BD)
        v, v_before = self._values(x), self._values(state["x"])
        angle = (state["angle"] + turn).remainder(2 * math.pi)
        q, k = (rotated(biased(*y), angle) for y in ((C, self.q_bias_RHN), (B, self.k_bias_RHN)))

        # The state decays, and with it the pairs of the position before.
        before = state["S"] + _pairs(state["k"], (step - now)[:, None, :, None] * v_before)
        S_BHNV = log_decay.exp()[..., None, None] * before + _pairs(k, now[:, None, :, None] * v)
        o = (q[..., None] * S_BHNV[:, None]).sum(-2) + self.skip_H[:, None] * v
        return self._output(o, gate), {"S": S_BHNV, "angle": angle, "k": k, "x": x}

    def _project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return what a position reads from its input.

        Returns:
            Gates and inputs (..., H, V); normed B and C (..., R, N); and Δ, A Δ and λ Δ (..., H), and by how much keys
            and queries turn (..., H, A).
        """
        heads, states, weight = self.config.heads, self.config.state_size, self.inputs.weight
        fill = -len(weight) % 8 if runs_fused(u) else 0  # tensor cores want rows of whole 16 bytes
        mapped = F.linear(u, F.pad(weight, (0, 0, 0, fill))) if fill else self.inputs(u)
        gate, x, B, C, control, _ = mapped.split([*self.sizes, fill], dim=-1)
        gate, x = (rearrange(y, "... (h v) -> ... h v", h=heads) for y in (gate, x))

        B, C = (rearrange(y, "... (r n) -> ... r n", n=states) for y in (B, C))
        step, rate, share, angle = at_least_float32(control).split([heads, heads, heads, self.angles], dim=-1)
        step = F.softplus(step + self.step_bias_H)
        log_decay = -F.softplus(rate).clamp(min=SLOWEST) * step
        turn = math.pi * angle.tanh()[..., None, :] * step[..., None]
        return gate, x, self.k_norm(B), self.q_norm(C), (step, log_decay, share.sigmoid() * step, turn)

    def _values(self, x: Tensor) -> Tensor:
        """Return the values (..., R, H, V) of all ranks."""
        return x[..., None, :, :] if self.config.rank == 1 else x[..., None, :, :] * self.value_RHV

    def _own_products(self, C: Tensor, B: Tensor) -> Tensor:
        """Return the products (..., R, S, H) of the queries and keys of a position, from normed C and B (..., R, N).

        The products of biased vectors are multiplied out, so that no gradient of them is stored for each head.
        """
        C, B = at_least_float32(C), at_least_float32(B)
        of_vectors = (C[..., :, None, :] * B[..., None, :, :]).sum(-1)
        of_queries = (C[..., :, None, None, :] * self.k_bias_RHN).sum(-1)
        of_keys = (B[..., None, :, None, :] * self.q_bias_RHN[:, None]).sum(-1)
        return of_vectors[..., None] + of_queries + of_keys + (self.q_bias_RHN[:, None] * self.k_bias_RHN).sum(-1)

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
        return o + _weighted(missed[..., None] * _products(q, k), v)

    def _output(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from outputs of the ranks (..., R, H, V) and gates (..., H, V)."""
        gate = gate[..., None, :, :]
        y = y.to(gate)  # which is kept for the backward pass
        if self.config.rank == 1:
            y = y * F.silu(gate)
        else:
            y = (y * F.silu(gate * self.gate_RHV) * self.output_RHV).sum(-3, keepdim=True)
        return self.out(y.flatten(-3))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products (..., R, S, H) of the queries and keys (..., H, N) of each pair of ranks."""
    return (at_least_float32(q)[..., :, None, :, :] * at_least_float32(k)[..., None, :, :, :]).sum(-1)


def _weighted(weight: Tensor, v: Tensor) -> Tensor:
    """Return the sums (..., R, H, V) over ranks S of values (..., S, H, V) times weights (..., R, S, H)."""
    return (weight[..., None] * v[..., None, :, :, :]).sum(-3)


def _pairs(k: Tensor, v: Tensor) -> Tensor:
    """Return the sums (B, H, N, V) over ranks of the outer products of keys (B, R, H, N) and values (B, R, H, V)."""
    return (k[..., None] * v[..., None, :]).sum(1)
