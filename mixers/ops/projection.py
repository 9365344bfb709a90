"""Queries, keys and values of a layer's inputs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.norm import check_width, rms_norm
from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def normed_qkv(
    x: Tensor,
    gain_D: Tensor,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    q_DD: Tensor,
    k_DD: Tensor,
    v_DD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (..., D) of ``rms_norm(x)``; queries and keys with gains are normed again.

    Args:
        x: inputs (..., D).
        gain_D: gain of the norm of the inputs.
        q_gain_D, k_gain_D: gains of QK-norm over the full width; None leaves it out.
        q_DD, k_DD, v_DD: weights of the three maps.

    Raises:
        ValueError: inputs and gain have different widths.
    """
    check_width(x, gain_D)
    if runs_fused(x):
        from mixers.ops.kernels.projection import fits_project, project_method

        if fits_project(x.shape[-1]):
            weights = q_DD, k_DD, v_DD
            w_3DD = torch.stack(weights).detach().bfloat16()  # here, so that a compiled step does it once
            q, k, v = over_runs(project_method(), x, gain_D, q_gain_D, k_gain_D, *weights, w_3DD)
            return q, k, v

    normed = rms_norm(x, gain_D)
    q, k, v = (F.linear(normed, weight_DD) for weight_DD in (q_DD, k_DD, v_DD))

    # QK-norm.
    q = q if q_gain_D is None else rms_norm(q, q_gain_D)
    k = k if k_gain_D is None else rms_norm(k, k_gain_D)
    return q, k, v
