"""The scalar memory of xLSTM over positions, given the products of the inputs with their weights.

Dimensions beside those of ``mixers.base``: G = 4K gates of a head, in the order input, forget, cell and output.

The paper's memory is c = f c + i z with the normaliser n = f n + i, both over exp(m) so that they do not overflow. Here
its state is u = c / n and l = log n + m, which follow

    l_t = log(f_t exp(l_{t-1}) + i_t),    u_t = a_t u_{t-1} + (1 - a_t) z_t,    a_t = f_t exp(l_{t-1} - l_t).

The outputs are the same, o c / n = o u, for every stabiliser m; the logarithms need none.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.loops import loop
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs

Memory = tuple[Tensor, Tensor, Tensor]
"""Cells u over their normalisers, logarithms l of the normalisers, and outputs h, of one shape."""


def slstm(inputs_HBTG: Tensor, recurrent_HGK: Tensor, bias_HG: Tensor) -> Tensor:
    """Return all outputs h (H, B, T, K), starting from an empty memory.

    Args:
        inputs_HBTG: contribution of the inputs to the gates.
        recurrent_HGK: weight of the previous output of the same head.
        bias_HG: bias of the gates.
    """
    if runs_fused(inputs_HBTG):
        from mixers.ops.kernels.slstm import fits_slstm, slstm_method

        if fits_slstm(recurrent_HGK.shape[-1]):
            return over_runs(slstm_method(torch.bfloat16), inputs_HBTG, recurrent_HGK, bias_HG)[0]

    return loop("slstm", _by_positions, inputs_HBTG, recurrent_HGK, bias_HG)[0]


def _by_positions(inputs_HBTG: Tensor, recurrent_HGK: Tensor, bias_HG: Tensor) -> Tensor:
    """Return ``slstm``."""
    memory = empty_memory(bias_HG, inputs_HBTG.shape[1])
    outputs = []
    for inputs_HBG in inputs_HBTG.unbind(2):
        memory = slstm_step(inputs_HBG, memory, recurrent_HGK, bias_HG)
        outputs.append(memory[2])
    return torch.stack(outputs, dim=2)


def empty_memory(bias_HG: Tensor, batch: int) -> Memory:
    """Return the memory (H, B, K) before the first position, in at least float32: zeros, and log 0."""
    zeros_HBK = at_least_float32(bias_HG).new_zeros(len(bias_HG), batch, bias_HG.shape[1] // 4)
    return zeros_HBK, torch.full_like(zeros_HBK, -torch.inf), zeros_HBK


def slstm_step(inputs_HBG: Tensor, memory: Memory, recurrent_HGK: Tensor, bias_HG: Tensor) -> Memory:
    """Return the memory (H, B, K) after one position of ``slstm``, from that before it; at least float32."""
    u_HBK, l_HBK, h_HBK = map(at_least_float32, memory)
    with no_autocast(inputs_HBG.device):
        recurrent_HBG = h_HBK @ at_least_float32(recurrent_HGK).mT
    i_HBK, f_HBK, z_HBK, o_HBK = (at_least_float32(inputs_HBG) + bias_HG[:, None] + recurrent_HBG).chunk(4, dim=-1)

    # Kept and new memory in logarithms.
    kept_HBK = F.logsigmoid(f_HBK) + l_HBK
    u_HBK = torch.lerp(z_HBK.tanh(), u_HBK, (kept_HBK - i_HBK).sigmoid())
    return u_HBK, torch.logaddexp(kept_HBK, i_HBK), o_HBK.sigmoid() * u_HBK
