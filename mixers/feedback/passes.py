"""All layers of the Feedback Transformer in kernels, one position after the other, forward and backward.

Every layer at a position needs the memory of all earlier positions, and this memory needs all layers. So, unlike the
Recurrent Transformer's wavefront, no two layers can work at the same time. A position is a chain of small matrix
products (in brackets), which use the library, and kernels between them:

    forward     of each layer    [q] attend [out] add_norm [up] gelu [down] add_norm
                of the memory    memory (in place of the last add_norm) [kv] pair
    backward    of the memory    pair [kv] memory
                of each layer    [down] gelu [up] add_norm [out] query query_norm [q] input

The first layer's queries are computed for all positions before the loop, as are the hidden layers of the MLP that the
backward pass needs again. Its loop computes gradients of activations alone; those of weights are products over all
positions after it. Pairs pull their gradients from the queries of later positions: once a chunk of 16 from all later
chunks (``mixers.rt.past_kernels``), and at each position from the rest of its chunk. There are no atomics, so results
are bitwise reproducible. A pass consists of thousands of small launches, which a caller captures in a CUDA graph, or
else ``mixers.ops.replay``.

Tensors have axes (L, R, T, B, D): layers, runs that are trained together, positions, sequences, channels. ``n`` is a
normed row and ``r`` the reciprocal of its root mean square. Gains of norms are folded into the matrices after them, and
the gain of keys into that of queries. Logits are kept in units of log2.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.feedback.kernels import (
    attend_fwd_kernel,
    input_bwd_kernel,
    memory_bwd_kernel,
    memory_fwd_kernel,
    pair_bwd_kernel,
    query_bwd_kernel,
    query_norm_bwd_kernel,
)
from mixers.ops.ahead import repeated
from mixers.ops.method import Method, Optionals, Recipe, Tensors
from mixers.rt.past_kernels import past_bwd_kernel
from mixers.rt.wavefront.backward_kernels import add_norm_bwd_kernel, gelu_bwd_kernel
from mixers.rt.wavefront.forward_kernels import add_norm_fwd_kernel, gelu_fwd_kernel, pair_fwd_kernel
from mixers.rt.wavefront.launch import CHUNK_TILE, GELU, add_outer_products, product, row_tile, strided
from mixers.rt.wavefront.passes import unsupported as unsupported_by_wavefront
from mixers.rt.wavefront.schedule import CHUNK

ATTEND: dict[str, Any] = {"G": 4, "J": 64, "num_warps": 4}
"""Tile of attention to all earlier positions."""
PAIR: dict[str, Any] = {"num_warps": 8}


class StackWeights(NamedTuple):
    """Weights of all layers, with linear maps as (outputs, inputs) and the gains of the norms before them folded in.

    Inside the operation, every tensor has a leading axis of runs.

    Attributes:
        wq_LDD: maps to queries.
        gain_LD: gains of queries times the gain of keys; None without QK-norm.
        wo_LDD: output maps of attention.
        up_LFD: first maps of the MLPs.
        down_LDF: second maps of the MLPs.
        share: share of the model's input and of each layer's output in the memory (L + 1).
        wkv_ED: map of the memory to keys, then values (2 D, D).
    """

    wq_LDD: Tensor
    gain_LD: Tensor | None
    wo_LDD: Tensor
    up_LFD: Tensor
    down_LDF: Tensor
    share: Tensor
    wkv_ED: Tensor


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that layers share.

    Attributes:
        slopes_H: ALiBi slope of each head.
        scale: factor of the residual branches.
        dtype: dtype of the matrix products.
    """

    slopes_H: Tensor
    scale: float
    dtype: torch.dtype


