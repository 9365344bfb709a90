from torch import nn


class Recurrent(nn.GRU):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, batch_first=True)
