"""One entry to the recurrence of the Recurrent Transformer, whatever computes it, also under ``torch.func.vmap``."""

import importlib.util
import logging
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from mixers.rt.naive import Weights, naive_recurrence
from mixers.rt.tiled import tiled_backward, tiled_forward
from mixers.runs import Method, Optionals, Tensors, over_runs

Implementation = Literal["auto", "naive", "tiled", "chunked", "triton"]
WIDEST_OF_TRITON = 256

log = logging.getLogger(__name__)


def _method(name: str, slopes_H: Tensor, scale: float, block: int) -> Method:
    """A forward and backward pass as an operation on x, q, k, v and the weights; see ``mixers.rt.tiled``."""
    if name == "tiled":
        run_forward, run_backward = tiled_forward, tiled_backward
    elif name == "chunked":
        from mixers.rt import chunked  # Triton is not there on every platform

        run_forward, run_backward = chunked.chunked_forward, chunked.chunked_backward
    else:
        from mixers.rt import kernels

        run_forward, run_backward = kernels.triton_forward, kernels.triton_backward

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
    block: int = 1,
    implementation: Implementation = "auto",
) -> Tensor:
    """Outputs z (B, T, D) of one layer; arguments as ``naive_recurrence``.

    Products inside run in the dtype of ``q_BTD`` (bfloat16 under autocast), the residual stream in that of ``x_BTD``.
    """
    name = choose(implementation, q_BTD, weights.up_FD.shape[0], len(slopes_H), block)
    if name == "naive":
        return naive_recurrence(x_BTD, q_BTD, k_BTD, v_BTD, weights, slopes_H, scale, block)
    (z_BTD,) = over_runs(_method(name, slopes_H, scale, block), x_BTD, q_BTD, k_BTD, v_BTD, *weights)
    return z_BTD


def choose(implementation: Implementation, q_BTD: Tensor, hidden: int, heads: int, block: int) -> str:
    """Name of the implementation that runs.

    ``auto`` is on a GPU in bfloat16 ``triton`` up to width 256 and ``chunked`` beyond, ``tiled`` elsewhere. Where their
    kernels do not support a shape, ``tiled`` runs and the log says why, once.
    """
    if implementation == "auto":
        if not (q_BTD.is_cuda and q_BTD.dtype == torch.bfloat16):
            return "tiled"
        implementation = "triton" if q_BTD.shape[-1] <= WIDEST_OF_TRITON else "chunked"
    if implementation in ("chunked", "triton"):
        reason = _unsupported(implementation, q_BTD, hidden, heads, block)
        if reason is not None:
            _log_once(f"Recurrent Transformer: tiled in place of {implementation}: no kernel for {reason}")
            return "tiled"
    return implementation


def _unsupported(implementation: str, q_BTD: Tensor, hidden: int, heads: int, block: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "this platform (Triton is not installed)"
    from mixers.rt import chunked, kernels

    width = q_BTD.shape[-1]
    if implementation == "chunked":
        return chunked.unsupported(width, heads, block, q_BTD.dtype, q_BTD.device)
    return kernels.unsupported(width, heads, hidden, block, q_BTD.dtype, q_BTD.device)


@cache
def _log_once(message: str) -> None:
    log.warning(message)
