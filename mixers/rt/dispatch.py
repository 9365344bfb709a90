"""The choice between implementations of the Recurrent Transformer, and one entry to implementations of its recurrence.

Three implementations compute the recurrence inside a layer: ``naive`` is the oracle, ``tiled`` the published method,
and ``fused`` consists of Triton kernels for small models. Two others are called by ``mixers.rt.layer``: ``native``, C
code for CPUs, computes whole layers, and ``wavefront`` whole stacks of wide layers.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mixers.base import log_once
from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.native.library import is_recorded
from mixers.ops.numerics import has_triton, product_dtype
from mixers.ops.runs import over_runs
from mixers.rt.naive import Weights, naive_recurrence
from mixers.rt.native.passes import library
from mixers.rt.tiled.passes import tiled_backward, tiled_forward

Chosen = Literal["naive", "tiled", "native", "wavefront", "fused"]
Implementation = Literal["auto"] | Chosen
WIDEST_OF_FUSED = 128
"""Largest model width at which ``auto`` prefers ``fused`` to ``wavefront``, as measured on an H200."""


def _method(name: str, slopes_H: Tensor, scale: float, block: int) -> Method:
    """Return forward and backward of ``tiled`` or ``fused`` as an operation on x, q, k, v and the weights."""
    run_forward: Callable[..., Any] = tiled_forward
    run_backward: Callable[..., Any] = tiled_backward
    if name == "fused":
        from mixers.rt.fused import passes as fused  # Triton does not exist on every platform

        run_forward, run_backward = fused.fused_forward, fused.fused_backward

    def forward(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *weights: Any) -> tuple[Tensors, Tensors]:
        z, saved = run_forward(x, q, k, v, Weights(*weights), slopes_H, scale, block)
        return (z,), saved

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz,), (z,), (x, q, k, v, *weights) = gradients, outputs, tensors
        *dxs, dweights = run_backward(dz, x, q, k, v, Weights(*weights), slopes_H, scale, block, z, saved)
        return *dxs, *dweights

    return Method(forward, backward, label=f"rt {name}")


def recurrence(
    x_BTD: Tensor,
    q_BTD: Tensor,
    k_BTD: Tensor | None,
    v_BTD: Tensor | None,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    implementation: Literal["naive", "tiled", "fused"],
) -> Tensor:
    """Return the outputs z (B, T, D) of one layer, also under ``torch.func.vmap``; arguments as ``naive_recurrence``.

    Matrix products run in the dtype of ``q_BTD`` (bfloat16 under autocast), the residual stream in that of ``x_BTD``.
    """
    if implementation == "naive":
        return naive_recurrence(x_BTD, q_BTD, k_BTD, v_BTD, weights, slopes_H, scale, block)
    method = _method(implementation, slopes_H, scale, block)
    (z_BTD,) = over_runs(method, x_BTD, q_BTD, k_BTD, v_BTD, *weights)
    return z_BTD


def choose(implementation: Implementation, x: Tensor, hidden: int, heads: int, block: int) -> Chosen:
    """Choose the implementation of a layer by device and shape.

    ``auto`` picks the fastest one that supports the case. On a GPU with products in bfloat16, it prefers ``fused`` up
    to width 128 and ``wavefront`` beyond. On a CPU with a C compiler, it picks ``native`` for blocks of one position in
    a single precision. Otherwise it picks ``tiled``. If the named one does not support the case, or
    with bfloat16 on a GPU neither of the preferred ones does, ``tiled`` runs, and the log says why, once.

    Args:
        implementation: name of an implementation, or ``auto``.
        x: inputs or queries (..., D).
        hidden: hidden width F of the MLP.
        heads: number of heads.
        block: positions of a block.

    Returns:
        The implementation that runs.
    """
    preferred: tuple[Chosen, ...]
    if implementation != "auto":
        preferred = (implementation,)
    elif not (x.is_cuda and product_dtype(x) == torch.bfloat16):
        preferred = ("native", "tiled")
    elif x.shape[-1] <= WIDEST_OF_FUSED:
        preferred = ("fused", "wavefront")
    else:
        preferred = ("wavefront", "fused")

    reasons = {}
    for wanted in preferred:
        reason = _unsupported(wanted, x, hidden, heads, block)
        if reason is None:
            return wanted
        reasons[wanted] = reason

    missing = "; ".join(f"{wanted} cannot run on {reason}" for wanted, reason in reasons.items())
    log_once(f"Recurrent Transformer: tiled runs, because {missing}")
    return "tiled"


def _unsupported(implementation: Chosen, x: Tensor, hidden: int, heads: int, block: int) -> str | None:
    """Return why an implementation does not support a case; None if it does."""
    if implementation in ("naive", "tiled"):
        return None
    if implementation == "native":
        return _unsupported_by_native(x, heads, block)
    if not has_triton():
        return "this platform (Triton is not installed)"

    from mixers.rt.fused import passes as fused
    from mixers.rt.wavefront import passes as wavefront

    width, dtype = x.shape[-1], product_dtype(x)
    if implementation == "wavefront":
        return wavefront.unsupported(width, heads, block, dtype, x.device)
    return fused.unsupported(width, heads, hidden, block, dtype, x.device)


def _unsupported_by_native(x: Tensor, heads: int, block: int) -> str | None:
    """Return why ``native`` does not support a case; None if it does."""
    if block > 1:
        return f"blocks of {block} positions (native: 1)"
    if x.device.type != "cpu":
        return f"{x.device.type} (native: cpu)"
    if product_dtype(x) != x.dtype or x.dtype not in (torch.float32, torch.float64):
        return f"products in {product_dtype(x)} (native: float32 or float64 throughout)"
    if is_recorded():
        return "records of operations, such as torch.export makes"
    if library(x.dtype, heads, x.shape[-1] // heads) is None:
        return "this machine (no C compiler that works)"
    return None
