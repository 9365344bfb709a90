from dataclasses import dataclass

import torch
from torch import Tensor

from mixers.base import Shape, State
from mixers.parts import MixerLayer, linear


class DecayingMean(MixerLayer):
    """A linear map of an average that forgets: h_t = decay h_{t-1} + (1 - decay) x_t."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        decay: float = 0.9

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.out = linear(shape.width, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        state, outputs = self.init_state(len(x_BTD)), []
        for x_BD in x_BTD.unbind(1):
            y_BD, state = self.mix_one(x_BD, state)
            outputs.append(y_BD)
        return torch.stack(outputs, dim=1)

    def init_state(self, batch: int) -> State:
        return {"h": self.out.weight.new_zeros(batch, self.shape.width)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        h_BD = self.config.decay * state["h"] + (1 - self.config.decay) * x_BD
        return self.out(h_BD), {"h": h_BD}
