"""The MLP branch that ends a pre-norm layer."""

from torch import Tensor
from torch.nn import functional as F

from mixers.ops.norm import rms_norm
from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def residual_mlp(x: Tensor, y: Tensor, gain_D: Tensor, up_FD: Tensor, down_DF: Tensor, scale: float) -> Tensor:
    """Return ``u + scale down(gelu(up(rms_norm(u))))`` with ``u = x + scale y``.

    Args:
        x: input (..., D) of the layer.
        y: output (..., D) of its mixer.
        gain_D: gain of the norm.
        up_FD: weight of the map from width D to the hidden width F.
        down_DF: weight of the map back.
        scale: factor of both residual branches.
    """
    if runs_fused(x):
        from mixers.ops.kernels.mlp import fits_mlp, mlp_method

        if fits_mlp(*down_DF.shape):
            low = (w.detach().bfloat16() for w in (up_FD, down_DF))  # here, so that a compiled step does it once
            return over_runs(mlp_method(scale), x, y.bfloat16(), gain_D, up_FD, down_DF, *low)[0]

    u = x + scale * y
    hidden = F.gelu(F.linear(rms_norm(u, gain_D), up_FD))
    return u + scale * F.linear(hidden, down_DF)
