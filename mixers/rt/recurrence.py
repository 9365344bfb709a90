"""One entry to the recurrence of the Recurrent Transformer, whatever computes it, also under ``torch.func.vmap``."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.rt.naive import Weights, naive_recurrence
from mixers.rt.tiled import tiled_backward, tiled_forward

Implementation = Literal["auto", "naive", "tiled"]


class Method(NamedTuple):
    """A forward and a backward pass on tensors with a leading run axis; see ``mixers.rt.tiled`` for the signatures."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Weights]]


METHODS = {"tiled": Method(tiled_forward, tiled_backward)}


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
    name = choose(implementation)
    if name == "naive":
        return naive_recurrence(x_BTD, q_BTD, k_BTD, v_BTD, weights, slopes_H, scale, block)
    tensors = [y if y is None else y[None] for y in (x_BTD, q_BTD, k_BTD, v_BTD, *weights)]
    z_RBTD: Tensor = _Recurrence.apply(name, scale, block, slopes_H, *tensors)[0]
    return z_RBTD.squeeze(0)


def choose(implementation: Implementation) -> str:
    """Name of the implementation that runs: the one asked for, or for ``auto`` the fastest that is exact here."""
    return "tiled" if implementation == "auto" else implementation


class _Recurrence(torch.autograd.Function):
    """Autograd around a ``Method``. Returns z and what its backward saved (not differentiable)."""

    @staticmethod
    def forward(name: str, scale: float, block: int, slopes_H: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        x, q, k, v, *weights = tensors
        with _no_autocast(slopes_H):
            z, saved = METHODS[name].forward(x, q, k, v, Weights(*weights), slopes_H, scale, block)
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
            *dxs, dweights = METHODS[ctx.name].backward(
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
