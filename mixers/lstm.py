"""Long short-term memory."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.lstm import lstm, lstm_step
from mixers.parts import MixerLayer, linear


class LSTM(MixerLayer):
    """LSTM with a forget gate, no peepholes and D cells, then a linear map of its outputs.

    Gates depend on the previous output, so positions are computed one after the other; products with the inputs are
    computed for all positions at once. Only the recurrence distinguishes positions. State: D cells and D outputs.

    Differs from the reference:
        ``torch.nn.LSTM`` with one layer.

        - block: theirs is the recurrence alone, without norm, residual branch and MLP.
        - computation: one bias for each gate; theirs has two, which are added.
        - initialisation: matrices are normal with standard deviation 1/√D, the bias of the forget gate is 1, the others
          are 0; theirs is uniform in ±1/√D for all, biases included.
        - left out: dropout, projections (``proj_size``), the reverse direction.
        - added: a linear map of the outputs, as the other mixers have.
    """

    family: ClassVar[str] = "recurrent net"
    paper: ClassVar[str] = (
        "Hochreiter & Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735; forget gate: Gers et al. 2000, "
        "doi:10.1162/089976600300015015"
    )

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        width = shape.width

        self.input = linear(width, 4 * width)
        self.recurrent = linear(width, 4 * width)
        self.out = linear(width, width)
        forget_open = torch.tensor([0.0, 1.0, 0.0, 0.0])
        self.bias = nn.Parameter(forget_open.repeat_interleave(width))

    def mix(self, x_BTD: Tensor) -> Tensor:
        return self.out(lstm(self.input(x_BTD), self.recurrent.weight, self.bias))

    def init_state(self, batch: int) -> State:
        """Return the cells ``c`` and the outputs ``h`` (B, D), zeros."""
        return {name: self.bias.new_zeros(batch, self.shape.width) for name in ("c", "h")}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        c_BD, h_BD = lstm_step(self.input(x_BD), state["c"], state["h"], self.recurrent.weight, self.bias)
        return self.out(h_BD), {"c": c_BD, "h": h_BD}

    @classmethod
    def loop_period(cls, config: Any) -> int:
        return 1
