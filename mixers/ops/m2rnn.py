"""A recurrent net whose state is a matrix for each head, over positions.

Dimensions beside those of ``mixers.base``: K keys, the rows of a head's state, and V values, its columns.
"""

import torch
from torch import Tensor

from mixers.ops.loops import loop
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs


def m2rnn(q_BTK: Tensor, k_BTK: Tensor, v_BTHV: Tensor, f_BTH: Tensor, weight_HVV: Tensor) -> Tensor:
    """Return ``y_t = q_t^T S_t`` (B, T, H, V) with ``S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_t^T)``.

    Args:
        q_BTK: queries, which all heads share.
        k_BTK: keys, which all heads share.
        v_BTHV: values.
        f_BTH: shares of the state that are kept.
        weight_HVV: the recurrent weights W.
    """
    if runs_fused(v_BTHV):
        from mixers.ops.kernels.m2rnn import fits_m2rnn, m2rnn_method

        if fits_m2rnn(k_BTK.shape[-1], v_BTHV.shape[-1]):
            return over_runs(m2rnn_method(torch.bfloat16), q_BTK, k_BTK, v_BTHV, f_BTH, weight_HVV)[0]

    return loop("m2rnn", _by_positions, q_BTK, k_BTK, v_BTHV, f_BTH, weight_HVV)[0]


def _by_positions(q_BTK: Tensor, k_BTK: Tensor, v_BTHV: Tensor, f_BTH: Tensor, weight_HVV: Tensor) -> Tensor:
    """Return ``m2rnn``."""
    S_BHKV = at_least_float32(k_BTK).new_zeros(len(k_BTK), len(weight_HVV), k_BTK.shape[-1], v_BTHV.shape[-1])
    outputs = []
    for q_BK, k_BK, v_BHV, f_BH in zip(*(y.unbind(1) for y in (q_BTK, k_BTK, v_BTHV, f_BTH)), strict=True):
        y_BHV, S_BHKV = m2rnn_step(S_BHKV, q_BK, k_BK, v_BHV, f_BH, weight_HVV)
        outputs.append(y_BHV)
    return torch.stack(outputs, dim=1)


def m2rnn_step(
    S_BHKV: Tensor, q_BK: Tensor, k_BK: Tensor, v_BHV: Tensor, f_BH: Tensor, weight_HVV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, V) and the state (B, H, K, V) after one position of ``m2rnn``; at least float32."""
    S, q, k, v, f, weight = map(at_least_float32, (S_BHKV, q_BK, k_BK, v_BHV, f_BH, weight_HVV))
    with no_autocast(q.device):
        new = torch.tanh(S @ weight + k[:, None, :, None] * v[..., None, :])
        S = torch.lerp(new, S, f[..., None, None])
        return (q[:, None, None] @ S).squeeze(-2), S
