"""The recurrence that linear-attention layers have in common: a matrix for each head, linear in its past.

    S_t = diag(exp(g_t)) S_{t-1} + a_t (b_t^T S_{t-1}) + k_t v_t^T          o_t = q_t^T S_t

Without (a, b) it is linear attention, with decays g of various kinds RetNet, Mamba-2, GLA and RWKV-6; the pair (a, b)
makes the delta rule, its gated form, and RWKV-7 (Yang et al. 2024, arXiv:2412.06464, section 2, and Peng et al. 2025,
arXiv:2503.14456, section 3, compare them in this form).

Dimensions beside those of ``mixers.base``: V channels of a value in a head, C positions of a chunk, N chunks.
"""

from importlib.util import find_spec
from types import ModuleType

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import at_least_float32, runs_fused

CHUNK = 16
STRONGEST = -60.0
"""Logarithm of the strongest decay told apart from zero: running sums of greater ones would lose the smaller."""


def matrix_recurrence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor | None = None,
    a_BTHK: Tensor | None = None,
    b_BTHK: Tensor | None = None,
    bonus_HK: Tensor | None = None,
) -> Tensor:
    """Outputs o (B, T, H, V) from a state of zeros, a chunk of positions at a time; float32 for 16-bit inputs.

    Args:
        g_BTHK: logarithms of the decays, at most 0; its last axis may be 1 (one decay a head).
        a_BTHK: with ``b_BTHK`` the rank-one part of the transition; both or none.
        bonus_HK: given, o_t = q_t^T (S_{t-1} + diag(bonus) k_t v_t^T) in place of q_t^T S_t (RWKV-6).
    """
    g_BTHK = None if g_BTHK is None else g_BTHK.clamp(min=STRONGEST)
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, a_BTHK, b_BTHK, bonus_HK)
    fused = library_kernels(q_BTHK)
    with torch.autocast(q_BTHK.device.type, enabled=False):
        return (fused.matrix_recurrence if fused else _recur)(*map(at_least_float32, tensors))


def library_kernels(q_BTHK: Tensor) -> ModuleType | None:
    """``mixers.library`` where its kernels should run: on a GPU under bfloat16 autocast, with the extra installed."""
    if not runs_fused(q_BTHK) or find_spec("fla") is None:
        return None
    from mixers.ops.kernels import library  # an optional dependency

    return library


def _recur(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor | None,
    a_BTHK: Tensor | None,
    b_BTHK: Tensor | None,
    bonus_HK: Tensor | None,
) -> Tensor:
    length = q_BTHK.shape[1]
    pad = -length % CHUNK

    def chunks(y_BTHK: Tensor) -> Tensor:
        return rearrange(F.pad(y_BTHK, (0, 0, 0, 0, 0, pad)), "b (n c) h k -> n b h c k", c=CHUNK)

    q, k, v = chunks(q_BTHK), chunks(k_BTHK), chunks(v_BTHV)
    g = torch.zeros_like(q[..., :1]) if g_BTHK is None else chunks(g_BTHK)
    after = g.cumsum(-2)
    before = after - g
    inside = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    earlier = inside.tril(-1)

    def products(left: Tensor, since: Tensor, right: Tensor, mask: Tensor) -> Tensor:
        """sum_k left_ik right_jk exp(since_ik - after_jk) for the pairs (i, j) of the mask, else 0; (..., C, C)."""
        gap = since[..., :, None, :] - after[..., None, :, :]
        decay = gap.masked_fill(~mask[..., None], -torch.inf).exp()
        if g.shape[-1] == 1:
            return (left @ right.mT) * decay[..., 0]
        return torch.einsum("...ik,...jk,...ijk->...ij", left, right, decay)

    read, seen = (after, inside) if bonus_HK is None else (before, earlier)
    qk, q_in = products(q, read, k, seen), q * read.exp()
    total = after[..., -1:, :]
    k_out = k * (total - after).exp()
    if bonus_HK is not None:
        qk = qk + torch.diag_embed((q * bonus_HK[:, None] * k).sum(-1))
    if a_BTHK is not None and b_BTHK is not None:
        a, b = chunks(a_BTHK), chunks(b_BTHK)
        identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        inverse = torch.linalg.solve_triangular(
            identity - products(b, before, a, earlier), identity, upper=False, unitriangular=True
        )
        u_v, u_in = inverse @ (products(b, before, k, earlier) @ v), inverse @ (b * before.exp())
        qa, a_out = products(q, read, a, seen), a * (total - after).exp()
    S = torch.zeros_like(k[0].mT @ v[0])
    outputs = []
    for n in range(len(q)):
        o = q_in[n] @ S + qk[n] @ v[n]
        new = total[n].mT.exp() * S + k_out[n].mT @ v[n]
        if a_BTHK is not None:
            u = u_in[n] @ S + u_v[n]
            o, new = o + qa[n] @ u, new + a_out[n].mT @ u
        outputs.append(o)
        S = new
    return rearrange(torch.stack(outputs), "n b h c v -> b (n c) h v")[:, :length]


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
    """One position of ``matrix_recurrence``: output (B, H, V) and next state (B, H, K, V)."""
    tensors = (q_BHK, k_BHK, v_BHV, g_BHK, a_BHK, b_BHK, bonus_HK)
    q_BHK, k_BHK, v_BHV, g_BHK, a_BHK, b_BHK, bonus_HK = map(at_least_float32, tensors)
    pair_BHKV = k_BHK[..., None] * v_BHV[..., None, :]
    new_BHKV = S_BHKV if g_BHK is None else g_BHK.exp()[..., None] * S_BHKV
    if a_BHK is not None and b_BHK is not None:
        new_BHKV = new_BHKV + a_BHK[..., None] * (b_BHK[..., None] * S_BHKV).sum(-2, keepdim=True)
    new_BHKV = new_BHKV + pair_BHKV
    read_BHKV = new_BHKV if bonus_HK is None else S_BHKV + bonus_HK[..., None] * pair_BHKV
    return (q_BHK[..., None] * read_BHKV).sum(-2), new_BHKV


def unit(k: Tensor) -> Tensor:
    """Keys of length one (zeros stay zeros), along the last axis."""
    k = at_least_float32(k)
    return k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
