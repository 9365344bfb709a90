# "package" stands for the one that you use.
import torch
from package import Attention, Rotary
from torch import Tensor, nn


class WithRotary(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.attention, self.rotary = Attention(dim, heads), Rotary(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        return self.attention(x, self.rotary(length), mask)
