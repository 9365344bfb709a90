"""DeltaProduct: several steps of the delta rule at each position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.deltanet import EPS_RATIO, DeltaNet
from mixers.mamba2 import ScalarDecay
from mixers.ops.convolution import in_parts
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step, unit
from mixers.parts import check_at_least, joined, linear


class DeltaProduct(DeltaNet):
    """S ← α_t S, then S ← (I - β_n k_n k_n^T) S + β_n k_n v_n^T for n = 1, …, N: N pairs of key and value a position.

    Every pair has keys of length one and a write strength β = 2 sigmoid of its own. The transition matrix is α times
    the product of N generalised Householder matrices, which can be a rotation for N ≥ 2. One matrix has the eigenvalue
    1 - β on its key, in (-1, 1), or with β = sigmoid, without ``negative_eigenvalues``, in (0, 1). The decay α of each
    head is as in Gated DeltaNet; without ``gated`` it is 1. The outputs q^T S after the last pair pass an RMS norm and
    a SiLU gate.

    Queries, keys and values go through a short causal convolution and SiLU. The convolution, the decays and causality
    distinguish positions. State: for each head a matrix (K, K), and the newest inputs of the convolution.

    Differs from the reference:
        Siems et al. 2025, section 3, and https://github.com/fla-org/flash-linear-attention,
        fla/layers/gated_deltaproduct.py and fla/models/gated_deltaproduct.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 4 heads with keys and values of D/4 channels, for which the kernels here are made; theirs has 6 heads
          with keys of D/8 and values of D/4, so keys are 3/4 D and values 3/2 D wide.
        - computation: the defaults are those of their layer, with two pairs, decays and negative eigenvalues; their
          language model's configuration has one pair and neither. Their experiments with words of groups have no
          decays, convolution or output gate. The norm of the outputs has the ε 1e-5 of their layer's default; their
          language model sets 1e-6.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions; here the
          convolutions have 1/√W, W = 4.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Siems et al. 2025, arXiv:2502.10297"

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaNet.Config):
        """Settings of DeltaProduct.

        Attributes:
            heads: number of heads; must divide the model width.
            convolution: positions that the short convolution spans.
            negative_eigenvalues: double the write strengths, for eigenvalues of each factor of the state's transition
                between -1 and 1 in place of 0 and 1.
            householders: number N of pairs of key and value a position; the paper has 1 to 4.
            gated: let the state decay before the first pair of a position.
        """

        negative_eigenvalues: bool = True
        householders: int = 2
        gated: bool = True

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        check_at_least(1, config, "householders")
        super().__init__(config, shape, config.householders)
        if config.gated:
            self.step_size = linear(shape.width, config.heads)
            self.decay = ScalarDecay(config.heads, least=0.0)
        self.gate = linear(shape.width, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        gate, *controls = joined(x_BTD, *self._maps)
        q, k, v, g, b = self._pairs(self.convolution.parts(self.qkv(x_BTD), self._shapes), *controls)
        k, v, b = (y.flatten(1, 2) for y in (k, v, b))
        return self._gated(matrix_recurrence(q, k, v, g, b_BTHK=b), gate)

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        qkv_BD, convolution = self.convolution.step(self.qkv(x_BD), state["convolution"])
        gate, *controls = joined(x_BD, *self._maps)
        q, k, v, g, b = self._pairs(in_parts(qkv_BD, self._shapes), *controls)

        # The decay acts before the first pair, and the query reads after the last.
        S_BHKK = state["S"]
        for n in range(self.config.householders):
            o_BHK, S_BHKK = matrix_step(S_BHKK, q, k[:, n], v[:, n], None if n else g, b_BHK=b[:, n])
        return self._gated(o_BHK, gate), {"S": S_BHKK, "convolution": convolution}

    @property
    def _maps(self) -> list[nn.Linear]:
        """Return the maps to output gate, write strengths and, with decays, step sizes."""
        return [self.gate, self.strength, *([self.step_size] if self.config.gated else [])]

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of a position's queries, keys and values."""
        pairs, heads, channels = self.config.householders, self.config.heads, self.shape.width // self.config.heads
        return [(heads, channels), *2 * [(pairs, heads, channels)]]

    def _pairs(
        self, qkv: Sequence[Tensor], strength: Tensor, step: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return queries (..., H, K), written keys and values (..., N, H, K), decays or None, and erased keys."""
        q, k, v = qkv
        q, k = unit(q) * (EPS_RATIO / q.shape[-1]) ** 0.5, unit(k)

        strength = rearrange(strength.sigmoid(), "... (n h) -> ... n h 1", n=self.config.householders)
        if self.config.negative_eigenvalues:
            strength = 2 * strength
        g = None if step is None else self.decay(step)[1][..., None]
        return q, strength * k, v, g, k

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from the outputs ``o`` (..., H, K) of the recurrence."""
        return self.out(F.silu(gate) * self.norm(o).flatten(-2))
