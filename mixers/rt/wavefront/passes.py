"""Recurrent Transformer layers of wide models: groups of positions, the library's products, the rest fused.

For models whose products fill a GPU (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). Time is split in groups
of chunks. At the start of a group its queries and temporary pairs are computed, and attend to all earlier groups; at
the start of a chunk a kernel lets its queries attend to the group's earlier chunks; then the positions of the chunk
follow one another, and only the keys of the chunk itself remain. A position is four matrix products and five kernels
between them: attention; residual and norm; GELU; residual and norm; the persistent pair. The backward mirrors this
from the last position to the first, computes the hidden layer again from what is kept (normed outputs, projections of
inputs, queries, attention outputs, normed inputs of the MLP, pairs: 18 bytes a channel in bfloat16) and adds to the
weights' gradients group by group. No atomics: results repeat bitwise. Thousands of small launches: meant to be captured
in a CUDA graph.

Layers of a stack form a wavefront: while one works on a group, the next works on the group before, for that is all it
waits for. Each product and each kernel serves all layers at work, one group apart. Runs trained together are served in
the same way, but side by side.

Tensors carry a leading axis L of layers or runs and, except at the interface, have positions before sequences:
(L, T, B, D). The number of positions is a multiple of that of a group; further ones are zero. Gains of the norms before
products are part of the weights, that of keys part of the queries'. ``n`` is a normed row, ``r`` the reciprocal root
mean square that made it so. Logits are kept in units of log2. Buffers named ``now`` hold one position.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.ops.kernels.products import through_gain
from mixers.ops.runs import Method, Optionals, Tensors
from mixers.rt.past_kernels import past_bwd_kernel, past_fwd_kernel, query_bwd_kernel
from mixers.rt.wavefront.kernels import (
    add_norm_bwd_kernel,
    add_norm_fwd_kernel,
    attend_bwd_kernel,
    attend_fwd_kernel,
    begin_bwd_kernel,
    begin_fwd_kernel,
    gelu_bwd_kernel,
    gelu_fwd_kernel,
    pair_bwd_kernel,
    pair_fwd_kernel,
)

CHUNK = 16
"""Positions of a chunk; a group has several chunks."""
HEAD_DIMS = (16, 32, 64, 128)

# Tiles, the fastest of those tried on an H200.
CHUNK_TILE: dict[str, Any] = {"J": 16, "num_warps": 1}
ATTEND: dict[str, Any] = {"G": 1, "num_warps": 1}
ROW: dict[str, Any] = {"num_warps": 4}
BEGIN_BWD: dict[str, Any] = {"C": 4, "num_warps": 4}
GELU: dict[str, Any] = {"W": 1024, "num_warps": 4}


class LayerWeights(NamedTuple):
    """All weights of a layer, linear maps as (outputs, inputs); queries' and keys' norms may both be absent."""

    norm_D: Tensor
    wq_DD: Tensor
    wk_DD: Tensor
    wv_DD: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    wo_DD: Tensor
    mlp_norm_D: Tensor
    up_FD: Tensor
    down_DF: Tensor


def group_size(layers: int, sequences: int) -> int:
    """Positions of a group: fewer in a stack of few sequences, where waiting for the layer before costs most.

    By up to 10% the faster of 16, 32 and 64 on an H200, at widths 448 to 2048.
    """
    return 32 if layers > 1 and sequences <= 128 else 64


def unsupported(D: int, H: int, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this implementation cannot take a case, in words; None if it can. ``dtype`` is that of products."""
    if block != 1:
        return f"blocks of {block} positions (kernels are written for blocks of 1)"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} (kernels compute in float32 or bfloat16)"
    if D % H or D // H not in HEAD_DIMS:
        return f"{H} heads of width {D} (kernels: head dim {', '.join(map(str, HEAD_DIMS))})"
    if device.type != "cuda" and not (triton.knobs.runtime.interpret and dtype == torch.float32):
        return f"{dtype} on {device.type} (kernels: cuda; TRITON_INTERPRET=1 lends them the CPU in float32 alone)"
    return None


