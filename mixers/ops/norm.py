"""Root mean square normalisation."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.native.library import is_recorded
from mixers.ops.native.norm import METHOD, norm_library
from mixers.ops.numerics import NORM_EPS, runs_fused
from mixers.ops.runs import over_batch, over_runs


def rms_norm(x: Tensor, gain_D: Tensor) -> Tensor:
    """Return ``gain * x / sqrt(mean(x^2) + eps)`` over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467).

    Statistics are in float32 for 16-bit inputs. Under bfloat16 autocast on a GPU the result is bfloat16, because matrix
    products read it.

    Raises:
        ValueError: inputs and gain have different widths.
    """
    check_width(x, gain_D)
    if runs_fused(x):
        from mixers.ops.kernels.norm import rms_norm_method

        return over_runs(rms_norm_method(torch.bfloat16), x, gain_D)[0]

    alike = (x.device, x.dtype) == (gain_D.device, gain_D.dtype)
    plain = alike and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if plain and not is_recorded() and norm_library(x.dtype) is not None:
        return over_runs(METHOD, x, gain_D)[0]
    return naive_rms_norm(x, gain_D)


def branching_rms_norm(x: Tensor, gain_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x)`` for a residual branch, and ``x`` for the residual stream that bypasses it.

    On a GPU, the backward kernel of the norm adds both gradients of ``x``; otherwise autograd adds them.

    Raises:
        ValueError: inputs and gain have different widths.
    """
    check_width(x, gain_D)
    if runs_fused(x):
        from mixers.ops.kernels.norm import rms_norm_method

        normed, rest = over_runs(rms_norm_method(torch.bfloat16, branching=True), x, gain_D)
        return normed, rest
    return rms_norm(x, gain_D), x


def check_width(x: Tensor, gain_D: Tensor) -> None:
    """Check that inputs have the width of a layer's parameters, because kernels and C code check no bounds.

    Raises:
        ValueError: they have another width.
    """
    if x.shape[-1:] != gain_D.shape:
        raise ValueError(f"inputs {tuple(x.shape)} do not end with the width of the layer, which is {gain_D.shape[-1]}")


def naive_rms_norm(x: Tensor, gain_D: Tensor) -> Tensor:
    """Return ``rms_norm`` by PyTorch's own operation."""
    normalise = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=NORM_EPS)
    return over_batch(normalise, x).type_as(x) * gain_D.type_as(x)