def unsupported(D: int, H: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why there are no kernels for a case; None if there are.

    Args:
        D: model width.
        H: heads.
        dtype: dtype of matrix products.
        device: device of the inputs.
    """
    return unsupported_by_wavefront(D, H, 1, dtype, device)


def stack_method(setting: Setting) -> Method:
    """Return all layers as an operation on inputs (R, B, T, D) and ``StackWeights``; outputs (R, B, T, D), float32.

    Raises:
        ValueError: when the operation is called on a case that is ``unsupported``.
    """

    def forward(x_RBTD: Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
        reason = unsupported(x_RBTD.shape[-1], len(setting.slopes_H), setting.dtype, x_RBTD.device)
        if reason is not None:
            raise ValueError(f"no kernel for {reason}")
        return _Forward(x_RBTD, StackWeights(*tensors), setting).run()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz_RBTD,), (_, *weights) = gradients, tensors
        dx_RBTD, dweights = _Backward(dz_RBTD, StackWeights(*weights), setting, _Kept(*saved)).run()
        return dx_RBTD, *dweights

    def make(slopes_H: Tensor) -> Method:
        return stack_method(replace(setting, slopes_H=slopes_H))

    key = "feedback transformer", setting.scale, setting.dtype
    return Method(forward, backward, label="feedback transformer", recipe=Recipe(key, (setting.slopes_H,), make))


class _Kept(NamedTuple):
    """Tensors that the forward pass keeps for the backward pass; those without a comment have axes (L, R, T, B, D)."""

    h: Tensor  # (L + 1, R, T, B, D) inputs of the layers, and the outputs of the last one
    n_x: Tensor
    r_x: Tensor  # (L, R, T, B, 1)
    raw: Tensor
    q: Tensor
    a: Tensor
    lse: Tensor  # (L, R, T, B, H)
    n_u: Tensor
    r_u: Tensor  # (L, R, T, B, 1)
    n_m: Tensor  # (R, T, B, D)
    r_m: Tensor  # (R, T, B, 1)
    k: Tensor  # (R, T, B, D)
    v: Tensor  # (R, T, B, D)
    r_k: Tensor  # (R, T, B, 1)


class _Pass:
    """The common part of both passes: sizes, matrices (L, R, outputs, inputs), and arguments of the kernels."""

    def __init__(self, y_RBTD: Tensor, weights: StackWeights, setting: Setting) -> None:
        self.R, self.B, self.T, self.D = y_RBTD.shape
        self.L, self.F, self.H = weights.up_LFD.shape[1], weights.up_LFD.shape[2], len(setting.slopes_H)
        self.K = self.D // self.H
        self.setting, self.device, self.wide = setting, y_RBTD.device, y_RBTD.dtype

        # Matrices; those of a layer have the runs in front.
        maps = weights.wq_LDD, weights.wo_LDD, weights.up_LFD, weights.down_LDF
        self.wq, self.wo, self.up, self.down = (w.transpose(0, 1).to(setting.dtype).contiguous() for w in maps)
        self.wkv = weights.wkv_ED.to(setting.dtype).contiguous()

        # Arguments of the kernels.
        self.norm = weights.gain_LD is not None
        gain = weights.share if weights.gain_LD is None else weights.gain_LD  # the kernels need a pointer
        self.gain = gain.contiguous()
        self.share = weights.share.contiguous()
        self.slopes_H = setting.slopes_H.float()
        self.row = row_tile(self.D)
        self.strides = {"run_stride": self.T * self.B}
        self.layer_stride = self.R * self.T * self.B

    def low(self, *shape: int) -> Tensor:
        """Uninitialised memory in the dtype of products."""
        return torch.empty(shape, dtype=self.setting.dtype, device=self.device)

    def new(self, *shape: int) -> Tensor:
        """Uninitialised memory in the dtype of sums and statistics."""
        return torch.empty(shape, dtype=self.wide, device=self.device)

    def gain_of(self, layer: int) -> dict[str, Any]:
        """Gain of a layer's queries."""
        gain = self.gain[:, layer] if self.norm else self.gain
        return {"gain_ptr": gain, "gain_stride": self.gain.stride(0), "NORM": self.norm}

    @property
    def heads(self) -> tuple[int, int, int]:
        """Grid of attention to all earlier positions."""
        return self.B, triton.cdiv(self.H, ATTEND["G"]), self.R


class _Forward(_Pass):
    def __init__(self, x_RBTD: Tensor, weights: StackWeights, setting: Setting) -> None:
        super().__init__(x_RBTD, weights, setting)
        self.x_RBTD = x_RBTD
        L, R, T, B, D, H = self.L, self.R, self.T, self.B, self.D, self.H
        self.kept = _Kept(
            h=self.new(L + 1, R, T, B, D),
            n_x=self.low(L, R, T, B, D),
            r_x=self.new(L, R, T, B, 1),
            raw=self.low(L, R, T, B, D),
            q=self.low(L, R, T, B, D),
            a=self.low(L, R, T, B, D),
            lse=self.new(L, R, T, B, H),
            n_u=self.low(L, R, T, B, D),
            r_u=self.new(L, R, T, B, 1),
            n_m=self.low(R, T, B, D),
            r_m=self.new(R, T, B, 1),
            k=self.low(R, T, B, D),
            v=self.low(R, T, B, D),
            r_k=self.new(R, T, B, 1),
        )

        # Scratch memory of a position.
        self.u = self.new(R, B, D)
        self.y = self.low(R, B, D)
        self.hidden = self.low(R, B, self.F)
        self.kv = self.low(R, B, 2 * D)

    def run(self) -> tuple[Tensors, Tensors]:
        """Outputs (R, B, T, D), and what the backward pass needs."""
        kept, rows = self.kept, self.T * self.B

        # Queries of the first layer, at all positions.
        kept.h[0].copy_(self.x_RBTD.transpose(1, 2))
        self.add_norm(kept.h[0], None, None, kept.n_x[0], kept.r_x[0], rows)
        product(kept.n_x[0], self.wq[0].mT, out=kept.raw[0])

        for t in repeated(range(self.T)):
            for layer in range(self.L):
                self.compute_layer(layer, t)
            self.remember(t)
        return (kept.h[-1].transpose(1, 2).contiguous(),), tuple(kept)

    def compute_layer(self, layer: int, t: int) -> None:
        """Compute a layer's output at a position; that of the last layer lacks the MLP's residual branch."""
        kept = self.kept

        # Attention.
        if layer > 0:
            product(kept.n_x[layer, :, t], self.wq[layer].mT, out=kept.raw[layer, :, t])
        attend_fwd_kernel[self.heads](
            raw_ptr=kept.raw[layer, :, t],
            k_ptr=kept.k,
            v_ptr=kept.v,
            slopes_ptr=self.slopes_H,
            q_ptr=kept.q[layer, :, t],
            a_ptr=kept.a[layer, :, t],
            lse_ptr=kept.lse[layer, :, t],
            t=t,
            D=self.D,
            E=self.row["E"],
            K=self.K,
            **self.gain_of(layer),
            **self.strides,
            **ATTEND,
        )

        # u = h + scale * out a
        product(kept.a[layer, :, t], self.wo[layer].mT, out=self.y)
        n_u, r_u = kept.n_u[layer, :, t], kept.r_u[layer, :, t]
        self.add_norm(kept.h[layer, :, t], self.y, self.u, n_u, r_u, self.B)

        # The next h = u + scale * down GELU(up RMS(u))
        product(n_u, self.up[layer].mT, out=self.hidden)
        gelu_fwd_kernel[(triton.cdiv(self.hidden.numel(), GELU["W"]),)](
            h_ptr=self.hidden, total=self.hidden.numel(), **GELU
        )
        product(self.hidden, self.down[layer].mT, out=self.y)
        if layer + 1 < self.L:
            n_x, r_x = kept.n_x[layer + 1, :, t], kept.r_x[layer + 1, :, t]
            self.add_norm(self.u, self.y, kept.h[layer + 1, :, t], n_x, r_x, self.B)

    def remember(self, t: int) -> None:
        """Complete the last layer's output at a position, and compute the pair of the position's memory."""
        kept = self.kept
        memory_fwd_kernel[self.B, 1, self.R](
            u_ptr=self.u,
            y_ptr=self.y,
            share_ptr=self.share,
            h_ptr=kept.h[:, :, t],
            n_ptr=kept.n_m[:, t],
            r_ptr=kept.r_m[:, t],
            scale=self.setting.scale,
            layer_stride=self.layer_stride,
            L=self.L,
            **self.strides,
            **self.row,
        )
        product(kept.n_m[:, t], self.wkv.mT, out=self.kv)
        k, v = kept.k[:, t], kept.v[:, t]
        pair_fwd_kernel[self.B, self.R](
            **strided(raw=self.kv, r=kept.r_k[:, t]),
            k_ptr=k,
            v_ptr=v,
            pair_stride=k.stride(0),
            NORM=self.norm,
            **self.row,
        )

    def add_norm(self, x: Tensor, y: Tensor | None, u: Tensor | None, n: Tensor, r: Tensor, rows: int) -> None:
        """Compute u = x + scale y, and its normed rows."""
        add_norm_fwd_kernel[rows, self.R](
            **strided(x=x, y=y, u=u, n=n, r=r), scale=self.setting.scale, NORM=True, **self.row
        )


class _Backward(_Pass):
    def __init__(self, dz_RBTD: Tensor, weights: StackWeights, setting: Setting, kept: _Kept) -> None:
        super().__init__(dz_RBTD, weights, setting)
        self.kept = kept
        L, R, T, B, D, H, F = self.L, self.R, self.T, self.B, self.D, self.H, self.F
        self.dz = dz_RBTD.transpose(1, 2).contiguous()

        # Gradients at all positions. ``hidden`` is the hidden layer before GELU, then after it.
        self.da, self.draw, self.du, self.dy = (self.low(L, R, T, B, D) for _ in range(4))
        self.delta = self.new(L, R, T, B, H)
        self.hidden, self.dhidden = self.low(L, R, T, B, F), self.low(L, R, T, B, F)
        self.dkv = self.low(R, T, B, 2 * D)
        self.dm, self.dx = self.new(R, T, B, D), self.new(R, T, B, D)
        self.dgain = torch.zeros(L, R, B, D, dtype=self.wide, device=self.device)

        # Scratch memory: gradients of a chunk's pairs from later chunks, and of a position.
        self.dk, self.dv = self.new(R, CHUNK, B, D), self.new(R, CHUNK, B, D)
        self.d, self.dq = self.new(R, B, D), self.new(R, B, D)
        self.dn, self.dg = self.low(R, B, D), self.low(R, B, F)

    def run(self) -> tuple[Tensor, StackWeights]:
        """Gradients of inputs (R, B, T, D) and of weights."""
        for layer in range(self.L):
            product(self.kept.n_u[layer], self.up[layer].mT, out=self.hidden[layer])

        for start in repeated(range(0, self.T, CHUNK)[::-1]):
            self.pull_past(start)
            for t in repeated(range(start, min(start + CHUNK, self.T))[::-1]):
                self.forget(t, start)
                for layer in reversed(range(self.L)):
                    self.compute_layer(layer, t)

        # The first layer's inputs, at all positions.
        dn = torch.empty_like(self.kept.n_x[0])
        product(self.draw[0], self.wq[0], out=dn)
        self.finish_input(0, self.dx, dn, self.kept.n_x[0], self.kept.r_x[0], self.dm, self.dx, None)
        return self.dx.transpose(1, 2).contiguous(), self.weight_gradients()

    def pull_past(self, start: int) -> None:
        """Gradients that the pairs of a chunk get from the queries of all later chunks."""
        stop = start + CHUNK
        if stop >= self.T:
            self.dk.zero_()
            self.dv.zero_()
            return

        for layer in range(self.L):
            past_bwd_kernel[(self.R * self.B * self.H,)](
                q_ptr=self.kept.q[layer],
                k_ptr=self.kept.k,
                v_ptr=self.kept.v,
                da_ptr=self.da[layer],
                lse_ptr=self.kept.lse[layer],
                delta_ptr=self.delta[layer],
                slopes_ptr=self.slopes_H,
                dk_ptr=self.dk,
                dv_ptr=self.dv,
                T=self.T,
                step=self.B,
                start=start,
                stop=stop,
                begin=stop,
                end=self.T,
                base=start,
                D=self.D,
                K=self.K,
                UNIT=self.K**-0.5,
                S=CHUNK,
                G=1,
                E=self.K,
                FIRST=layer == 0,
                SKEW=0,
                **CHUNK_TILE,
            )

    def forget(self, t: int, start: int) -> None:
        """Compute the gradients of a position's memory, and of its output: ``d`` of the last layer."""
        kept = self.kept

        # The position's pair, from the queries of later positions.
        pair_bwd_kernel[self.B, 1, self.R](
            q_ptr=kept.q[:, :, start:],
            da_ptr=self.da[:, :, start:],
            lse_ptr=kept.lse[:, :, start:],
            delta_ptr=self.delta[:, :, start:],
            k_ptr=kept.k[:, start:],
            v_ptr=kept.v[:, start:],
            r_ptr=kept.r_k[:, start:],
            dk_ptr=self.dk,
            dv_ptr=self.dv,
            slopes_ptr=self.slopes_H,
            dkv_ptr=self.dkv[:, t],
            i=t - start,
            count=min(CHUNK, self.T - start),
            layer_stride=self.layer_stride,
            D=self.D,
            K=self.K,
            G=triton.next_power_of_2(self.H),
            L=self.L,
            C=CHUNK,
            NORM=self.norm,
            **self.strides,
            **PAIR,
        )

        # The memory, and the last layer's output.
        product(self.dkv[:, t], self.wkv, out=self.dn)
        memory_bwd_kernel[self.B, 1, self.R](
            dz_ptr=self.dz[:, t],
            dn_ptr=self.dn,
            n_ptr=kept.n_m[:, t],
            r_ptr=kept.r_m[:, t],
            share_ptr=self.share,
            dm_ptr=self.dm[:, t],
            d_ptr=self.d,
            dy_ptr=self.dy[-1, :, t],
            scale=self.setting.scale,
            L=self.L,
            **self.strides,
            **self.row,
        )

    def compute_layer(self, layer: int, t: int) -> None:
        """Compute the gradients of a layer at a position from that of its output, ``d``."""
        kept = self.kept

        # The output = u + scale * down GELU(up RMS(u))
        hidden, dhidden = self.hidden[layer, :, t], self.dhidden[layer, :, t]
        product(self.dy[layer, :, t], self.down[layer], out=self.dg)
        gelu_bwd_kernel[self.B, triton.cdiv(self.F, GELU["W"]), self.R](
            **strided(dg=self.dg, h=hidden, dh=dhidden), F=self.F, **GELU
        )
        product(dhidden, self.up[layer], out=self.dn)
        du = self.du[layer, :, t]
        d = self.dx[:, t] if layer == 0 else self.d  # what the first layer leaves is finished after the loop
        add_norm_bwd_kernel[self.B, self.R](
            **strided(d=self.d, dn=self.dn, n=kept.n_u[layer, :, t], r=kept.r_u[layer, :, t], du=d, dy=du),
            scale=self.setting.scale,
            NORM=True,
            **self.row,
        )

        # u = h + scale * out a
        product(du, self.wo[layer], out=self.da[layer, :, t])
        query_bwd_kernel[self.heads](
            q_ptr=kept.q[layer, :, t],
            k_ptr=kept.k,
            v_ptr=kept.v,
            a_ptr=kept.a[layer, :, t],
            da_ptr=self.da[layer, :, t],
            lse_ptr=kept.lse[layer, :, t],
            slopes_ptr=self.slopes_H,
            delta_ptr=self.delta[layer, :, t],
            dq_ptr=self.dq,
            t=t,
            D=self.D,
            K=self.K,
            **self.strides,
            **ATTEND,
        )
        query_norm_bwd_kernel[self.B, 1, self.R](
            raw_ptr=kept.raw[layer, :, t],
            dq_ptr=self.dq,
            draw_ptr=self.draw[layer, :, t],
            dgain_ptr=self.dgain[layer],
            **self.gain_of(layer),
            **self.strides,
            **self.row,
        )
        if layer > 0:
            product(self.draw[layer, :, t], self.wq[layer], out=self.dn)
            n, r, dy = kept.n_x[layer, :, t], kept.r_x[layer, :, t], self.dy[layer - 1, :, t]
            self.finish_input(layer, self.d, self.dn, n, r, self.dm[:, t], self.d, dy)

    def finish_input(
        self, layer: int, d: Tensor, dn: Tensor, n: Tensor, r: Tensor, dm: Tensor, dx: Tensor, dy: Tensor | None
    ) -> None:
        """Gradients of a layer's inputs at some positions (R, ..., D)."""
        input_bwd_kernel[dn[0].numel() // self.D, 1, self.R](
            **strided(d=d, dn=dn, n=n, r=r, dm=dm, share=self.share[:, layer], dx=dx, dy=dy),
            scale=self.setting.scale,
            **self.row,
        )

    def weight_gradients(self) -> StackWeights:
        """Gradients of the weights, as products over all positions."""
        kept, runs = self.kept, range(self.R)

        def outer(left: Tensor, right: Tensor) -> Tensor:
            """Sum over positions and sequences of outer products, for each run and layer."""
            total = torch.zeros(*left.shape[:2], left.shape[-1], right.shape[-1], dtype=self.wide, device=self.device)
            add_outer_products(total.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
            return total.transpose(0, 1)

        dshare = [torch.mv(kept.h[:, run].flatten(1), self.dm[run].flatten()) for run in runs]
        return StackWeights(
            wq_LDD=outer(self.draw, kept.n_x),
            gain_LD=self.dgain.sum(2).transpose(0, 1) if self.norm else None,
            wo_LDD=outer(self.du, kept.a),
            up_LFD=outer(self.dhidden, kept.n_u),
            down_LDF=outer(self.dy, self.hidden),
            share=torch.stack(dshare),
            wkv_ED=outer(self.dkv[None], kept.n_m[None])[:, 0],
        )