def layers_method(layers: int, slopes_H: Tensor, scale: float, persistent_norm: bool, dtype: torch.dtype) -> Method:
    """Outputs (R, B, T, D) of the last of several layers as an operation on inputs and each layer's ``LayerWeights``.

    Inputs and weights are float32, products in ``dtype``. Layers of one run form a wavefront; several runs go side by
    side, one layer after the other.
    """
    setting = slopes_H, scale, persistent_norm, dtype

    def parts(runs: int, tensors: Sequence[Any]) -> list[LayerWeights]:
        """The weights, along their first axis, of what is computed together."""
        each = [LayerWeights(*tensors[i::layers]) for i in range(layers)]
        if runs > 1:
            return each
        return [LayerWeights._make(None if ws[0] is None else torch.cat(ws) for ws in zip(*each, strict=True))]

    def forward(x_RBTD: Tensor, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        saved: list[Tensor] = []
        for weights in parts(len(x_RBTD), tensors):
            x_RBTD, *kept = _Forward(x_RBTD, weights, setting).run(x_RBTD)
            saved += kept
        return (x_RBTD,), tuple(saved)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz_RBTD,), (x_RBTD, *tensors) = gradients, tensors
        together = parts(len(x_RBTD), tensors)
        each: list[LayerWeights] = []
        size = len(saved) // len(together)
        for i in reversed(range(len(together))):
            kept = saved[i * size : (i + 1) * size]
            dz_RBTD, dweights = _Backward(dz_RBTD, together[i], setting).run(dz_RBTD, kept)
            each.insert(0, dweights)
        if len(x_RBTD) == 1:
            each = [LayerWeights._make(y if y is None else y[i : i + 1] for y in each[0]) for i in range(layers)]
        return dz_RBTD, *(y for field in zip(*each, strict=True) for y in field)

    return Method(forward, backward)


class _Kept(NamedTuple):
    """What the forward keeps for the backward (L, T, B, X), or that of a group of each layer at work (n, S, B, X)."""

    n_x: Tensor
    n_z: Tensor
    r_x: Tensor
    r_z: Tensor
    raw: Tensor  # products q, k and v, before their norms
    q: Tensor
    lse: Tensor
    a: Tensor
    r_u: Tensor
    n_u: Tensor
    r_k: Tensor
    k: Tensor
    v: Tensor

    def at(self, i: int) -> "_Kept":
        """That of one position (n, B, X)."""
        return _Kept(*(y.select(1, i) for y in self))


