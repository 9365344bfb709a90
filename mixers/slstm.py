"""The scalar memory of xLSTM."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.slstm import empty_memory, slstm, slstm_step
from mixers.parts import HeadNorm, MixerLayer, ShortConvolution, check_heads


class SLSTM(MixerLayer):
    """LSTM with an exponential input gate and a normaliser, whose gates read the previous output of their own head.

    c_t = f_t c_{t-1} + i_t z_t, n_t = f_t n_{t-1} + i_t and h_t = o_t c_t / n_t, where i = exp(·), f = σ(·),
    z = tanh(·) and o = σ(·) of W x_t + R h_{t-1} + b. W and R are block-diagonal, with a block (K, K) for each head and
    gate. For i and f, x goes through a short causal convolution and SiLU. The outputs are normed head by head; no
    linear map follows.

    Positions are computed one after the other; products with the inputs are computed for all at once. The recurrence
    and the convolution distinguish positions. State: D of c / n, D logarithms of n, D outputs (the paper has D each of
    c, n, their common scale m, and h, which say the same: ``mixers.ops.slstm``), and the newest inputs of the
    convolution.

    Differs from the reference:
        Beck et al. 2024, section 2.2, and https://github.com/NX-AI/xlstm, xlstm/blocks/slstm.

        - block: theirs has layer norms without bias and a gated MLP (GELU) of hidden width 1.3 D.
        - initialisation: theirs has PyTorch's default for the short convolution and its bias (uniform in ±1/√W, W = 4);
          here the convolution is normal with 1/√W and its bias zero. Its forget gates' biases fall from 5 to -7 over
          the channels of a head, by a power of the channel that grows from 0.3 to 1.6 with the depth; here every layer
          has 0.3, as the first of several does.
        - left out: the forget gate exp(·), which the paper allows and their code has not; clipping of h and of its
          gradient, which is off by default.
    """

    family: ClassVar[str] = "recurrent net"
    paper: ClassVar[str] = "Beck et al. 2024, arXiv:2405.04517"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of the scalar memory.

        Attributes:
            heads: number of heads; must divide the model width.
            convolution: positions that the short convolution spans.
        """

        heads: int = 4
        convolution: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        heads, size = config.heads, shape.width // config.heads
        if size < 2:
            raise ValueError(f"heads: {heads} leave heads of size 1, whose norm is always 0")

        # Gates of a head in the order input, forget, cell and output.
        self.convolution = ShortConvolution(shape.width, config.convolution, bias=True, silu=True)
        self.input_HGK = nn.Parameter(torch.randn(heads, 4 * size, size) * (0.4 / shape.width) ** 0.5)
        self.recurrent_HGK = nn.Parameter(torch.zeros(heads, 4 * size, size))
        bias_4K = torch.zeros(4, size)
        bias_4K[1] = 5 - 12 * torch.linspace(0, 1, size) ** 0.3
        self.bias = nn.Parameter(bias_4K.flatten().repeat(heads))

        self.norm = HeadNorm(heads, shape.width)
        self.norm.register_parameter("bias", None)

    def mix(self, x_BTD: Tensor) -> Tensor:
        h_HBTK = slstm(self._inputs(x_BTD, self.convolution(x_BTD)), self.recurrent_HGK, self._bias())
        return self._output(x_BTD, h_HBTK)

    def init_state(self, batch: int) -> State:
        """Return ``u`` = c / n, ``l`` = log n and outputs ``h`` (B, H, K), and the convolution's newest inputs."""
        memory = (y.transpose(0, 1) for y in empty_memory(self._bias(), batch))
        return {**dict(zip("ulh", memory, strict=True)), "convolution": self.convolution.init_state(batch)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        convolved_BD, newest = self.convolution.step(x_BD, state["convolution"])
        u_HBK, l_HBK, h_HBK = (state[name].transpose(0, 1) for name in "ulh")

        memory = slstm_step(self._inputs(x_BD, convolved_BD), (u_HBK, l_HBK, h_HBK), self.recurrent_HGK, self._bias())
        after = dict(zip("ulh", (y.transpose(0, 1) for y in memory), strict=True))
        return self._output(x_BD, memory[2]), {**after, "convolution": newest}

    @classmethod
    def loop_period(cls, config: Config) -> int:
        return 1

    def _bias(self) -> Tensor:
        return self.bias.view(self.config.heads, -1)

    def _inputs(self, x: Tensor, convolved: Tensor) -> Tensor:
        """Return the share (H, ..., 4K) of the inputs (..., D) in the gates."""
        halves = zip((convolved, x), self.input_HGK.chunk(2, dim=1), strict=True)
        return torch.cat([self._by_heads(y, half_HGK) for y, half_HGK in halves], dim=-1)

    def _by_heads(self, y: Tensor, weight_HGK: Tensor) -> Tensor:
        """Return the products (H, ..., G) of each head of y (..., D) with its weight."""
        heads = rearrange(y, "... (h k) -> h (...) k", h=self.config.heads)
        return (heads @ weight_HGK.mT).unflatten(1, y.shape[:-1])

    def _output(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the normed outputs (..., D) from those of the heads (H, ..., K), in the dtype of the inputs x."""
        joined = rearrange(h, "h ... k -> (...) (h k)")
        return self.norm(joined).view(x.shape).type_as(x)
