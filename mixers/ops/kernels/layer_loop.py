"""A layer with softmax attention that a loop evaluates many times, launch by launch, for any width.

The library takes the products. A loop of such layers is one operation, so that a trace has one operator for all
evaluations, and one for their backward pass. Only gradients of activations are computed in the loop; those of weights
are products over the rows of all evaluations after it.

Dimensions: M rows of an evaluation, positions or memory tokens of all sequences of a run. Rows of the residual stream
may have more bits than products.

    name          shape                  written by      read by
    raw           (R, 3, rows, D)        caller          qkv_bwd      queries, keys and values before their norms
    gains         (2 R, D)               caller          qkv_bwd      float32; of queries and keys, None without QK-norm
    dq, dk, dv    (R, rows, D)           caller          qkv_bwd      gradients after the norms
    draw          (R, rows, 3 D)         qkv_bwd         caller
    dgain         (R, programs, 2, D)    qkv_bwd         group_sum    float32
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.common import contiguous, rms, rms_bwd
from mixers.ops.kernels.norm import norm_gradients, normed
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Optionals, Tensors
from mixers.ops.weights import LayerWeights


@triton.jit(do_not_specialize=["rows"])
def qkv_bwd_kernel(
    raw_ptr: tl.tensor,
    gains_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of M rows of queries, keys and values, side by side; through QK-norm, if there are gains."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here_ME = (m < rows)[:, None] & (e < D)[None, :]
    at_ME = (run * rows + m)[:, None] * D + e[None, :]
    for i in tl.static_range(3):
        dy_ptr = dq_ptr if i == 0 else (dk_ptr if i == 1 else dv_ptr)
        dy_ME = tl.load(dy_ptr + at_ME, here_ME, 0.0).to(tl.float32)
        if gains_ptr is not None and i < 2:
            raw_ME = tl.load(raw_ptr + (run * 2 + i) * rows * D + at_ME, here_ME, 0.0).to(tl.float32)
            gain_E = tl.load(gains_ptr + (run * 2 + i) * D + e, e < D, 0.0)
            r_M = rms(raw_ME, D)
            n_ME = raw_ME * r_M[:, None]
            to_E = ((run * tl.num_programs(0) + tl.program_id(0)) * 2 + i) * D + e
            tl.store(dgain_ptr + to_E, tl.sum(dy_ME * n_ME, 0), e < D)
            dy_ME = rms_bwd(dy_ME * gain_E[None, :], n_ME, r_M, D)
        tl.store(draw_ptr + (run * rows + m)[:, None] * 3 * D + i * D + e[None, :], dy_ME, here_ME)


class LoopedLayer(NamedTuple):
    """Evaluations of a layer, its attention apart. A result that is an argument, too, has its place there.

    Attributes:
        weights: weights, which get the gradients.
        qk_norm: gains (2 R, D) of queries and keys; None without QK-norm.
        qkv, out, up, down: maps in the dtype of products, as ``rounded_maps`` makes them.
    """

    weights: LayerWeights
    qk_norm: Tensor | None
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(tensors: Sequence[Any]) -> "LoopedLayer":
        """The layer of its weights and ``rounded_maps`` of them."""
        weights = LayerWeights(*tensors[:-4])
        gains: Any = weights.q_norm_D, weights.k_norm_D
        qk_norm = None if gains[0] is None else torch.stack(gains, 1).flatten(0, 1)
        return LoopedLayer(weights, qk_norm, *tensors[-4:])

    @staticmethod
    def several(tensors: Sequence[Any]) -> "list[LoopedLayer]":
        """Layers of the tensors of one after another."""
        each = len(LayerWeights._fields) + 4
        return [LoopedLayer.of(tensors[n : n + each]) for n in range(0, len(tensors), each)]

    def project(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        """Raw queries, keys and values (R, 3, M, D) of inputs (R, M, D)."""
        return torch.matmul(normed(x, self.weights.norm_D, self.qkv.dtype)[:, None], self.qkv.mT, out=raw)

    def normed_qk(self, raw: Tensor) -> Tensor:
        """Queries and keys (R, 2, M, D)."""
        qk = raw[:, :2]
        return qk if self.qk_norm is None else normed(qk.flatten(0, 1), self.qk_norm, qk.dtype).view_as(qk)

    def finish(
        self, x: Tensor, a: Tensor, u: Tensor | None = None, h: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input of the MLP, its hidden layer before the GELU, and outputs, from inputs and the outputs of attention."""
        u = _added(x, a, self.out, u)
        h = torch.bmm(normed(u, self.weights.mlp_norm_D, a.dtype), self.up.mT, out=h)
        return u, h, _added(u, F.gelu(h), self.down)

    def finish_gradients(
        self, dz: Tensor, u: Tensor, h: Tensor, places: Sequence[Tensor | None] = (None, None, None)
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Gradients of the MLP's outputs, hidden layer and input u in the dtype of products, which may have places.

        Then those of u as it is, of the outputs of attention, and of the norm's gain.
        """
        low_dz, dh, low_du = places
        low_dz = dz.to(h.dtype) if low_dz is None else low_dz.copy_(dz)
        dg = torch.bmm(low_dz, self.down)
        dh = dg if dh is None else dh
        torch.ops.aten.gelu_backward.grad_input(dg, h, grad_input=dh)
        du, dgain = norm_gradients(u, self.weights.mlp_norm_D, torch.bmm(dh, self.up), dz)
        low_du = du.to(h.dtype) if low_du is None else low_du.copy_(du)
        return [low_dz, dh, low_du], du, torch.bmm(low_du, self.out), dgain

    def project_gradients(
        self, x: Tensor, raw: Tensor, dqkv: Sequence[Tensor], du: Tensor | None, draw: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients of raw rows (R, M, 3 D), of inputs, with that of u if there is one, and of three norms' gains."""
        R, M, D = x.shape
        draw = raw.new_empty(R, M, 3 * D) if draw is None else draw
        E = triton.next_power_of_2(D)
        tile = max(1, 4096 // E)
        dgain = x.new_empty(R, triton.cdiv(M, tile), 2, D, dtype=torch.float32)
        tensors = *contiguous(raw, self.qk_norm, *dqkv), draw, dgain
        qkv_bwd_kernel[dgain.shape[1], R](*tensors, M, D=D, E=E, M=tile)
        dgains = [None, None] if self.qk_norm is None else [*dgain.unbind(2)]
        dx, dnorm = norm_gradients(x, self.weights.norm_D, torch.bmm(draw, self.qkv.flatten(1, 2)), du)
        return draw, dx, [dnorm, *dgains]

    def gradients(
        self, scale: float, kept: Sequence[Tensor], drows: Sequence[Tensor], dgains: Iterable[tuple[Any, ...]]
    ) -> Optionals:
        """Gradients of what ``of`` takes, from the rows (R, rows, W) of all evaluations.

        Args:
            scale: that of ``rounded_maps``.
            kept: rows x, a, u and h.
            drows: the gradients that ``finish_gradients`` and ``project_gradients`` return first.
            dgains: parts of the gradients of gains by evaluations: those of ``project_gradients``, then of the MLP's.
        """
        (x, a, u, h), (dz, dh, du, draw) = kept, drows
        (dwqkv,) = rows_products((draw, normed(x, self.weights.norm_D, a.dtype)))
        dwo, dup, ddown = rows_products((du, a), (dh, normed(u, self.weights.mlp_norm_D, a.dtype)), (dz, F.gelu(h)))
        *dnorms, dmlp_norm = (None if parts[0] is None else group_sum(torch.cat(parts, 1)) for parts in dgains)
        dweights = dnorms[0], *dwqkv.split(x.shape[-1], 1), *dnorms[1:], scale * dwo, dmlp_norm, dup, scale * ddown
        return *dweights, None, None, None, None


def qkv_of(raw: Tensor, qk: Tensor, sequences: int) -> Tensors:
    """Queries, keys and values (R, B, ..., D) of the results of ``LoopedLayer.project`` and ``normed_qk``."""
    return tuple(y.unflatten(1, (sequences, -1)) for y in (*qk.unbind(1), raw[:, 2]))


def rounded_maps(weights: LayerWeights, scale: float, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Maps of ``LoopedLayer`` in the dtype of products; of both residual branches, whose factor is ``scale``."""
    qkv = torch.stack([weights.wq_DD.detach(), weights.wk_DD.detach(), weights.wv_DD.detach()], -3)
    out, up, down = weights.wo_DD.detach(), weights.up_FD.detach(), weights.down_DF.detach()
    return [y.to(dtype) for y in (qkv, scale * out, up, scale * down)]


def _added(x: Tensor, y: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """``x + w y`` in the dtype of x."""
    return torch.baddbmm(x, y, w.mT, out=out) if x.dtype == y.dtype else torch.add(x, torch.bmm(y, w.mT), out=out)
