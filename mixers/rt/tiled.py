"""The published training method of the Recurrent Transformer: exact tiling with a custom backward, in PyTorch.

Oncescu et al. 2026 (arXiv:2604.21215), Algorithms 1 and 2 and section "The backward pass": online softmax; when block
t is done, the last P blocks are attended to by the next P, P the largest power of two that divides t; the key-value
cache is preallocated with positions first; the reverse loop holds only what the next position back depends on.

All tensors carry the run axis; inside this file they are laid out (T, R, B, D), positions first.
"""

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS, at_least_float32
from mixers.rt.naive import Weights, feed_forward, key_value

QUERY_CHUNK = 128
"""Queries whose attention weights exist at once in the batched part of the backward; bounds its memory."""

Saved = tuple[Tensor, ...]


def tiles(blocks: int) -> Iterator[tuple[slice, slice]]:
    """For t = 1..blocks-1: key blocks and query blocks of the tile that opens when t blocks are done (Algorithm 1)."""
    for t in range(1, blocks):
        size = t & -t
        yield slice(t - size, t), slice(t, min(t + size, blocks))


def tiled_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, Saved]:
    """Outputs z (R, B, T, D) and what ``tiled_backward`` needs; arguments as ``naive_recurrence``, with a run axis."""
    heads, length = len(slopes_H), x_RBTD.shape[2]
    x, q, k_temp, v_temp = (_positions_first(y) for y in (x_RBTD, _scale_queries(q_RBTD, heads), k_RBTD, v_RBTD))
    low = weights.map(lambda w: w.to(q.dtype))
    o, m, l = _own_block(q, k_temp, v_temp, slopes_H, block)
    z, k, v = torch.empty_like(x), torch.empty_like(k_temp), torch.empty_like(v_temp)
    a = torch.empty_like(x)
    blocks = -(-length // block)
    openings = list(tiles(blocks))
    for c in range(blocks):
        here = slice(c * block, min((c + 1) * block, length))
        if c > 0:
            _update_tile(o, m, l, q, k, v, slopes_H, *_in_positions(openings[c - 1], block, length))
        a[here] = (o[here] / l[here, ..., None]).flatten(-2)
        z[here] = _feed_forward(x[here], a[here], low, scale)
        k[here], v[here] = _key_value(z[here], low)
    lse = m + l.log()
    return _batch_first(z), (a, lse, k, v)


def tiled_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: Saved,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Gradients of x, q, k, v (each R, B, T, D) and of the weights."""
    heads, length = len(slopes_H), x_RBTD.shape[2]
    x, z, dz = (_positions_first(y) for y in (x_RBTD, z_RBTD, dz_RBTD))
    q, k_temp, v_temp = (_positions_first(y) for y in (_scale_queries(q_RBTD, heads), k_RBTD, v_RBTD))
    a, lse, k, v = saved
    chain = _Chain(x, a, z, weights.map(lambda w: w.to(q.dtype)), scale)
    wide = a.dtype
    dz = dz.to(wide, copy=True)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    da, dx = torch.empty_like(a), torch.empty_like(a)
    delta = torch.empty_like(lse)
    blocks = -(-length // block)
    closings = list(tiles(blocks))
    for c in reversed(range(blocks)):
        here = slice(c * block, min((c + 1) * block, length))
        if c + 1 < blocks:
            _pull_tile(dk, dv, q, k, v, da, lse, delta, slopes_H, *_in_positions(closings[c], block, length))
        dz[here] += chain.through_key_value(here, dk[here], dv[here])
        dx[here], da[here] = chain.through_feed_forward(here, dz[here])
        delta[here] = (da[here] * a[here]).unflatten(-1, (heads, -1)).sum(-1)
    dq, dk_temp, dv_temp = _outside(q, k_temp, v_temp, k, v, da, lse, delta, slopes_H, block)
    dweights = _weight_gradients(x, a, z, dz, dk, dv, weights, scale, q.dtype)
    dq = dq * (q.shape[-1] // heads) ** -0.5
    return _batch_first(dx), _batch_first(dq.to(q)), _batch_first(dk_temp.to(q)), _batch_first(dv_temp.to(q)), dweights


class _Chain:
    """Gradients of activations inside the reverse loop; all that does not depend on the loop is computed here, once."""

    def __init__(self, x: Tensor, a: Tensor, z: Tensor, weights: Weights, scale: float) -> None:
        self.weights, self.scale, self.z = weights, scale, z
        self.u = x + scale * _linear(a, weights.wo_DD)
        self.u_rms = _inverse_rms(self.u)
        self.gelu_slope = _gelu_slope(_linear(self.u * self.u_rms * weights.mlp_norm_D[:, None], weights.up_FD))
        self.z_rms = _inverse_rms(z)
        self.k_raw = _linear(_normed(z, weights.kv_norm_D), weights.wk_DD).to(z)
        self.k_rms = _inverse_rms(self.k_raw)

    def through_key_value(self, here: slice, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradient of z from the gradients of its persistent pair."""
        w = self.weights
        if w.k_norm_D is not None:
            dk = _rms_norm_vjp(dk, self.k_raw[here], self.k_rms[here], w.k_norm_D)
        dnormed = (_linear(dk, w.wk_DD.mT) + _linear(dv, w.wv_DD.mT)).to(self.z)
        if w.kv_norm_D is None:
            return dnormed
        return _rms_norm_vjp(dnormed, self.z[here], self.z_rms[here], w.kv_norm_D)

    def through_feed_forward(self, here: slice, dz: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the attention output from the gradient of z."""
        w = self.weights
        dpre = self.scale * _linear(dz, w.down_DF.mT) * self.gelu_slope[here]
        dnormed = _linear(dpre, w.up_FD.mT).to(dz)
        du = dz + _rms_norm_vjp(dnormed, self.u[here], self.u_rms[here], w.mlp_norm_D)
        return du, self.scale * _linear(du, w.wo_DD.mT).to(dz)


def _weight_gradients(
    x: Tensor,
    a: Tensor,
    z: Tensor,
    dz: Tensor,
    dk: Tensor,
    dv: Tensor,
    weights: Weights,
    scale: float,
    low: torch.dtype,
) -> Weights:
    """One batched pass through the oracle's own formulas, all positions at once, with the gradients of the loop."""
    x, a, z, dz, dk, dv = (rearrange(y, "t r b d -> r (b t) d") for y in (x, a, z, dz, dk, dv))
    run_axis = weights.map(lambda _: 0)
    with torch.enable_grad(), torch.autocast(x.device.type, dtype=low, enabled=low == torch.bfloat16):
        leaves = weights.map(lambda w: w.detach().requires_grad_())
        out = vmap(feed_forward, (0, 0, run_axis, None))(x, a, leaves, scale)
        k, v = vmap(key_value, (0, run_axis))(z, leaves)
    gradients = iter(
        torch.autograd.grad((out, k, v), [w for w in leaves if w is not None], (dz.to(out), dk.to(k), dv.to(v)))
    )
    return leaves.map(lambda _: next(gradients))


def _own_block(q: Tensor, k: Tensor, v: Tensor, slopes_H: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Online-softmax state (o, m, l) after each query has seen the temporary pairs of its own block."""
    heads, length = len(slopes_H), len(q)
    logits = _own_block_logits(q, k, slopes_H, block)
    m = logits.amax(-1)
    p = (logits - m[..., None]).exp()
    o = torch.einsum("crbhij,cjrbhk->cirbhk", p.to(v), _blocks(v, heads, block)).to(m)
    m, l = (rearrange(y, "c r b h i -> (c i) r b h")[:length].contiguous() for y in (m, p.sum(-1)))
    return o.flatten(0, 1)[:length].contiguous(), m, l


def _own_block_logits(q: Tensor, k: Tensor, slopes_H: Tensor, block: int) -> Tensor:
    """Logits (C, R, B, H, I, J) of queries against the temporary keys of their own block of I = J = b positions."""
    heads = len(slopes_H)
    logits = torch.einsum("cirbhk,cjrbhk->crbhij", _blocks(q, heads, block), _blocks(k, heads, block))
    distance = _distance(block, block, 0, q.device)
    return _biased(logits, slopes_H, distance).masked_fill(distance > 0, -torch.inf)


def _update_tile(
    o: Tensor, m: Tensor, l: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes_H: Tensor, keys: slice, queries: slice
) -> None:
    """Algorithm 2: let a tile of queries attend to a tile of persistent pairs, in place."""
    heads = len(slopes_H)
    logits = _tile_logits(q, k, slopes_H, keys, queries)
    m_old = m[queries].permute(1, 2, 3, 0)
    m_new = torch.maximum(m_old, logits.amax(-1))
    decay = (m_old - m_new).exp().permute(3, 0, 1, 2)
    p = (logits - m_new[..., None]).exp()
    seen = torch.matmul(p.to(v), _per_head(v[keys], heads)).permute(3, 0, 1, 2, 4)
    o[queries] = o[queries] * decay[..., None] + seen
    l[queries] = l[queries] * decay + p.sum(-1).permute(3, 0, 1, 2)
    m[queries] = m_new.permute(3, 0, 1, 2)


def _pull_tile(
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    da: Tensor,
    lse: Tensor,
    delta: Tensor,
    slopes_H: Tensor,
    keys: slice,
    queries: slice,
) -> None:
    """Reverse of ``_update_tile``: add to dk, dv of a tile what its queries send back, in place."""
    heads = len(slopes_H)
    da_ = _per_head(da[queries].to(q), heads)
    p, dlogits = _logit_gradients(q, k, v, da_, lse, delta, slopes_H, keys, queries)
    dv[keys] += torch.matmul(p.to(q).mT, da_).permute(3, 0, 1, 2, 4).flatten(-2)
    dk[keys] += torch.matmul(dlogits.to(q).mT, _per_head(q[queries], heads)).permute(3, 0, 1, 2, 4).flatten(-2)


def _logit_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    da_: Tensor,
    lse: Tensor,
    delta: Tensor,
    slopes_H: Tensor,
    keys: slice,
    queries: slice,
) -> tuple[Tensor, Tensor]:
    """Attention weights p and gradients of the logits (R, B, H, I, J), given per-head gradients ``da_`` of outputs."""
    p = (_tile_logits(q, k, slopes_H, keys, queries) - lse[queries].permute(1, 2, 3, 0)[..., None]).exp()
    dp = torch.matmul(da_, _per_head(v[keys], len(slopes_H)).mT)
    return p, p * (dp - delta[queries].permute(1, 2, 3, 0)[..., None])


def _outside(
    q: Tensor,
    k_temp: Tensor,
    v_temp: Tensor,
    k: Tensor,
    v: Tensor,
    da: Tensor,
    lse: Tensor,
    delta: Tensor,
    slopes_H: Tensor,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scaled queries and temporary pairs, after the loop: nothing in it waits for them."""
    heads, length = len(slopes_H), len(q)
    logits = _own_block_logits(q, k_temp, slopes_H, block)
    lse_, delta_ = (rearrange(_pad(y, block), "(c i) r b h -> c r b h i 1", i=block) for y in (lse, delta))
    p = (logits - lse_).exp()
    da_ = _blocks(da.to(q), heads, block)
    dp = torch.einsum("cirbhk,cjrbhk->crbhij", da_, _blocks(v_temp, heads, block))
    dlogits = (p * (dp - delta_)).to(q)
    dq = torch.einsum("crbhij,cjrbhk->cirbhk", dlogits, _blocks(k_temp, heads, block))
    dk_temp = torch.einsum("crbhij,cirbhk->cjrbhk", dlogits, _blocks(q, heads, block))
    dv_temp = torch.einsum("crbhij,cirbhk->cjrbhk", p.to(q), da_)
    dq, dk_temp, dv_temp = (y.flatten(0, 1)[:length].flatten(-2).to(da) for y in (dq, dk_temp, dv_temp))
    for start in range(block, length, QUERY_CHUNK):
        queries = slice(start, min(start + QUERY_CHUNK, length))
        keys = slice(0, queries.stop - 1)
        _, dlogits = _logit_gradients(q, k, v, _per_head(da[queries].to(q), heads), lse, delta, slopes_H, keys, queries)
        i = torch.arange(queries.start, queries.stop, device=q.device)
        later = torch.arange(keys.stop, device=q.device) >= i[:, None] // block * block
        dlogits = dlogits.masked_fill(later, 0.0).to(q)
        dq[queries] += torch.matmul(dlogits, _per_head(k[keys], heads)).permute(3, 0, 1, 2, 4).flatten(-2)
    return dq, dk_temp, dv_temp


def _tile_logits(q: Tensor, k: Tensor, slopes_H: Tensor, keys: slice, queries: slice) -> Tensor:
    """Biased logits (R, B, H, I, J) of a tile."""
    heads = len(slopes_H)
    logits = torch.matmul(_per_head(q[queries], heads), _per_head(k[keys], heads).mT)
    distance = _distance(queries.stop - queries.start, keys.stop - keys.start, keys.start - queries.start, q.device)
    return _biased(logits, slopes_H, distance)


def _biased(logits: Tensor, slopes_H: Tensor, distance_IJ: Tensor) -> Tensor:
    """Logits (..., H, I, J) with ALiBi, in the precision of their softmax: at least float32."""
    wide = at_least_float32(logits)
    return wide + slopes_H.to(wide)[:, None, None] * distance_IJ


def _feed_forward(x: Tensor, a: Tensor, weights: Weights, scale: float) -> Tensor:
    u = x + scale * _linear(a, weights.wo_DD)
    hidden = F.gelu(_linear(_normed(u, weights.mlp_norm_D), weights.up_FD))
    return u + scale * _linear(hidden, weights.down_DF)


def _key_value(z: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    normed = _normed(z, weights.kv_norm_D)
    return _normed(_linear(normed, weights.wk_DD), weights.k_norm_D), _linear(normed, weights.wv_DD)


def _linear(y: Tensor, w_ROI: Tensor) -> Tensor:
    """(T, R, B, inputs) -> (T, R, B, outputs), each run with its own matrix, in the matrix's precision."""
    rows = y.to(w_ROI.dtype).transpose(0, 1).flatten(1, 2)
    return torch.bmm(rows, w_ROI.mT).unflatten(1, (len(y), -1)).transpose(0, 1)


def _normed(y: Tensor, gain_RD: Tensor | None) -> Tensor:
    if gain_RD is None:
        return y
    wide = at_least_float32(y)
    return (wide * _inverse_rms(wide)).to(y) * gain_RD[:, None].to(y)


def _inverse_rms(y: Tensor) -> Tensor:
    return torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)


def _rms_norm_vjp(dy: Tensor, y: Tensor, inverse_rms: Tensor, gain_RD: Tensor) -> Tensor:
    dn = dy * gain_RD[:, None].to(dy)
    return inverse_rms * (dn - y * inverse_rms.square() * (dn * y).mean(-1, keepdim=True))


def _gelu_slope(pre: Tensor) -> Tensor:
    """Derivative of the erf GELU."""
    density = torch.exp(-0.5 * pre.square()) * (2 * torch.pi) ** -0.5
    return 0.5 * (1 + torch.erf(pre * 2**-0.5)) + pre * density


def _distance(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Key position minus query position (I, J), the first key standing ``offset`` after the first query."""
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] + offset


def _in_positions(tile: tuple[slice, slice], block: int, length: int) -> tuple[slice, slice]:
    keys, queries = tile
    return (
        slice(keys.start * block, keys.stop * block),
        slice(queries.start * block, min(queries.stop * block, length)),
    )


def _blocks(y: Tensor, heads: int, block: int) -> Tensor:
    """(T, R, B, D) -> (C, b, R, B, H, K), the last block padded with zeros."""
    return _pad(y, block).unflatten(0, (-1, block)).unflatten(-1, (heads, -1))


def _pad(y: Tensor, block: int) -> Tensor:
    missing = -len(y) % block
    return torch.cat([y, y.new_zeros(missing, *y.shape[1:])]) if missing else y


def _per_head(y: Tensor, heads: int) -> Tensor:
    """(T, R, B, D) -> (R, B, H, T, K)."""
    return rearrange(y, "t r b (h k) -> r b h t k", h=heads)


def _positions_first(y_RBTD: Tensor) -> Tensor:
    return rearrange(y_RBTD, "r b t d -> t r b d").contiguous()


def _batch_first(y: Tensor) -> Tensor:
    return rearrange(y, "t r b d -> r b t d")


def _scale_queries(q_RBTD: Tensor, heads: int) -> Tensor:
    return q_RBTD * (q_RBTD.shape[-1] // heads) ** -0.5
