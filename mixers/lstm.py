"""Long short-term memory."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, linear


class LSTM(MixerLayer):
    """LSTM with a forget gate, no peepholes and D cells, then a linear map of its outputs.

    Gates depend on the previous output, so positions are computed one after the other; products with the inputs are
    computed for all positions at once. Positions are told apart by the recurrence alone. State: D cells and D outputs.

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
        state, outputs = self.init_state(len(x_BTD)), []
        for driven_B4D in self._drive(x_BTD).unbind(1):
            state = self._cell(driven_B4D, state)
            outputs.append(state["h"])
        return self.out(torch.stack(outputs, dim=1))

    def init_state(self, batch: int) -> State:
        """Return the cells ``c`` and the outputs ``h`` (B, D), zeros."""
        return {name: self.bias.new_zeros(batch, self.shape.width) for name in ("c", "h")}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        state = self._cell(self._drive(x_BD), state)
        return self.out(state["h"]), state

    @classmethod
    def loop_period(cls, config: Any) -> int:
        return 1

    def _drive(self, x: Tensor) -> Tensor:
        """Return the share (..., 4D) of the inputs in the gates."""
        return at_least_float32(self.input(x)) + self.bias

    def _cell(self, driven_B4D: Tensor, state: State) -> State:
        """Return the state after a position."""
        with torch.autocast(driven_B4D.device.type, enabled=False):
            i_BD, f_BD, g_BD, o_BD = (driven_B4D + self.recurrent(state["h"])).chunk(4, dim=-1)
        c_BD = f_BD.sigmoid() * state["c"] + i_BD.sigmoid() * g_BD.tanh()
        return {"c": c_BD, "h": o_BD.sigmoid() * c_BD.tanh()}
