"""The recurrence of linear-attention layers: each head has a matrix as its state, updated linearly.

    S_t = diag(exp(g_t)) S_{t-1} + a_t (b_t^T S_{t-1}) + k_t v_t^T          o_t = q_t^T S_t

Without (a, b) it is linear attention; with decays g of various kinds it is RetNet, Mamba-2, GLA and RWKV-6. The pair
(a, b) makes the delta rule, its gated form, and RWKV-7 (Yang et al. 2024, arXiv:2412.06464, section 2, and Peng et al.
2025, arXiv:2503.14456, section 3, compare them in this form). With b alone, what the decayed state returns for b is
taken from the value:

    S_t = D_t + k_t (v_t - D_t^T b_t)^T,   D_t = diag(exp(g_t)) S_{t-1}          o_t = q_t^T S_t

This is KDA and Gated DeltaNet-2. It is the first form with -k and exp(g) b in place of a and b. Here a position may
have N pairs of key and value, which are written one after the other, as in DeltaProduct: the decay acts before the
first of them, and the query reads after the last.

On a CPU it is computed in C where there is a compiler, in float32. Float64 is always computed in plain PyTorch, which
proves the C code and the kernels.

Dimensions beside those of ``mixers.base``: V channels of a value in a head, C positions of a chunk, N chunks, or pairs
of a position.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.native.recurrence import METHOD, runs_in_c
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs

CHUNK = 16
MANY, MANY_WITHOUT_DECAYS = 1024, 128
"""Pairs of key and value of a sequence from which products of chunks are faster than a loop over positions; the second
for the delta rule without decays, whose products take fewer launches, with keys of 64 channels."""
STRONGEST = -60.0
"""Logarithm of the strongest decay that differs from zero. With stronger ones, running sums would lose precision."""


def matrix_recurrence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor | None = None,
    a_BTHK: Tensor | None = None,
    b_BTHK: Tensor | None = None,
    bonus_HK: Tensor | None = None,
    *,
    queries: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return the outputs o (B, T, H, V) from a state of zeros: at least float32 unless our kernels compute them.

    Args:
        q_BTHK: queries; a single head (B, T, 1, K) is shared by all heads.
        k_BTHK: keys; with as many heads as the queries. With right factors alone, T is N times that of the queries for
            keys, values and right factors: N pairs of a position are next to each other.
        v_BTHV: values.
        g_BTHK: logarithms of the decays, at most 0; the last axis may be 1 (one decay per head).
        a_BTHK: left factors of the rank-one part of the transition, if any; only with ``b_BTHK``.
        b_BTHK: right factors; without left ones, those of the second form above.
        bonus_HK: if given, o_t = q_t^T (S_{t-1} + diag(bonus) k_t v_t^T) in place of q_t^T S_t (RWKV-6).
        queries: type in which our kernels read the queries and write their gradient; those of ``matrix_chunks`` take
            bfloat16 where there are decays, left factors or a bonus.
    """
    if runs_fused(q_BTHK):
        from mixers.ops.kernels.chunked_recurrence import chunked_recurrence_method, fits_blocks
        from mixers.ops.kernels.linear_recurrence import fits_recurrence, recurrence_method
        from mixers.ops.kernels.matrix_chunks import fits_chunks, matrix_chunks_method

        if fits_chunks(q_BTHK.shape[-1], v_BTHV.shape[-1]):
            q, k, v = q_BTHK.to(queries), k_BTHK.bfloat16(), v_BTHV.bfloat16()
            a, b = (None if y is None else y.bfloat16() for y in (a_BTHK, b_BTHK))
            g, bonus = at_least_float32(g_BTHK), at_least_float32(bonus_HK)

            # A loop over positions is slow with wide states. With one decay per head, products of chunks are exact.
            one_decay = b is None and bonus is None and (g is None or g.shape[-1] == 1)
            if one_decay and fits_blocks(q.shape[-1], v.shape[-1], q.device, decays=g is not None):
                g = None if g is None else g.clamp(min=STRONGEST)
                return over_runs(chunked_recurrence_method(torch.bfloat16), q, k, v, g)[0]
            q, k = (y.expand(*y.shape[:2], v.shape[2], -1) for y in (q, k))
            delta_rule = g is None and a is None and b is not None and q.shape[-1] == 64
            many = MANY_WITHOUT_DECAYS if delta_rule else MANY
            if fits_recurrence(q.shape[-1], v.shape[-1]) and k.shape[1] < many:
                return over_runs(recurrence_method(torch.bfloat16), q, k, v, g, a, b, bonus)[0]
            q = q if g is None and a is None and bonus is None else q.bfloat16()
            return over_runs(matrix_chunks_method(torch.bfloat16), q, k, v, g, a, b, bonus)[0]

    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, a_BTHK, b_BTHK, bonus_HK)
    with no_autocast(q_BTHK.device):
        q, k, v, g, a, b, bonus = map(at_least_float32, tensors)
        q_all, k_all = (y.expand(*y.shape[:2], v.shape[2], -1) for y in (q, k))
        if runs_in_c(q_all, k_all, v, g, a, b, bonus):
            return over_runs(METHOD, q_all, k_all, v, None if g is None else g.exp(), a, b, bonus)[0]
        g = None if g is None else g.clamp(min=STRONGEST)
        if a is None and b is not None:
            return _by_pairs(q, k, v, g, b)
        return _chunked(q, k, v, g, a, b, bonus)


