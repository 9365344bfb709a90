"""Root mean square normalisation."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS, runs_fused
from mixers.ops.runs import over_batch, over_runs


def rms_norm(x: Tensor, gain_D: Tensor) -> Tensor:
    """Return ``gain * x / sqrt(mean(x^2) + eps)`` over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467).

    Statistics are in float32 for 16-bit inputs. Under bfloat16 autocast on a GPU the result is bfloat16, because matrix
    products read it.
    """
    if runs_fused(x):
        from mixers.ops.kernels.norm import rms_norm_method

        return over_runs(rms_norm_method(torch.bfloat16), x, gain_D)[0]

    normalise = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=NORM_EPS)
    return over_batch(normalise, x).type_as(x) * gain_D.type_as(x)
