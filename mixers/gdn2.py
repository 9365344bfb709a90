"""Gated DeltaNet-2: the delta rule with separate gates for what is erased and what is written."""

from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.base import Shape
from mixers.deltanet import DeltaNet
from mixers.kda import KimiDeltaAttention
from mixers.options import switch
from mixers.parts import linear


class GatedDeltaNet2(KimiDeltaAttention):
    """S_t = (I - k_t (e_t ⊙ k_t)^T) diag(α_t) S_{t-1} + k_t (w_t ⊙ v_t)^T, keys of length one.

    The strength β of Kimi Delta Attention becomes two gates: e = sigmoid erases by channels of the key, and w = sigmoid
    writes channels of the value. With e = w = β it is that layer. The decays α, the low-rank maps, the convolution and
    the state are as there; the output gate is a SiLU.

    The transition matrix is similar to the symmetric √α (I - u u^T) √α with u_i = √e_i k_i. Its eigenvalues are in
    (0, 1). With ``negative_eigenvalues`` e = 2 sigmoid, and they are in (-1, 1).

    Differs from the reference:
        Hatamizadeh et al. 2026, and https://github.com/fla-org/flash-linear-attention, fla/layers/gdn2.py.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 4 heads of D/4 channels, for which the kernels here are made; theirs has 16 heads of 128 at D = 2048.
          Low-rank maps have the rank of a head's channels, as theirs.
        - computation: the output gate is a SiLU, as in the authors' code (https://github.com/NVlabs/GatedDeltaNet-2);
          that of flash-linear-attention is a sigmoid.
        - initialisation: the authors' code has Xavier's for linear maps (uniform, with gain 2^-2.5), and PyTorch's
          default for short convolutions; here the convolutions have 1/√W, W = 4, and the second factors of low-rank
          maps 0.226/√rank, as in Kimi Delta Attention.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Hatamizadeh et al. 2026, arXiv:2605.22791"

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaNet.Config):
        """Settings of Gated DeltaNet-2.

        Attributes:
            heads: number of heads; must divide the model width.
            convolution: positions that the short convolution spans.
            negative_eigenvalues: double the gate that erases, for eigenvalues of the state's transition between -1 and
                1 in place of 0 and 1.
        """

        negative_eigenvalues: bool = switch(False)

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.strength = linear(shape.width, 2 * shape.width)

    def _edit(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        erase, write = rearrange(self.strength(x).sigmoid(), "... (n h k) -> n ... h k", n=2, h=self.config.heads)
        if self.config.negative_eigenvalues:
            erase = 2 * erase
        return k, write * v, erase * k

    def _opened(self, gate: Tensor) -> Tensor:
        return F.silu(gate)
