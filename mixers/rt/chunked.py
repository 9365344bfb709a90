"""Recurrent Transformer layers of wide models: groups of positions, the library's products, the rest fused.

For models whose products fill a GPU (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). Time is split in groups
of chunks. At the start of a group its queries and temporary pairs are computed, and attend to all earlier groups; at
the start of a chunk a kernel lets its queries attend to the group's earlier chunks; then the positions of the chunk
follow one another, and only the keys of the chunk itself remain. A position is four matrix products and five kernels
between them: attention; residual and norm; GELU; residual and norm; the persistent pair. The backward mirrors this
from the last position to the first, computes again what a group needs beside what is kept (outputs, projections of
inputs, queries, attention outputs and pairs: 18 bytes a channel in bfloat16) and adds to the weights' gradients group
by group. No atomics: results repeat bitwise. Thousands of small launches: meant to be captured in a CUDA graph.

Layers of a stack form a wavefront: while one works on a group, the next works on the group before, for that is all it
waits for. Each product and each kernel serves all layers at work, one group apart. Runs trained together are served in
the same way, but side by side.

Tensors carry a leading axis L of layers or runs and, except at the interface, have positions before sequences:
(L, T, B, D). The number of positions is a multiple of ``GROUP``; further ones are zero. Gains of the norms before
products are part of the weights. Logits are kept in units of log2. Buffers named ``now`` hold one position.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixers.rt.chunked_kernels import (
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
from mixers.rt.kernels import past_bwd_kernel, past_fwd_kernel, query_bwd_kernel
from mixers.runs import Method, Optionals, Tensors

CHUNK = 16
GROUP = 64
"""Positions of a chunk, and of a group of chunks."""
HEAD_DIMS = (16, 32, 64, 128)

# Tiles, the fastest of those tried on an H200.
GROUP_TILE: dict[str, Any] = {"num_warps": 4}
CHUNK_TILE: dict[str, Any] = {"J": 16, "num_warps": 1}
ATTEND: dict[str, Any] = {"G": 1, "num_warps": 1}
ROW: dict[str, Any] = {"num_warps": 4}
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

    def parts(runs: int, tensors: Sequence[Any]) -> list[LayerWeights]:
        """The weights, along their first axis, of what is computed together."""
        each = [LayerWeights(*tensors[i::layers]) for i in range(layers)]
        return each if runs > 1 else [_map(torch.cat, *each)]

    def forward(x_RBTD: Tensor, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        saved: list[Tensor] = []
        for weights in parts(len(x_RBTD), tensors):
            x_RBTD, *kept = _forward(x_RBTD, weights, slopes_H, scale, persistent_norm, dtype)
            saved += kept
        return (x_RBTD,), tuple(saved)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz_RBTD,), (x_RBTD, *tensors) = gradients, tensors
        together = parts(len(x_RBTD), tensors)
        each: list[LayerWeights] = []
        size = len(saved) // len(together)
        for i in reversed(range(len(together))):
            dz_RBTD, dweights = _backward(
                dz_RBTD, together[i], slopes_H, scale, persistent_norm, dtype, saved[i * size : (i + 1) * size]
            )
            each.insert(0, dweights)
        if len(x_RBTD) == 1:
            each = [LayerWeights._make(y if y is None else y[i : i + 1] for y in each[0]) for i in range(layers)]
        return dz_RBTD, *(y for field in zip(*each, strict=True) for y in field)

    return Method(forward, backward)


def _forward(
    x_RBTD: Tensor,
    weights: LayerWeights,
    slopes_H: Tensor,
    scale: float,
    persistent_norm: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Outputs (R, B, T, D) of a stack (R = 1) or of one layer of R runs, and what ``_backward`` wants as ``saved``."""
    R, B, T, D = x_RBTD.shape
    L, H, hidden = len(weights.wq_DD), len(slopes_H), weights.up_FD.shape[1]
    if reason := unsupported(D, H, 1, dtype, x_RBTD.device):
        raise ValueError(f"no kernel for {reason}")
    qkv, wo, up, down, wkv = (w.mT for w in _operands(weights, persistent_norm, dtype))
    slopes, (q_norm, k_norm), qk_normed = slopes_H.float(), _gains(weights), weights.q_norm_D is not None
    skew = GROUP if R == 1 else 0
    padded = -(-T // GROUP) * GROUP
    # The outputs of a layer are the inputs of the next; of runs both are kept side by side.
    stream = x_RBTD.new_empty((L + 1, padded, B, D) if skew else (2, R, padded, B, D))
    x, z = (stream[:-1], stream[1:]) if skew else (stream[0], stream[1])
    x[:R, :T].copy_(x_RBTD.transpose(1, 2))
    x[:R, T:].zero_()
    full = partial(torch.empty, dtype=dtype, device=x.device)
    raw = full(L, padded, B, 3 * D)
    q, a, k, v = (full(L, padded, B, D) for _ in range(4))
    lse = x.new_empty(L, padded, B, H)
    most = min(L, padded // GROUP) if skew else L
    m, l = x.new_empty(most, GROUP, B, H), x.new_empty(most, GROUP, B, H)
    o, u_now = x.new_empty(most, GROUP, B, D), x.new_empty(most, B, D)
    normed = full(most, GROUP * B, D)
    y_now, n_now, h_now, kv_now = (full(most, B, n) for n in (D, D, hidden, 2 * D))
    dims, row = {"D": D, "K": D // H}, {"D": D, "E": triton.next_power_of_2(D), **ROW}

    for lo, hi, base in _waves(L, padded, skew):
        n = hi - lo
        at = partial(_span, lo=lo, hi=hi, skew=skew)
        begun, products = at(x, base, GROUP), at(raw, base, GROUP)
        add_norm_fwd_kernel[GROUP * B, n](*_rows(begun, begun, begun, normed), scale, ADD=False, NORM=True, **row)
        _product(normed[:n], qkv[lo:hi], products)
        begin_fwd_kernel[GROUP * B, n](
            *_rows(products), q_norm[lo:hi], k_norm[lo:hi], *_rows(at(q, base, GROUP)), m, l, o, GROUP * B,
            K=D // H, NORM=qk_normed, **row,
        )  # fmt: skip
        past = partial(
            past_fwd_kernel[(n * B * H,)],
            q[lo], q, q, k[lo], v[lo], slopes, m, l, o, padded, B,
            S=GROUP, G=1, E=D // H, FIRST=False, SKEW=skew, **dims,
        )  # fmt: skip
        past(0, base, base + GROUP, base, C=GROUP, **_pairs(D // H), **GROUP_TILE)
        for chunk in range(0, GROUP, CHUNK):
            start = base + chunk
            if chunk:
                past(base, start, start + CHUNK, base, C=CHUNK, **CHUNK_TILE)
            here = at(q, start, CHUNK)
            attend = partial(
                attend_fwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                here, at(k, start, CHUNK), at(v, start, CHUNK), m[0, chunk], l[0, chunk], o[0, chunk], slopes,
                at(a, start, CHUNK), at(lse, start, CHUNK), B, here.stride(0) // D, S=GROUP, **dims, **ATTEND,
            )  # fmt: skip
            for t in range(CHUNK):
                attend(t, J=_tile(t))
                x_t, z_t, k_t, v_t = (at(y, start + t, 1) for y in (x, z, k, v))
                _product(at(a, start + t, 1), wo[lo:hi], y_now[:n])
                add_norm_fwd_kernel[B, n](*_rows(x_t, y_now, u_now, n_now), scale, ADD=True, NORM=True, **row)
                _product(n_now[:n], up[lo:hi], h_now[:n])
                gelu_fwd_kernel[(triton.cdiv(n * B * hidden, GELU["W"]),)](h_now, n * B * hidden, **GELU)
                _product(h_now[:n], down[lo:hi], y_now[:n])
                add_norm_fwd_kernel[B, n](
                    *_rows(u_now, y_now, z_t, n_now), scale, ADD=True, NORM=persistent_norm, **row
                )
                _product(n_now[:n], wkv[lo:hi], kv_now[:n])
                pair_fwd_kernel[B, n](*_rows(kv_now), k_norm[lo:hi], k_t, *_rows(v_t), NORM=qk_normed, **row)
    return z[-R:, :T].transpose(1, 2).contiguous(), stream, raw, q, a, k, v, lse


def _backward(
    dz_RBTD: Tensor,
    weights: LayerWeights,
    slopes_H: Tensor,
    scale: float,
    persistent_norm: bool,
    dtype: torch.dtype,
    saved: Sequence[Tensor],
) -> tuple[Tensor, LayerWeights]:
    """Gradients of inputs (R, B, T, D) and weights, all float32; None where the weight is None."""
    R, B, T, D = dz_RBTD.shape
    L, H, hidden = len(weights.wq_DD), len(slopes_H), weights.up_FD.shape[1]
    qkv, wo, up, down, wkv = _operands(weights, persistent_norm, dtype)
    slopes, (q_norm, k_norm), qk_normed = slopes_H.float(), _gains(weights), weights.q_norm_D is not None
    stream, raw, q, a, k, v, lse = saved
    padded, skew = q.shape[1], GROUP if R == 1 else 0
    x, z = (stream[:-1], stream[1:]) if skew else (stream[0], stream[1])
    dz, dx = (dz_RBTD.new_zeros(R, padded, B, D) for _ in range(2))
    dz[:, :T].copy_(dz_RBTD.transpose(1, 2))
    full = partial(torch.empty, dtype=dtype, device=q.device)
    da, delta = torch.empty_like(q), torch.empty_like(lse)
    most = min(L, padded // GROUP) if skew else L
    mine, below = (dz.new_empty(L + 1 if skew else L, GROUP, B, D) for _ in range(2))
    u = dz.new_empty(most, GROUP, B, D)
    y, n_u, n_xz, raw_k, dy, du = (full(most, GROUP, B, D) for _ in range(6))
    h, dh = (full(most, GROUP, B, hidden) for _ in range(2))
    dkv, draw = full(most, GROUP, B, 2 * D), full(most, GROUP, B, 3 * D)
    dk, dv = (dz.new_empty(most, GROUP, B, D) for _ in range(2))
    y_now, h_now = full(most, B, D), full(most, B, hidden)
    dq_norm, dkt_norm = (dz.new_zeros(L, GROUP // CHUNK, B, D) for _ in range(2))
    dk_norm = dz.new_zeros(L, B, D)
    dqkv, dwo, dup, ddown, dwkv = (torch.zeros_like(w, dtype=dz.dtype) for w in (qkv, wo, up, down, wkv))
    dims, row = {"D": D, "K": D // H}, {"D": D, "E": triton.next_power_of_2(D), **ROW}

    for lo, hi, base in reversed(list(_waves(L, padded, skew))):
        n = hi - lo
        if hi == L:
            top = base - (n - 1) * skew
            mine[-R:].copy_(dz[:, top : top + GROUP])
        at = partial(_span, lo=lo, hi=hi, skew=skew)
        d = mine[len(mine) - L + lo :]
        _product(at(a, base, GROUP), wo[lo:hi].mT, y[:n])
        begun, ended = at(x, base, GROUP), at(z, base, GROUP)
        add_norm_fwd_kernel[GROUP * B, n](*_rows(begun, y, u, n_u), scale, ADD=True, NORM=True, **row)
        _product(n_u[:n], up[lo:hi].mT, h[:n])
        normalise = partial(add_norm_fwd_kernel[GROUP * B, n], scale=scale, ADD=False, **row)
        normalise(*_rows(ended, ended, ended, n_xz), NORM=persistent_norm)
        if qk_normed:
            _product(n_xz[:n], wkv[lo:hi, :D].mT, raw_k[:n])

        past = partial(
            past_bwd_kernel[(n * B * H,)],
            q[lo], k[lo], v[lo], da[lo], lse[lo], delta[lo], slopes, dk, dv, padded, B,
            S=GROUP, G=1, E=D // H, SKEW=skew, **dims,
        )  # fmt: skip
        end = base + GROUP
        past(base, end, end, padded + L * skew, base, C=GROUP, FIRST=True, **_pairs(D // H), **GROUP_TILE)
        for chunk in reversed(range(0, GROUP, CHUNK)):
            start = base + chunk
            if chunk + CHUNK < GROUP:
                past(start, start + CHUNK, start + CHUNK, end, base, C=CHUNK, FIRST=False, **CHUNK_TILE)
            here = at(q, start, CHUNK)
            attend = partial(
                attend_bwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                here, *(at(y, start, CHUNK) for y in (k, v, a, da, lse, delta)), dk[0, chunk], dv[0, chunk], slopes,
                dkv[0, chunk], B, here.stride(0) // D, C=CHUNK, S=GROUP, **dims, **ATTEND,
            )  # fmt: skip
            for t in reversed(range(CHUNK)):
                i = chunk + t
                z_t = at(z, base + i, 1)
                attend(t, J=_tile(CHUNK - 2 - t), QUERY=t + 1 < CHUNK, PULL=True)
                if qk_normed:
                    pair_bwd_kernel[B, n](*_rows(dkv[:, i], raw_k[:, i]), k_norm[lo:hi], *_rows(dk_norm[lo:hi]), **row)
                _product(dkv[:n, i], wkv[lo:hi], y_now[:n])
                add_norm_bwd_kernel[B, n](
                    *_rows(d[:, i], y_now, z_t, d[:, i], dy[:, i]), scale, NORM=persistent_norm, LOW=True, **row
                )
                _product(dy[:n, i], down[lo:hi], h_now[:n])
                gelu_bwd_kernel[B, triton.cdiv(hidden, GELU["W"]), n](
                    *_rows(h_now, h[:, i], dh[:, i]), F=hidden, **GELU
                )
                _product(dh[:n, i], up[lo:hi], y_now[:n])
                add_norm_bwd_kernel[B, n](
                    *_rows(d[:, i], y_now, u[:, i], d[:, i], du[:, i]), scale, NORM=True, LOW=True, **row
                )
                _product(du[:n, i], wo[lo:hi], at(da, base + i, 1))
            attend(-1, J=2, QUERY=True, PULL=False)

        gelu_fwd_kernel[(triton.cdiv(h[:n].numel(), GELU["W"]),)](h, h[:n].numel(), **GELU)
        _add_rows(dup[lo:hi], dh[:n], n_u[:n])
        _add_rows(ddown[lo:hi], dy[:n], h[:n])
        _add_rows(dwo[lo:hi], du[:n], at(a, base, GROUP))
        _add_rows(dwkv[lo:hi], dkv[:n], n_xz[:n])
        query_bwd_kernel[n * B * H, 1](
            q[lo], q, q, k[lo], v[lo], da[lo], lse[lo], delta[lo], slopes, y, y, y,
            padded, B, base, GROUP, C=GROUP, G=1, E=D // H, TEMPORARY=False, SKEW=skew,
            **dims, **_pairs(D // H), **GROUP_TILE,
        )  # fmt: skip
        begin_bwd_kernel[B, GROUP // CHUNK, n](
            *_rows(at(raw, base, GROUP)), q_norm[lo:hi], k_norm[lo:hi], *_rows(at(da, base, GROUP)),
            at(lse, base, GROUP), at(delta, base, GROUP), y, draw, dq_norm[lo:hi], dkt_norm[lo:hi], B,
            K=D // H, C=CHUNK, S=GROUP, NORM=qk_normed, **row,
        )  # fmt: skip
        normalise(*_rows(begun, begun, begun, n_xz), NORM=True)
        _add_rows(dqkv[lo:hi], draw[:n], n_xz[:n])
        _product(draw[:n], qkv[lo:hi], y[:n])
        add_norm_bwd_kernel[GROUP * B, n](*_rows(d, y, begun, below[lo:hi], y), scale, NORM=True, LOW=False, **row)
        if lo == 0:
            dx[:, base : base + GROUP].copy_(below[:R])
        mine, below = below, mine

    gain = weights.norm_D[:, None]
    dnorm = (dqkv * torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], dim=1)).sum(1)
    dqkv *= gain
    if persistent_norm:
        dnorm += (dwkv * torch.cat([weights.wk_DD, weights.wv_DD], dim=1)).sum(1)
        dwkv *= gain
    dqkv[:, D:] += dwkv
    dwq, dwk, dwv = dqkv.split(D, dim=1)
    gradients = LayerWeights(
        norm_D=dnorm,
        wq_DD=dwq,
        wk_DD=dwk,
        wv_DD=dwv,
        q_norm_D=dq_norm.sum((1, 2)) if qk_normed else None,
        k_norm_D=dkt_norm.sum((1, 2)) + dk_norm.sum(1) if qk_normed else None,
        wo_DD=dwo,
        mlp_norm_D=(dup * weights.up_FD).sum(1),
        up_FD=dup * weights.mlp_norm_D[:, None],
        down_DF=ddown,
    )
    return dx[:, :T].transpose(1, 2).contiguous(), gradients


def _waves(layers: int, length: int, skew: int) -> Iterator[tuple[int, int, int]]:
    """Layers lo to hi that work at the same time, and where the group of ``lo`` starts; a stack, or runs (skew 0)."""
    groups = length // GROUP
    if not skew:
        yield from ((0, layers, group * GROUP) for group in range(groups))
        return
    for wave in range(groups + layers - 1):
        lo = max(0, wave + 1 - groups)
        yield lo, min(layers, wave + 1), (wave - lo) * GROUP


def _span(y_LTBX: Tensor, t: int, count: int, *, lo: int, hi: int, skew: int) -> Tensor:
    """Rows (hi - lo, count * B, X) of positions, from t on for layer lo, ``skew`` earlier for each further one."""
    _, T, B, X = y_LTBX.shape
    offset = y_LTBX.storage_offset() + (lo * T + t) * B * X
    return y_LTBX.as_strided((hi - lo, count * B, X), ((T - skew) * B * X, X, 1), offset)


def _rows(*tensors: Tensor) -> list[Any]:
    """Each tensor (L, ...) and how far its layers are apart, as kernels want them."""
    return [argument for y in tensors for argument in (y, y.stride(0))]


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


def _gains(weights: LayerWeights) -> list[Tensor]:
    """Gains of queries' and keys' norms; where a norm is absent, any tensor, for the kernels take a pointer."""
    return [(weights.norm_D if y is None else y).contiguous() for y in (weights.q_norm_D, weights.k_norm_D)]


def _tile(count: int) -> int:
    """Positions in the smallest tile that takes ``count`` of them."""
    return max(2, triton.next_power_of_2(count))


def _pairs(head_dim: int) -> dict[str, int]:
    """Pairs that a tile of queries meets at once: those that fit the shared memory of the smaller GPUs."""
    return {"J": min(64, 4096 // head_dim)}


def _map(function: Callable[[list[Tensor]], Tensor], *weights: LayerWeights) -> LayerWeights:
    """``function`` of each field of several layers, None where it is absent."""
    return LayerWeights._make(None if ys[0] is None else function(list(ys)) for ys in zip(*weights, strict=True))
