"""The gated MLP of other people's models (Shazeer 2020, arXiv:2002.05202), as a member of a stack."""

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """``down(silu(gate x) * up x)``, with a hidden width of 8/3 of the model's, rounded up to a multiple of 16."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-(8 * dim // 3) // 16) * 16
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in 2 * [(dim, hidden)] + [(hidden, dim)]
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
