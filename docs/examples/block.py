from torch import Tensor, nn


class Block(nn.TransformerEncoderLayer):
    whole_layer = True

    def __init__(self, dim: int, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, 4 * dim, dropout, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)
