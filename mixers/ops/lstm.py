"""Long short-term memory over positions, given the products of the inputs with their weights.

Dimensions beside those of ``mixers.base``: G = 4D gates, in the order input, forget, cell and output.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.loops import loop
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs


def lstm(inputs_BTG: Tensor, recurrent_GD: Tensor, bias_G: Tensor) -> Tensor:
    """Return all outputs h (B, T, D), starting from zeros.

    Args:
        inputs_BTG: contribution of the inputs to the gates.
        recurrent_GD: weight of the previous output.
        bias_G: bias of the gates.
    """
    if runs_fused(inputs_BTG):
        from mixers.ops.kernels.lstm import fits_lstm, lstm_method
        from mixers.ops.kernels.lstm_loop import lstm_loop_method

        method = lstm_method if fits_lstm(recurrent_GD.shape[1]) else lstm_loop_method
        return over_runs(method(torch.bfloat16), inputs_BTG, recurrent_GD, bias_G)[0]

    return loop("lstm", _by_positions, inputs_BTG, recurrent_GD, bias_G)[0]


def _by_positions(inputs_BTG: Tensor, recurrent_GD: Tensor, bias_G: Tensor) -> Tensor:
    """Return ``lstm``."""
    c_BD = h_BD = at_least_float32(bias_G).new_zeros(len(inputs_BTG), recurrent_GD.shape[1])
    outputs = []
    for driven_BG in (at_least_float32(inputs_BTG) + bias_G).unbind(1):
        c_BD, h_BD = _cell(driven_BG, c_BD, h_BD, recurrent_GD)
        outputs.append(h_BD)
    return torch.stack(outputs, dim=1)


def lstm_step(
    inputs_BG: Tensor, c_BD: Tensor, h_BD: Tensor, recurrent_GD: Tensor, bias_G: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cells and the output (B, D) after one position of ``lstm``, from those before it."""
    return _cell(at_least_float32(inputs_BG) + bias_G, c_BD, h_BD, recurrent_GD)


def _cell(driven_BG: Tensor, c_BD: Tensor, h_BD: Tensor, recurrent_GD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells and the output after a position; at least float32."""
    with no_autocast(driven_BG.device):
        gates_BG = driven_BG + F.linear(at_least_float32(h_BD), at_least_float32(recurrent_GD))
    i_BD, f_BD, g_BD, o_BD = gates_BG.chunk(4, dim=-1)
    c_BD = f_BD.sigmoid() * c_BD + i_BD.sigmoid() * g_BD.tanh()
    return c_BD, o_BD.sigmoid() * c_BD.tanh()
