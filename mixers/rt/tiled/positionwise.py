"""Steps of a layer that treat each position separately: feed-forward part and persistent pairs, and their gradients.

They take any range of positions (T, R, B, D), and weights with a leading run axis. Norms run in at least float32,
matrix products in the dtype of the weights.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS, at_least_float32
from mixers.rt.naive import Weights


def feed_forward(x_TRBD: Tensor, a_TRBD: Tensor, weights: Weights, scale: float) -> Tensor:
    """Outputs z (T, R, B, D) from inputs and attention outputs; see ``naive.feed_forward``."""
    u_TRBD = x_TRBD + scale * _linear(a_TRBD, weights.wo_DD)
    hidden_TRBF = F.gelu(_linear(_normed(u_TRBD, weights.mlp_norm_D), weights.up_FD))
    return u_TRBD + scale * _linear(hidden_TRBF, weights.down_DF)


def key_value(z_TRBD: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Persistent keys and values (T, R, B, D) of outputs; see ``naive.key_value``."""
    normed_TRBD = _normed(z_TRBD, weights.kv_norm_D)
    return _normed(_linear(normed_TRBD, weights.wk_DD), weights.k_norm_D), _linear(normed_TRBD, weights.wv_DD)


class PositionwiseBackward:
    """Gradients of activations through ``feed_forward`` and ``key_value``, for one range of positions after another.

    The constructor computes all factors that depend only on tensors of the forward pass, for all positions at once.

    Args:
        x_TRBD: inputs.
        a_TRBD: attention outputs, in the precision of gradients.
        z_TRBD: outputs.
        weights: weights in the dtype of products.
        scale: factor of the residual branches.
    """

    def __init__(self, x_TRBD: Tensor, a_TRBD: Tensor, z_TRBD: Tensor, weights: Weights, scale: float) -> None:
        self._weights = weights
        self._scale = scale
        self._z = z_TRBD

        # Feed-forward part.
        self._u = x_TRBD + scale * _linear(a_TRBD, weights.wo_DD)
        self._u_rms = _inverse_rms(self._u)
        normed_TRBD = self._u * self._u_rms * weights.mlp_norm_D[:, None]
        self._gelu_slope = _gelu_slope(_linear(normed_TRBD, weights.up_FD))

        # Persistent pairs.
        self._z_rms = _inverse_rms(z_TRBD)
        self._k_raw = _linear(_normed(z_TRBD, weights.kv_norm_D), weights.wk_DD).to(z_TRBD)
        self._k_rms = _inverse_rms(self._k_raw)

    def through_key_value(self, here: slice, dk: Tensor, dv: Tensor) -> Tensor:
        """Return the gradients of the outputs at positions ``here``, given those of their persistent pairs."""
        w = self._weights
        if w.k_norm_D is not None:
            dk = _rms_norm_backward(dk, self._k_raw[here], self._k_rms[here], w.k_norm_D)

        dnormed = (_linear(dk, w.wk_DD.mT) + _linear(dv, w.wv_DD.mT)).to(self._z)
        if w.kv_norm_D is None:
            return dnormed
        return _rms_norm_backward(dnormed, self._z[here], self._z_rms[here], w.kv_norm_D)

    def through_feed_forward(self, here: slice, dz: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of inputs and attention outputs at positions ``here``, given those of the outputs."""
        w = self._weights
        dpre = self._scale * _linear(dz, w.down_DF.mT) * self._gelu_slope[here]
        dnormed = _linear(dpre, w.up_FD.mT).to(dz)

        du = dz + _rms_norm_backward(dnormed, self._u[here], self._u_rms[here], w.mlp_norm_D)
        return du, self._scale * _linear(du, w.wo_DD.mT).to(dz)


def _linear(y: Tensor, w_ROI: Tensor) -> Tensor:
    """(T, R, B, inputs) -> (T, R, B, outputs), each run with its own matrix, in the matrix's dtype."""
    rows = y.to(w_ROI.dtype).transpose(0, 1).flatten(1, 2)
    return torch.bmm(rows, w_ROI.mT).unflatten(1, (len(y), -1)).transpose(0, 1)


def _normed(y: Tensor, gain_RD: Tensor | None) -> Tensor:
    """RMS-normalised y, or y where there is no gain."""
    if gain_RD is None:
        return y
    wide = at_least_float32(y)
    return (wide * _inverse_rms(wide)).to(y) * gain_RD[:, None].to(y)


def _inverse_rms(y: Tensor) -> Tensor:
    return torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)


def _rms_norm_backward(dnormed: Tensor, y: Tensor, inverse_rms: Tensor, gain_RD: Tensor) -> Tensor:
    """Gradient of y for ``normed = gain * y * inverse_rms``."""
    dn = dnormed * gain_RD[:, None].to(dnormed)
    return inverse_rms * (dn - y * inverse_rms.square() * (dn * y).mean(-1, keepdim=True))


def _gelu_slope(y: Tensor) -> Tensor:
    """Derivative of the erf GELU."""
    density = torch.exp(-0.5 * y.square()) * (2 * torch.pi) ** -0.5
    return 0.5 * (1 + torch.erf(y * 2**-0.5)) + y * density
