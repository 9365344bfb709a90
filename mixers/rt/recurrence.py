"""One entry to the recurrence of the Recurrent Transformer, whatever computes it, also under ``torch.func.vmap``."""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.rt.naive import Weights, naive_recurrence
from mixers.rt.tiled import tiled_backward, tiled_forward

Implementation = Literal["auto", "naive", "tiled", "triton"]

log = logging.getLogger(__name__)


class Method(NamedTuple):
    """A forward and a backward pass on tensors with a leading run axis; see ``mixers.rt.tiled`` for the signatures."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Weights]]


def _method(name: str) -> Method:
    if name == "tiled":
        return Method(tiled_forward, tiled_backward)
    from mixers.rt import kernels  # Triton is not there on every platform

    return Method(kernels.triton_forward, kernels.triton_backward)


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
    tensors = [y if y is None else y[None] for y in (x_BTD, q_BTD, k_BTD, v_BTD, *weights)]
    z_RBTD: Tensor = _Recurrence.apply(name, scale, block, slopes_H, *tensors)[0]
    return z_RBTD.squeeze(0)


def choose(implementation: Implementation, q_BTD: Tensor, hidden: int, heads: int, block: int) -> str:
    """Name of the implementation that runs.

    ``auto`` is ``triton`` on a GPU in bfloat16, where it is the fastest, and ``tiled`` elsewhere. Where the kernels do
    not support a shape, ``tiled`` runs and the log says why, once.
    """
    if implementation == "auto":
        wanted = q_BTD.is_cuda and q_BTD.dtype == torch.bfloat16
        implementation = "triton" if wanted else "tiled"
    if implementation == "triton":
        reason = _unsupported(q_BTD.shape[-1], heads, hidden, q_BTD.shape[-2], block, q_BTD.dtype, q_BTD.device)
        if reason is not None:
            _log_once(f"Recurrent Transformer: tiled in place of triton: no kernel for {reason}")
            return "tiled"
    return implementation


def _unsupported(
    width: int, heads: int, hidden: int, length: int, block: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "this platform (Triton is not installed)"
    from mixers.rt import kernels

    return kernels.unsupported(width, heads, hidden, length, block, dtype, device)


@cache
def _log_once(message: str) -> None:
    log.warning(message)


class _Recurrence(torch.autograd.Function):
    """Autograd around a ``Method``. Returns z and what its backward saved (not differentiable)."""

    @staticmethod
    def forward(name: str, scale: float, block: int, slopes_H: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        x, q, k, v, *weights = tensors
        with _no_autocast(slopes_H):
            z, saved = _method(name).forward(x, q, k, v, Weights(*weights), slopes_H, scale, block)
        return (z, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, ctx.scale, ctx.block, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        slopes_H, x, q, k, v, *rest = ctx.saved_tensors
        count = len(Weights._fields)
        weights, (z, *saved) = Weights(*rest[:count]), rest[count:]
        with _no_autocast(slopes_H):
            *dxs, dweights = _method(ctx.name).backward(
                dz, x, q, k, v, weights, slopes_H, ctx.scale, ctx.block, z, tuple(saved)
            )
        return None, None, None, None, *dxs, *dweights

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        name: str,
        scale: float,
        block: int,
        slopes_H: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Fold the mapped axis into the run axis and hand all runs to the method at once."""
        if in_dims[3] is not None:
            raise ValueError("recurrence: ALiBi slopes are shared by all runs; they cannot be mapped")

        def fold(y: Tensor | None, dim: int | None) -> Tensor | None:
            if y is None:
                return None
            batched = y.expand(info.batch_size, *y.shape) if dim is None else y.movedim(dim, 0)
            return batched.flatten(0, 1)

        folded = [fold(y, dim) for y, dim in zip(tensors, in_dims[4:], strict=True)]
        outputs = _Recurrence.apply(name, scale, block, slopes_H, *folded)
        z_RBTD = outputs[0].unflatten(0, (info.batch_size, -1))
        return (z_RBTD, *outputs[1:]), (0, *(None for _ in outputs[1:]))


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
