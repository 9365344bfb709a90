"""Root mean square normalisation."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS, runs_fused
from mixers.ops.runs import Method, Optionals, Tensors, over_batch, over_runs


def rms_norm(x: Tensor, gain_D: Tensor) -> Tensor:
    """Return ``gain * x / sqrt(mean(x^2) + eps)`` over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467).

    Statistics are in float32 for 16-bit inputs. Under bfloat16 autocast on a GPU the result is bfloat16, because matrix
    products read it.
    """
    if runs_fused(x):
        from mixers.ops.kernels.norm import rms_norm_method

        return over_runs(rms_norm_method(torch.bfloat16), x, gain_D)[0]

    if x.device.type == "cpu" and x.dtype == gain_D.dtype and x.dtype in (torch.float32, torch.float64):
        return over_runs(CPU_METHOD, x, gain_D)[0]
    return naive_rms_norm(x, gain_D)


def branching_rms_norm(x: Tensor, gain_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x)``, which a residual branch reads, and ``x`` for what goes past the branch.

    On a GPU, the kernel of the norm's gradient adds both gradients of ``x``; otherwise autograd does.
    """
    if runs_fused(x):
        from mixers.ops.kernels.norm import rms_norm_method

        normed, rest = over_runs(rms_norm_method(torch.bfloat16, branching=True), x, gain_D)
        return normed, rest
    return rms_norm(x, gain_D), x


def naive_rms_norm(x: Tensor, gain_D: Tensor) -> Tensor:
    """Return what ``rms_norm`` does, in PyTorch's own operation, which the CPU computes in parts."""
    normalise = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=NORM_EPS)
    return over_batch(normalise, x).type_as(x) * gain_D.type_as(x)


def _cpu_forward(x: Tensor, gain_RD: Tensor) -> tuple[Tensors, Tensors]:
    """Return ``(outputs,)``, and the inverse root mean squares (R, N, 1) of all N rows of a run for the backward."""
    x_RND = _rows(x)
    inverse_rms = torch.linalg.vector_norm(x_RND, dim=-1, keepdim=True)
    inverse_rms.square_().div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()
    y_RND = (x_RND * inverse_rms).mul_(gain_RD[:, None])
    return (y_RND.view(x.shape),), (inverse_rms,)


def _cpu_backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
    """Return the gradients of rows and gains; ``n`` are normed rows before their gain, ``dn`` their gradients."""
    (dy,), (x, gain_RD), (inverse_rms,) = gradients, tensors, saved
    dy_RND = _rows(dy)

    n_RND = _rows(x) * inverse_rms
    dgain_RND = dy_RND * n_RND
    dn_RND = dy_RND * gain_RD[:, None]
    mean_RN1 = torch.bmm(dgain_RND, gain_RD[..., None]).div_(x.shape[-1])  # of n dn
    dx_RND = torch.addcmul(dn_RND, n_RND, mean_RN1, value=-1).mul_(inverse_rms)
    return dx_RND.view(x.shape), dgain_RND.sum(1)


def _rows(x: Tensor) -> Tensor:
    """(R, ..., D) -> (R, N, D)."""
    return x.unsqueeze(1).flatten(1, -2)


CPU_METHOD = Method(_cpu_forward, _cpu_backward, label="rms_norm")
"""Both passes in few operations. PyTorch's own backward pass takes the norm apart."""
