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
    slopes, gain, qk_normed = slopes_H.float(), _gain(weights), weights.q_norm_D is not None
    group = group_size(L if R == 1 else 1, B)
    skew = group if R == 1 else 0
    chained = skew > 0 and persistent_norm
    padded = -(-T // group) * group
    z_RBTD = torch.empty_like(x_RBTD)
    # Inputs of layers, and outputs, which are the next layer's inputs one wave later.
    x, z = (x_RBTD.new_empty(L + 1, group, B, D) for _ in range(2))
    full = partial(torch.empty, dtype=dtype, device=x.device)
    both = (L + 1,) if chained else (2, L)
    n_xz, r_xz = full(*both, padded, B, D), x.new_empty(*both, padded, B, 1)
    (n_x, n_z), (r_x, r_z) = _inputs_outputs(n_xz, chained), _inputs_outputs(r_xz, chained)
    raw = full(L, padded, B, 3 * D)
    q, a, n_u, k, v = (full(L, padded, B, D) for _ in range(5))
    lse, r_u, r_k = (x.new_empty(L, padded, B, n) for n in (H, 1, 1))
    most = min(L, padded // group) if skew else L
    m, l = x.new_empty(most, group, B, H), x.new_empty(most, group, B, H)
    o, u_now = x.new_empty(most, group, B, D), x.new_empty(most, B, D)
    y_now, h_now, kv_now = (full(most, B, n) for n in (D, hidden, 2 * D))
    dims, row = {"D": D, "K": D // H}, {"D": D, "E": triton.next_power_of_2(D), **ROW}

    for lo, hi, base in _waves(L, padded, group, skew):
        n = hi - lo
        at = partial(_span, lo=lo, hi=hi, skew=skew)
        if lo == 0:
            _copy(x[:R], x_RBTD[:, :, base : base + group].transpose(1, 2))
        begun, products = at(n_x, base, group), at(raw, base, group)
        fresh = n if not chained else 1 if lo == 0 else 0
        if fresh:
            add_norm_fwd_kernel[group * B, fresh](
                *_rows(x[lo:], None, None, begun, at(r_x, base, group)), scale, NORM=True, **row
            )
        _product(begun, qkv[lo:hi], products)
        begin_fwd_kernel[group * B, n](
            *_rows(products), gain[lo:hi], *_rows(at(q, base, group)), m, l, o, group * B,
            K=D // H, NORM=qk_normed, **row,
        )  # fmt: skip
        past = partial(
            past_fwd_kernel[(n * B * H,)],
            q[lo], q, q, k[lo], v[lo], slopes, m, l, o, padded, B,
            S=group, G=1, E=D // H, FIRST=False, SKEW=skew, **dims,
        )  # fmt: skip
        past(0, base, base + group, base, **_group_tile(group, D // H))
        for chunk in range(0, group, CHUNK):
            start = base + chunk
            if chunk:
                past(base, start, start + CHUNK, base, C=CHUNK, **CHUNK_TILE)
            here = at(q, start, CHUNK)
            attend = partial(
                attend_fwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                here, at(k, start, CHUNK), at(v, start, CHUNK), m[0, chunk], l[0, chunk], o[0, chunk], slopes,
                at(a, start, CHUNK), at(lse, start, CHUNK), B, here.stride(0) // D, S=group, **dims, **ATTEND,
            )  # fmt: skip
            for t in range(CHUNK):
                attend(t, J=_tile(t))
                x_t, z_t = x[lo:hi, chunk + t], z[lo + 1 : hi + 1, chunk + t]
                a_t, nu_t, ru_t, nz_t = (at(y, start + t, 1) for y in (a, n_u, r_u, n_z))
                rz_t, k_t, rk_t, v_t = (at(y, start + t, 1) for y in (r_z, k, r_k, v))
                _product(a_t, wo[lo:hi], y_now[:n])
                add_norm_fwd_kernel[B, n](*_rows(x_t, y_now, u_now, nu_t, ru_t), scale, NORM=True, **row)
                _product(nu_t, up[lo:hi], h_now[:n])
                gelu_fwd_kernel[(triton.cdiv(n * B * hidden, GELU["W"]),)](h_now, n * B * hidden, **GELU)
                _product(h_now[:n], down[lo:hi], y_now[:n])
                add_norm_fwd_kernel[B, n](*_rows(u_now, y_now, z_t, nz_t, rz_t), scale, NORM=persistent_norm, **row)
                _product(nz_t, wkv[lo:hi], kv_now[:n])
                pair_fwd_kernel[B, n](*_rows(kv_now), k_t, *_rows(v_t, rk_t), NORM=qk_normed, **row)
        if hi == L:
            top = base - (n - 1) * skew
            _copy(z_RBTD[:, :, top : top + group].transpose(1, 2), z[-R:])
        x, z = z, x
    return z_RBTD, n_xz, r_xz, raw, q, lse, a, r_u, n_u, r_k, k, v


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
    R, B, _, D = dz_RBTD.shape
    L, H, hidden = len(weights.wq_DD), len(slopes_H), weights.up_FD.shape[1]
    qkv, wo, up, down, wkv = _operands(weights, persistent_norm, dtype)
    slopes, gain, qk_normed = slopes_H.float(), _gain(weights), weights.q_norm_D is not None
    n_xz, r_xz, raw, q, lse, a, r_u, n_u, r_k, k, v = saved
    group, padded = group_size(L if R == 1 else 1, B), q.shape[1]
    skew = group if R == 1 else 0
    chained = skew > 0 and persistent_norm
    (n_x, n_z), (r_x, r_z) = _inputs_outputs(n_xz, chained), _inputs_outputs(r_xz, chained)
    dx_RBTD = torch.empty_like(dz_RBTD)
    full = partial(torch.empty, dtype=dtype, device=q.device)
    da, delta = torch.empty_like(q), torch.empty_like(lse)
    most = min(L, padded // group) if skew else L
    # Gradients of outputs, and of inputs, which are the outputs of the layer below one wave later.
    dz, dx = (dz_RBTD.new_empty(L + 1, group, B, D) for _ in range(2))
    y, dy, du = (full(most, group, B, D) for _ in range(3))
    h, dh = (full(most, group, B, hidden) for _ in range(2))
    dkv, draw = full(most, group, B, 2 * D), full(most, group, B, 3 * D)
    dk, dv = (dz.new_empty(most, group, B, D) for _ in range(2))
    y_now, h_now = full(most, B, D), full(most, B, hidden)
    dgain = dz.new_zeros(L, group // BEGIN_BWD["C"], B, D)
    dqkv, dwo, dup, ddown, dwkv = (torch.zeros_like(w, dtype=dz.dtype) for w in (qkv, wo, up, down, wkv))
    dims, row = {"D": D, "K": D // H}, {"D": D, "E": triton.next_power_of_2(D), **ROW}

    for lo, hi, base in reversed(list(_waves(L, padded, group, skew))):
        n = hi - lo
        if hi == L:
            top = base - (n - 1) * skew
            _copy(dz[-R:], dz_RBTD[:, :, top : top + group].transpose(1, 2))
        at = partial(_span, lo=lo, hi=hi, skew=skew)
        d = dz[lo + 1 :]
        _product(at(n_u, base, group), up[lo:hi].mT, h[:n])

        past = partial(
            past_bwd_kernel[(n * B * H,)],
            q[lo], k[lo], v[lo], da[lo], lse[lo], delta[lo], slopes, dk, dv, padded, B,
            S=group, G=1, E=D // H, SKEW=skew, **dims,
        )  # fmt: skip
        end = base + group
        past(base, end, end, padded + L * skew, base, FIRST=True, **_group_tile(group, D // H))
        for chunk in reversed(range(0, group, CHUNK)):
            start = base + chunk
            if chunk + CHUNK < group:
                past(start, start + CHUNK, start + CHUNK, end, base, C=CHUNK, FIRST=False, **CHUNK_TILE)
            here = at(q, start, CHUNK)
            attend = partial(
                attend_bwd_kernel[n * B, triton.cdiv(H, ATTEND["G"])],
                here, *(at(y, start, CHUNK) for y in (k, v, a, da, lse, delta)), dk[0, chunk], dv[0, chunk], slopes,
                dkv[0, chunk], B, here.stride(0) // D, C=CHUNK, S=group, **dims, **ATTEND,
            )  # fmt: skip
            for t in reversed(range(CHUNK)):
                i = chunk + t
                k_t, rk_t, nz_t, rz_t = (at(y, base + i, 1) for y in (k, r_k, n_z, r_z))
                nu_t, ru_t, da_t = (at(y, base + i, 1) for y in (n_u, r_u, da))
                attend(t, J=_tile(CHUNK - 2 - t), QUERY=t + 1 < CHUNK, PULL=True)
                if qk_normed:
                    pair_bwd_kernel[B, n](*_rows(dkv[:, i], k_t, rk_t), **row)
                _product(dkv[:n, i], wkv[lo:hi], y_now[:n])
                add_norm_bwd_kernel[B, n](
                    *_rows(d[:, i], y_now, nz_t, rz_t, d[:, i], dy[:, i]), scale, NORM=persistent_norm, **row
                )
                _product(dy[:n, i], down[lo:hi], h_now[:n])
                gelu_bwd_kernel[B, triton.cdiv(hidden, GELU["W"]), n](
                    *_rows(h_now, h[:, i], dh[:, i]), F=hidden, **GELU
                )
                _product(dh[:n, i], up[lo:hi], y_now[:n])
                add_norm_bwd_kernel[B, n](
                    *_rows(d[:, i], y_now, nu_t, ru_t, d[:, i], du[:, i]), scale, NORM=True, **row
                )
                _product(du[:n, i], wo[lo:hi], da_t)
            attend(-1, J=2, QUERY=True, PULL=False)

        _add_rows(dup[lo:hi], dh[:n], at(n_u, base, group))
        _add_rows(ddown[lo:hi], dy[:n], h[:n])
        _add_rows(dwo[lo:hi], du[:n], at(a, base, group))
        _add_rows(dwkv[lo:hi], dkv[:n], at(n_z, base, group))
        query_bwd_kernel[n * B * H, 1](
            q[lo], q, q, k[lo], v[lo], da[lo], lse[lo], delta[lo], slopes, y, y, y,
            padded, B, base, group, G=1, E=D // H, TEMPORARY=False, SKEW=skew,
            **dims, **_group_tile(group, D // H),
        )  # fmt: skip
        begin_bwd_kernel[B, group // BEGIN_BWD["C"], n](
            *_rows(at(raw, base, group)), gain[lo:hi], *_rows(at(da, base, group)),
            at(lse, base, group), at(delta, base, group), y, draw, dgain[lo:hi], B,
            K=D // H, S=group, NORM=qk_normed, **{**row, **BEGIN_BWD},
        )  # fmt: skip
        begun = at(n_x, base, group)
        _add_rows(dqkv[lo:hi], draw[:n], begun)
        _product(draw[:n], qkv[lo:hi], y[:n])
        add_norm_bwd_kernel[group * B, n](
            *_rows(d, y, begun, at(r_x, base, group), dx[lo:], None), scale, NORM=True, **row
        )
        if lo == 0:
            _copy(dx_RBTD[:, :, base : base + group].transpose(1, 2), dx[:R])
        dz, dx = dx, dz

    return dx_RBTD, _gains_apart(weights, persistent_norm, dgain.sum((1, 2)), dqkv, dwo, dup, ddown, dwkv)


def _gains_apart(
    weights: LayerWeights,
    persistent_norm: bool,
    dgain: Tensor,
    dqkv: Tensor,
    dwo: Tensor,
    dup: Tensor,
    ddown: Tensor,
    dwkv: Tensor,
) -> LayerWeights:
    """Gradients of gains and weights from those of their products, ``_operands`` and ``_gain``."""
    D = dgain.shape[1]
    norm_1D = weights.norm_D[:, None]
    dnorm = (dqkv * torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], dim=1)).sum(1)
    dqkv = dqkv * norm_1D
    if persistent_norm:
        dnorm += (dwkv * torch.cat([weights.wk_DD, weights.wv_DD], dim=1)).sum(1)
        dwkv = dwkv * norm_1D
    dqkv[:, D:] += dwkv
    dwq, dwk, dwv = dqkv.split(D, dim=1)
    return LayerWeights(
        norm_D=dnorm,
        wq_DD=dwq,
        wk_DD=dwk,
        wv_DD=dwv,
        q_norm_D=None if weights.k_norm_D is None else dgain * weights.k_norm_D,
        k_norm_D=None if weights.q_norm_D is None else dgain * weights.q_norm_D,
        wo_DD=dwo,
        mlp_norm_D=(dup * weights.up_FD).sum(1),
        up_FD=dup * weights.mlp_norm_D[:, None],
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


def _span(y_LTBX: Tensor, t: int, count: int, *, lo: int, hi: int, skew: int) -> Tensor:
    """Rows (hi - lo, count * B, X) of positions, from t on for layer lo, ``skew`` earlier for each further one."""
    _, T, B, X = y_LTBX.shape
    offset = y_LTBX.storage_offset() + (lo * T + t) * B * X
    return y_LTBX.as_strided((hi - lo, count * B, X), ((T - skew) * B * X, X, 1), offset)


def _inputs_outputs(y: Tensor, chained: bool) -> tuple[Tensor, Tensor]:
    """What belongs to inputs and to outputs of layers, where those of a layer are one with those of the next or not."""
    return (y[:-1], y[1:]) if chained else (y[0], y[1])


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


def _map(function: Callable[[list[Tensor]], Tensor], *weights: LayerWeights) -> LayerWeights:
    """``function`` of each field of several layers, None where it is absent."""
    return LayerWeights._make(None if ys[0] is None else function(list(ys)) for ys in zip(*weights, strict=True))
