import torch
from torch import Tensor

from mixers.base import Layer, Shape, State
from mixers.parts import MLP, RMSNorm, linear


class ParallelMean(Layer):
    """The mean of all inputs so far beside the MLP: z = x + s (out(mean) + mlp(y)) with y = norm(x)."""

    def __init__(self, config: Layer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.norm = RMSNorm(shape.width)
        self.out = linear(shape.width, shape.width)
        self.mlp = MLP(shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norm(x_BTD)
        count_T1 = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)[:, None]
        return self._add(x_BTD, y_BTD, y_BTD.cumsum(1) / count_T1)

    def init_state(self, batch: int) -> State:
        weight = self.out.weight
        return {"sum": weight.new_zeros(batch, self.shape.width), "count": weight.new_zeros(batch, 1)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_BD = self.norm(x_BD)
        state = {"sum": state["sum"] + y_BD, "count": state["count"] + 1}
        return self._add(x_BD, y_BD, state["sum"] / state["count"]), state

    def _add(self, x: Tensor, y: Tensor, mean: Tensor) -> Tensor:
        return x + self.shape.residual_scale * (self.out(mean) + self.mlp(y))
