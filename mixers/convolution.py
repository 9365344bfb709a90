"""A short causal convolution over positions, each channel by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """``y_t = sum_w weight_w x_{t-W+1+w}`` for each channel, with zeros before the first position.

    Weights are normal with standard deviation 1/sqrt(W), which keeps the scale of white inputs; a bias starts at zero.
    """

    def __init__(self, width: int, size: int = 4, bias: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"convolution size: {size} must be at least 1")
        self.weight_DW = nn.Parameter(torch.randn(width, size) * size**-0.5)
        self.bias_D = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._filter(F.pad(x_BTD, (0, 0, self.weight_DW.shape[1] - 1, 0)))

    def init_state(self, batch: int) -> Tensor:
        """The W - 1 newest inputs (B, W-1, D), oldest first."""
        width, size = self.weight_DW.shape
        return self.weight_DW.new_zeros(batch, size - 1, width)

    def step(self, x_BD: Tensor, state_BWD: Tensor) -> tuple[Tensor, Tensor]:
        window_BWD = torch.cat([state_BWD, x_BD[:, None]], dim=1)
        return self._filter(window_BWD)[:, 0], window_BWD[:, 1:]

    def _filter(self, padded_BTD: Tensor) -> Tensor:
        size = self.weight_DW.shape[1]
        length = padded_BTD.shape[1] - size + 1
        taps = [self.weight_DW[:, w] * padded_BTD[:, w : w + length] for w in range(size)]
        y_BTD = sum(taps[1:], taps[0])
        return y_BTD if self.bias_D is None else y_BTD + self.bias_D