def _by_pairs(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor | None, b_BTHK: Tensor) -> Tensor:
    """Compute the second form of ``matrix_recurrence`` by the first one, with the pairs as its positions."""
    pairs = k_BTHK.shape[1] // q_BTHK.shape[1]
    if pairs > 1:
        q_BTHK = F.pad(q_BTHK[:, :, None], (0, 0, 0, 0, pairs - 1, 0)).flatten(1, 2)
        g_BTHK = None if g_BTHK is None else F.pad(g_BTHK[:, :, None], (0, 0, 0, 0, 0, pairs - 1)).flatten(1, 2)
    b_BTHK = b_BTHK if g_BTHK is None else g_BTHK.exp() * b_BTHK
    return _chunked(q_BTHK, k_BTHK, v_BTHV, g_BTHK, -k_BTHK, b_BTHK, None)[:, pairs - 1 :: pairs]


def weighted_recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH1: Tensor, i_BTH1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, T, H, V) of ``matrix_recurrence`` with keys ``exp(i) k``, and the sums of their weights.

    The sums (B, T, H, 1) are the outputs for values of one. At no position may a pair's weight, exp(i) times the decays
    since, exceed 1.
    """
    if runs_fused(q_BTHK):
        from mixers.ops.kernels.chunked_recurrence import VALUES, chunked_recurrence_method
        from mixers.ops.kernels.linear_recurrence import fits_recurrence

        if fits_recurrence(q_BTHK.shape[-1], v_BTHV.shape[-1]) and v_BTHV.shape[-1] == VALUES:
            q, k, v = q_BTHK.bfloat16(), k_BTHK.bfloat16(), v_BTHV.bfloat16()
            g, i = at_least_float32(g_BTH1).clamp(min=STRONGEST), at_least_float32(i_BTH1)
            o_BTHV, n_BTH1 = over_runs(chunked_recurrence_method(torch.bfloat16, weighted=True), q, k, v, g, i)
            return o_BTHV, n_BTH1

    o_BTHV = matrix_recurrence(q_BTHK, k_BTHK, i_BTH1.exp() * with_ones(v_BTHV), g_BTH1)
    return o_BTHV[..., :-1], o_BTHV[..., -1:]


def with_ones(v: Tensor) -> Tensor:
    """Return values (..., V) with a column of ones after the others."""
    return F.pad(v, (0, 1), value=1.0)


def _chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor | None,
    a_BTHK: Tensor | None,
    b_BTHK: Tensor | None,
    bonus_HK: Tensor | None,
) -> Tensor:
    """Compute ``matrix_recurrence`` in plain PyTorch, a chunk of positions at a time.

    1. Inside all chunks at once: weights of the pairs of positions (i, j), with the decays between them.
    2. With a rank-one part: position i adds a_i u_i^T to the state, where u_i = b_i^T S_{i-1} depends on the earlier u
       of the chunk. A triangular system gives u as a linear map of the values and of the chunk's first state.
    3. From chunk to chunk: outputs and next state from the first state and the values.
    """
    length = q_BTHK.shape[1]
    pad = -length % CHUNK

    def chunks(y_BTHK: Tensor) -> Tensor:
        return rearrange(F.pad(y_BTHK, (0, 0, 0, 0, 0, pad)), "b (n c) h k -> n b h c k", c=CHUNK)

    # All tensors in chunks (N, B, H, C, K).
    q, k, v = chunks(q_BTHK), chunks(k_BTHK), chunks(v_BTHV)
    g = torch.zeros_like(q[..., :1]) if g_BTHK is None else chunks(g_BTHK)

    # Logarithms of the decays from the start of a chunk, after and before each position.
    after = g.cumsum(-2)
    before = after - g
    inside = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    earlier = inside.tril(-1)

    # 1. Weights inside chunks, reads of the first state, and writes into the next one.
    read, seen = (after, inside) if bonus_HK is None else (before, earlier)
    qk = _decayed_products(q, read, k, after, seen)
    q_in = q * read.exp()
    total = after[..., -1:, :]
    k_out = k * (total - after).exp()
    if bonus_HK is not None:
        qk = qk + torch.diag_embed((q * bonus_HK[:, None] * k).sum(-1))

    # 2. The rank-one part.
    if a_BTHK is not None and b_BTHK is not None:
        a, b = chunks(a_BTHK), chunks(b_BTHK)
        identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        system = identity - _decayed_products(b, before, a, after, earlier)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        u_v = inverse @ (_decayed_products(b, before, k, after, earlier) @ v)
        u_in = inverse @ (b * before.exp())
        qa = _decayed_products(q, read, a, after, seen)
        a_out = a * (total - after).exp()

    # 3. From chunk to chunk.
    S = torch.zeros_like(k[0].mT @ v[0])
    outputs = []
    for n in range(len(q)):
        o = q_in[n] @ S + qk[n] @ v[n]
        S_next = total[n].mT.exp() * S + k_out[n].mT @ v[n]
        if a_BTHK is not None:
            u = u_in[n] @ S + u_v[n]
            o = o + qa[n] @ u
            S_next = S_next + a_out[n].mT @ u
        outputs.append(o)
        S = S_next
    return rearrange(torch.stack(outputs), "n b h c v -> b (n c) h v")[:, :length]


def _decayed_products(left: Tensor, since: Tensor, right: Tensor, after: Tensor, mask: Tensor) -> Tensor:
    """Return sum_k left_ik right_jk exp(since_ik - after_jk) for the pairs (i, j) of the mask, else 0; (..., C, C)."""
    gap = since[..., :, None, :] - after[..., None, :, :]
    decay = gap.masked_fill(~mask[..., None], -torch.inf).exp()
    if after.shape[-1] == 1:
        return (left @ right.mT) * decay[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", left, right, decay)


def matrix_step(
    S_BHKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor | None = None,
    a_BHK: Tensor | None = None,
    b_BHK: Tensor | None = None,
    bonus_HK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one position, with one pair, of ``matrix_recurrence``: output (B, H, V) and next state (B, H, K, V)."""
    tensors = (q_BHK, k_BHK, v_BHV, g_BHK, a_BHK, b_BHK, bonus_HK)
    q_BHK, k_BHK, v_BHV, g_BHK, a_BHK, b_BHK, bonus_HK = map(at_least_float32, tensors)

    # Next state.
    pair_BHKV = k_BHK[..., None] * v_BHV[..., None, :]
    next_BHKV = S_BHKV if g_BHK is None else g_BHK.exp()[..., None] * S_BHKV
    if b_BHK is not None:
        left_BHK, before_BHKV = (-k_BHK, next_BHKV) if a_BHK is None else (a_BHK, S_BHKV)
        next_BHKV = next_BHKV + left_BHK[..., None] * (b_BHK[..., None] * before_BHKV).sum(-2, keepdim=True)
    next_BHKV = next_BHKV + pair_BHKV

    # Output.
    read_BHKV = next_BHKV if bonus_HK is None else S_BHKV + bonus_HK[..., None] * pair_BHKV
    return (q_BHK[..., None] * read_BHKV).sum(-2), next_BHKV


def unit(k: Tensor) -> Tensor:
    """Return keys scaled to length one along the last axis; zeros stay zeros."""
    k = at_least_float32(k)
    return k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