class _Pass:
    """A stack (R = 1), or one layer of R runs: sizes, operands, and the group that each layer at work is on."""

    def __init__(self, x_RBTD: Tensor, weights: LayerWeights, setting: tuple[Tensor, float, bool, torch.dtype]) -> None:
        slopes_H, self.scale, self.persistent_norm, dtype = setting
        R, self.B, T, self.D = x_RBTD.shape
        self.L, self.H, self.hidden = len(weights.wq_DD), len(slopes_H), weights.up_FD.shape[1]
        if reason := unsupported(self.D, self.H, 1, dtype, x_RBTD.device):
            raise ValueError(f"no kernel for {reason}")
        self.K, self.qk_norm = self.D // self.H, weights.q_norm_D is not None
        self.weights, self.operands = weights, _operands(weights, self.persistent_norm, dtype)
        self.slopes, self.gain = slopes_H.float(), _gain(weights)
        self.group = group_size(self.L if R == 1 else 1, self.B)
        self.skew = self.group if R == 1 else 0
        self.padded = -(-T // self.group) * self.group
        self.most = min(self.L, self.padded // self.group) if self.skew else self.L  # layers at work
        self.chained = self.skew > 0 and self.persistent_norm  # normed outputs are the normed inputs of the next layer
        self.low, self.wide = partial(torch.empty, dtype=dtype, device=x_RBTD.device), x_RBTD.new_empty
        self.row = {"D": self.D, "E": triton.next_power_of_2(self.D), **ROW}

    def named(self, saved: Sequence[Tensor]) -> _Kept:
        """What is saved, by name."""
        n_xz, r_xz, *others = saved
        (n_x, n_z), (r_x, r_z) = ((y[:-1], y[1:]) if self.chained else (y[0], y[1]) for y in (n_xz, r_xz))
        return _Kept(n_x, n_z, r_x, r_z, *others)

    def at_work(self, y_LTBX: Tensor, lo: int, hi: int, base: int) -> Tensor:
        """A group (hi - lo, group, B, X) of each layer: from ``base`` on for lo, ``skew`` earlier for each next one."""
        _, T, B, X = y_LTBX.shape
        offset = y_LTBX.storage_offset() + (lo * T + base) * B * X
        return y_LTBX.as_strided((hi - lo, self.group, B, X), ((T - self.skew) * B * X, B * X, X, 1), offset)


class _Forward(_Pass):
    def run(self, x_RBTD: Tensor) -> tuple[Tensor, ...]:
        """Outputs (R, B, T, D), and what the backward wants as ``saved``."""
        (R, B, _, D), L, H, group, padded, most = x_RBTD.shape, self.L, self.H, self.group, self.padded, self.most
        low, wide = self.low, self.wide
        z_RBTD = torch.empty_like(x_RBTD)
        # Inputs of layers, and outputs, which are the next layer's inputs one wave later.
        self.x, self.z = (wide(L + 1, group, B, D) for _ in range(2))
        both = (L + 1,) if self.chained else (2, L)
        n_xz, r_xz = low(*both, padded, B, D), wide(*both, padded, B, 1)
        raw = low(L, padded, B, 3 * D)
        q, a, n_u, k, v = (low(L, padded, B, D) for _ in range(5))
        lse, r_u, r_k = (wide(L, padded, B, n) for n in (H, 1, 1))
        saved = n_xz, r_xz, raw, q, lse, a, r_u, n_u, r_k, k, v
        self.kept = self.named(saved)
        self.m, self.l = wide(most, group, B, H), wide(most, group, B, H)
        self.o, self.u_now = wide(most, group, B, D), wide(most, B, D)
        self.y_now, self.h_now, self.kv_now = (low(most, B, n) for n in (D, self.hidden, 2 * D))
        for lo, hi, base in _waves(L, padded, group, self.skew):
            if lo == 0:
                _copy(self.x[:R], x_RBTD[:, :, base : base + group].transpose(1, 2))
            self.groups(lo, hi, base)
            if hi == L:
                top = base - (hi - lo - 1) * self.skew
                _copy(z_RBTD[:, :, top : top + group].transpose(1, 2), self.z[-R:])
            self.x, self.z = self.z, self.x
        return z_RBTD, *saved

    def groups(self, lo: int, hi: int, base: int) -> None:
        """A group of each layer at work: queries and temporary pairs, all earlier groups, then chunk after chunk."""
        n, B, D, H, K, group, row = hi - lo, self.B, self.D, self.H, self.K, self.group, self.row
        # Of the first layer at work; kernels of the past find the others from there.
        q, k, v = (y[lo] for y in (self.kept.q, self.kept.k, self.kept.v))
        kept = _Kept(*(self.at_work(y, lo, hi, base) for y in self.kept))
        x, z, m, l, o = self.x[lo:hi], self.z[lo + 1 : hi + 1], self.m, self.l, self.o
        operands = [w[lo:hi].mT for w in self.operands]
        fresh = n if not self.chained else 1 if lo == 0 else 0
        if fresh:
            add_norm_fwd_kernel[group * B, fresh](
                *_rows(x, None, None, kept.n_x, kept.r_x), self.scale, NORM=True, **row
            )
        _product(kept.n_x, operands[0], kept.raw)
        begin_fwd_kernel[group * B, n](
            *_rows(kept.raw), self.gain[lo:hi], *_rows(kept.q), m, l, o, group * B, K=K, NORM=self.qk_norm, **row
        )
        past = partial(
            past_fwd_kernel[(n * B * H,)],
            q, q, q, k, v, self.slopes, m, l, o, self.padded, B,
            D=D, K=K, UNIT=K**-0.5, S=group, G=1, E=K, FIRST=False, SKEW=self.skew,
        )  # fmt: skip
        past(0, base, base + group, base, **_group_tile(group, K))
        for chunk in range(0, group, CHUNK):
            start = base + chunk
            if chunk:
                past(base, start, start + CHUNK, base, C=CHUNK, **CHUNK_TILE)
            first = kept.at(chunk)
            attend = partial(
                attend_fwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                first.q, first.k, first.v, m[0, chunk], l[0, chunk], o[0, chunk], self.slopes, first.a, first.lse,
                B, first.q.stride(0) // D, D=D, K=K, S=group, **ATTEND,
            )  # fmt: skip
            for t in range(CHUNK):
                attend(t, J=_tile(t))
                self.position(chunk + t, kept, x, z, operands)

    def position(self, i: int, kept: _Kept, x: Tensor, z: Tensor, operands: Sequence[Tensor]) -> None:
        """From the attention outputs of position i of a group to its outputs and persistent pair."""
        n, B, row, (_, wo, up, down, wkv) = len(x), self.B, self.row, operands
        kept, x, z = kept.at(i), x[:, i], z[:, i]
        u, y, h, kv = self.u_now, self.y_now[:n], self.h_now[:n], self.kv_now[:n]
        _product(kept.a, wo, y)
        add_norm_fwd_kernel[B, n](*_rows(x, y, u, kept.n_u, kept.r_u), self.scale, NORM=True, **row)
        _product(kept.n_u, up, h)
        gelu_fwd_kernel[(triton.cdiv(h.numel(), GELU["W"]),)](h, h.numel(), **GELU)
        _product(h, down, y)
        add_norm_fwd_kernel[B, n](*_rows(u, y, z, kept.n_z, kept.r_z), self.scale, NORM=self.persistent_norm, **row)
        _product(kept.n_z, wkv, kv)
        pair_fwd_kernel[B, n](*_rows(kv), kept.k, *_rows(kept.v, kept.r_k), NORM=self.qk_norm, **row)


class _Backward(_Pass):
    def run(self, dz_RBTD: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, LayerWeights]:
        """Gradients of inputs (R, B, T, D) and weights, all float32; None where the weight is None."""
        (R, B, _, D), L, group, most, low, wide = dz_RBTD.shape, self.L, self.group, self.most, self.low, self.wide
        self.kept = self.named(saved)
        dx_RBTD = torch.empty_like(dz_RBTD)
        self.da, self.delta = torch.empty_like(self.kept.q), torch.empty_like(self.kept.lse)
        # Gradients of outputs, and of inputs, which are the outputs of the layer below one wave later.
        self.dz, self.dx = (wide(L + 1, group, B, D) for _ in range(2))
        # y takes gradients of queries, then those of normed inputs.
        self.y, self.dy, self.du = (low(most, group, B, D) for _ in range(3))
        self.h, self.dh = (low(most, group, B, self.hidden) for _ in range(2))
        self.dkv, self.draw = low(most, group, B, 2 * D), low(most, group, B, 3 * D)
        self.dk, self.dv = (wide(most, group, B, D) for _ in range(2))
        self.y_now, self.h_now = low(most, B, D), low(most, B, self.hidden)
        self.dgain = dz_RBTD.new_zeros(L, group // BEGIN_BWD["C"], B, D)
        self.doperands = [torch.zeros_like(w, dtype=dz_RBTD.dtype) for w in self.operands]
        for lo, hi, base in reversed(list(_waves(L, self.padded, group, self.skew))):
            if hi == L:
                top = base - (hi - lo - 1) * self.skew
                _copy(self.dz[-R:], dz_RBTD[:, :, top : top + group].transpose(1, 2))
            self.groups(lo, hi, base)
            if lo == 0:
                _copy(dx_RBTD[:, :, base : base + group].transpose(1, 2), self.dx[:R])
            self.dz, self.dx = self.dx, self.dz
        return dx_RBTD, _gains_apart(self.weights, self.persistent_norm, self.dgain.sum((1, 2)), self.doperands)

    def groups(self, lo: int, hi: int, base: int) -> None:
        """A group of each layer at work, last position first; then what waits for all: weights, queries, inputs."""
        n, B, D, H, K, group, row = hi - lo, self.B, self.D, self.H, self.K, self.group, self.row
        q, *others = (y[lo] for y in (self.kept.q, self.kept.k, self.kept.v, self.da, self.kept.lse, self.delta))
        kept = _Kept(*(self.at_work(y, lo, hi, base) for y in self.kept))
        da, delta = (self.at_work(y, lo, hi, base) for y in (self.da, self.delta))
        operands = qkv, _, up, _, _ = [w[lo:hi] for w in self.operands]
        dqkv, dwo, dup, ddown, dwkv = (w[lo:hi] for w in self.doperands)
        y, dy, du, h, dh, dkv, draw = (y[:n] for y in (self.y, self.dy, self.du, self.h, self.dh, self.dkv, self.draw))
        d = self.dz[lo + 1 : hi + 1]
        _product(kept.n_u, up.mT, h)

        past = partial(
            past_bwd_kernel[(n * B * H,)],
            q, *others, self.slopes, self.dk, self.dv, self.padded, B,
            D=D, K=K, UNIT=K**-0.5, S=group, G=1, E=K, SKEW=self.skew,
        )  # fmt: skip
        end = base + group
        past(base, end, end, self.padded + self.L * self.skew, base, FIRST=True, **_group_tile(group, K))
        for chunk in reversed(range(0, group, CHUNK)):
            start = base + chunk
            if chunk + CHUNK < group:
                past(start, start + CHUNK, start + CHUNK, end, base, C=CHUNK, FIRST=False, **CHUNK_TILE)
            first = kept.at(chunk)
            attend = partial(
                attend_bwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                first.q, first.k, first.v, first.a, da[:, chunk], first.lse, delta[:, chunk],
                self.dk[0, chunk], self.dv[0, chunk], self.slopes, dkv[0, chunk], B, first.q.stride(0) // D,
                D=D, K=K, C=CHUNK, S=group, **ATTEND,
            )  # fmt: skip
            for t in reversed(range(CHUNK)):
                attend(t, J=_tile(CHUNK - 2 - t), QUERY=t + 1 < CHUNK, PULL=True)
                self.position(chunk + t, kept, da, d, operands)
            attend(-1, J=2, QUERY=True, PULL=False)

        _add_rows(dup, dh, kept.n_u)
        _add_rows(ddown, dy, h)
        _add_rows(dwo, du, kept.a)
        _add_rows(dwkv, dkv, kept.n_z)
        query_bwd_kernel[n * B * H, 1](
            q, q, q, *others, self.slopes, y, y, y, self.padded, B, base, group,
            D=D, K=K, UNIT=K**-0.5, G=1, E=K, TEMPORARY=False, SKEW=self.skew, **_group_tile(group, K),
        )  # fmt: skip
        begin_bwd_kernel[B, group // BEGIN_BWD["C"], n](
            *_rows(kept.raw), self.gain[lo:hi], *_rows(da), kept.lse, delta, y, draw, self.dgain[lo:hi], B,
            K=K, S=group, NORM=self.qk_norm, **{**row, **BEGIN_BWD},
        )  # fmt: skip
        _add_rows(dqkv, draw, kept.n_x)
        _product(draw, qkv, y)
        add_norm_bwd_kernel[group * B, n](
            *_rows(d, y, kept.n_x, kept.r_x, self.dx[lo:hi], None), self.scale, NORM=True, **row
        )

    def position(self, i: int, kept: _Kept, da: Tensor, d: Tensor, operands: Sequence[Tensor]) -> None:
        """From the gradients of position i's outputs and persistent pair to those of its attention outputs."""
        n, B, row, (_, wo, up, down, wkv) = len(d), self.B, self.row, operands
        kept, da, d, y_now, h_now = kept.at(i), da[:, i], d[:, i], self.y_now[:n], self.h_now[:n]
        dkv, dy, h, dh, du = (y[:n, i] for y in (self.dkv, self.dy, self.h, self.dh, self.du))
        if self.qk_norm:
            pair_bwd_kernel[B, n](*_rows(dkv, kept.k, kept.r_k), **row)
        _product(dkv, wkv, y_now)
        add_norm_bwd_kernel[B, n](
            *_rows(d, y_now, kept.n_z, kept.r_z, d, dy), self.scale, NORM=self.persistent_norm, **row
        )
        _product(dy, down, h_now)
        gelu_bwd_kernel[B, triton.cdiv(self.hidden, GELU["W"]), n](*_rows(h_now, h, dh), F=self.hidden, **GELU)
        _product(dh, up, y_now)
        add_norm_bwd_kernel[B, n](*_rows(d, y_now, kept.n_u, kept.r_u, d, du), self.scale, NORM=True, **row)
        _product(du, wo, da)


def _gains_apart(
    weights: LayerWeights, persistent_norm: bool, dgain: Tensor, doperands: Sequence[Tensor]
) -> LayerWeights:
    """Gradients of gains and weights from those of their products, ``_operands`` and ``_gain``."""
    dqkv, dwo, dup, ddown, dwkv = doperands
    D = dgain.shape[1]
    wkv = torch.cat([weights.wk_DD, weights.wv_DD], dim=1)
    dqkv, dnorm = through_gain(dqkv, torch.cat([weights.wq_DD, wkv], dim=1), weights.norm_D)
    if persistent_norm:
        dwkv, dnorm_of_outputs = through_gain(dwkv, wkv, weights.norm_D)
        dnorm += dnorm_of_outputs
    dqkv[:, D:] += dwkv
    dup, dmlp_norm = through_gain(dup, weights.up_FD, weights.mlp_norm_D)
    dwq, dwk, dwv = dqkv.split(D, dim=1)
    return LayerWeights(
        norm_D=dnorm,
        wq_DD=dwq,
        wk_DD=dwk,
        wv_DD=dwv,
        q_norm_D=None if weights.k_norm_D is None else dgain * weights.k_norm_D,
        k_norm_D=None if weights.q_norm_D is None else dgain * weights.q_norm_D,
        wo_DD=dwo,
        mlp_norm_D=dmlp_norm,
        up_FD=dup,
        down_DF=ddown,
    )


def _waves(layers: int, length: int, group: int, skew: int) -> Iterator[tuple[int, int, int]]:
    """Layers lo to hi that work at the same time, and where the group of ``lo`` starts; a stack, or runs (skew 0)."""
    groups = length // group
    if not skew:
        yield from ((0, layers, base) for base in range(0, length, group))
        return
    for wave in range(groups + layers - 1):
        lo = max(0, wave + 1 - groups)
        yield lo, min(layers, wave + 1), (wave - lo) * group


def _copy(out: Tensor, y: Tensor) -> None:
    """Copies the positions (axis 1) that both have; further ones of ``out`` become zero."""
    count = min(out.shape[1], y.shape[1])
    out[:, :count].copy_(y[:, :count])
    out[:, count:].zero_()


def _rows(*tensors: Tensor | None) -> list[Any]:
    """Each tensor (L, ...) and how far its layers are apart, as kernels want them."""
    return [argument for y in tensors for argument in (y, 0 if y is None else y.stride(0))]


def _product(y: Tensor, w_LIO: Tensor, out: Tensor) -> None:
    """Rows y (L, ..., I) times each layer's matrix, into out (L, ..., O)."""
    y, out = _matrices(y), _matrices(out)
    if len(y) == 1:
        torch.mm(y[0], w_LIO[0], out=out[0])
    else:
        torch.bmm(y, w_LIO, out=out)


def _matrices(y: Tensor) -> Tensor:
    """Each layer's rows as a matrix, in place."""
    return y.view(len(y), -1, y.shape[-1])


def _add_rows(total_LIJ: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the sums over each layer's rows of ``left_i right_j`` to a total in float32."""
    left, right = _matrices(left), _matrices(right)
    if left.dtype == torch.float32:
        torch.baddbmm(total_LIJ, left.mT, right, out=total_LIJ)
    else:
        torch.baddbmm(total_LIJ, left.mT, right, out_dtype=torch.float32, out=total_LIJ)


def _operands(weights: LayerWeights, persistent_norm: bool, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of inputs, output, up, down, k and v of outputs; the gains of norms before them inside."""
    qkv = torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], dim=1)
    normed = (qkv * weights.norm_D[:, None]).to(dtype)
    wkv = (normed if persistent_norm else qkv.to(dtype))[:, len(qkv[0]) // 3 :]
    up = (weights.up_FD * weights.mlp_norm_D[:, None]).to(dtype)
    return [normed, weights.wo_DD.to(dtype).contiguous(), up, weights.down_DF.to(dtype).contiguous(), wkv]


def _gain(weights: LayerWeights) -> Tensor:
    """Gain of queries times that of keys; without norms of them any tensor, for the kernels take a pointer."""
    if weights.q_norm_D is None or weights.k_norm_D is None:
        return weights.norm_D
    return (weights.q_norm_D * weights.k_norm_D).contiguous()


def _tile(count: int) -> int:
    """Positions in the smallest tile that takes ``count`` of them."""
    return max(2, triton.next_power_of_2(count))


def _group_tile(group: int, head_dim: int) -> dict[str, int]:
    """Tile of a group's queries: as many pairs at once as fit the shared memory of the smaller GPUs."""
    return {"C": group, "J": min(64, 4096 // head_dim), "num_warps": group // 16}
