# "package" stands for the one that you use.
from package import Config, Mixer


class WithConfig(Mixer):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__(Config(hidden_size=dim, num_heads=heads))
