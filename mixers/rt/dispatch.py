"""Which implementation computes a Recurrent Transformer layer, and one entry to those of the recurrence alone."""

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from mixers.base import log_once
from mixers.ops.numerics import product_dtype
from mixers.ops.runs import Method, Optionals, Tensors, over_runs
from mixers.rt.naive import Weights, naive_recurrence
from mixers.rt.tiled import tiled_backward, tiled_forward

Chosen = Literal["naive", "tiled", "chunked", "triton"]
Implementation = Literal["auto"] | Chosen
WIDEST_OF_TRITON = 256


def _method(name: str, slopes_H: Tensor, scale: float, block: int) -> Method:
    """A forward and backward pass as an operation on x, q, k, v and the weights; see ``mixers.rt.tiled``."""
    if name == "tiled":
        run_forward, run_backward = tiled_forward, tiled_backward
    else:
        from mixers.rt.fused import passes as fused  # Triton is not there on every platform

        run_forward, run_backward = fused.fused_forward, fused.fused_backward

    def forward(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *weights: Any) -> tuple[Tensors, Tensors]:
        z, saved = run_forward(x, q, k, v, Weights(*weights), slopes_H, scale, block)
        return (z,), saved

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz,), (z,), (x, q, k, v, *weights) = gradients, outputs, tensors
        *dxs, dweights = run_backward(dz, x, q, k, v, Weights(*weights), slopes_H, scale, block, z, saved)
        return *dxs, *dweights

    return Method(forward, backward)


def recurrence(
    x_BTD: Tensor,
    q_BTD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    implementation: Literal["naive", "tiled", "triton"],
) -> Tensor:
    """Outputs z (B, T, D) of one layer, also under ``torch.func.vmap``; arguments as ``naive_recurrence``.

    Products inside run in the dtype of ``q_BTD`` (bfloat16 under autocast), the residual stream in that of ``x_BTD``.
    """
    if implementation == "naive":
        return naive_recurrence(x_BTD, q_BTD, k_BTD, v_BTD, weights, slopes_H, scale, block)
    method = _method(implementation, slopes_H, scale, block)
    (z_BTD,) = over_runs(method, x_BTD, q_BTD, k_BTD, v_BTD, *weights)
    return z_BTD


def choose(implementation: Implementation, x: Tensor, hidden: int, heads: int, block: int) -> Chosen:
    """Name of the implementation that runs for inputs or queries x (..., D).

    ``auto`` is on a GPU with products in bfloat16 ``triton`` up to width 256 and ``chunked`` beyond, ``tiled``
    elsewhere. Where their kernels do not support a shape, ``tiled`` runs and the log says why, once.
    """
    if implementation == "auto":
        if not (x.is_cuda and product_dtype(x) == torch.bfloat16):
            return "tiled"
        implementation = "triton" if x.shape[-1] <= WIDEST_OF_TRITON else "chunked"
    if implementation in ("chunked", "triton"):
        reason = _unsupported(implementation, x, hidden, heads, block)
        if reason is not None:
            log_once(f"Recurrent Transformer: tiled in place of {implementation}: no kernel for {reason}")
            return "tiled"
    return implementation


def _unsupported(implementation: str, x: Tensor, hidden: int, heads: int, block: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "this platform (Triton is not installed)"
    from mixers.rt.fused import passes as fused
    from mixers.rt.wavefront import passes as chunked

    width, dtype = x.shape[-1], product_dtype(x)
    if implementation == "chunked":
        return chunked.unsupported(width, heads, block, dtype, x.device)
    return fused.unsupported(width, heads, hidden, block, dtype, x.device)
