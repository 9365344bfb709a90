"""Softmax attention whose logits go through products of matrices I - β w w^T: Yang et al. 2025, arXiv:2505.16381.

    logit_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(K),    H_s = I - β_s w_s w_s^T,    w of length one

Dimensions beside those of ``mixers.base``: N chunks of C positions.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.attention import forgetting_mean
from mixers.ops.linear_recurrence import unit
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs

CHUNK = 32


def path_attention(
    q_BTD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    w_BTD: Tensor,
    beta_BTH: Tensor,
    log_f_BTH: Tensor | None = None,
) -> Tensor:
    """Return causal PaTH attention (B, T, D), heads concatenated.

    Args:
        q_BTD, k_BTD, v_BTD: queries, keys and values.
        w_BTD: directions, which are scaled to length one in each head.
        beta_BTH: strengths, in (0, 2).
        log_f_BTH: logarithms of forget gates, whose sums over s = j + 1, ..., i are added to the logits; or None.
    """
    heads = beta_BTH.shape[-1]
    if runs_fused(q_BTD):
        from mixers.ops.kernels.path_attention import fits_path, path_attention_method

        if fits_path(q_BTD.shape[-1], heads):
            q, k, v, w = (y.bfloat16() for y in (q_BTD, k_BTD, v_BTD, w_BTD))
            c_BHT = None if log_f_BTH is None else log_f_BTH.cumsum(1).mT
            return over_runs(path_attention_method(heads), q, k, v, w, beta_BTH, c_BHT)[0]

    with no_autocast(q_BTD.device):
        logits_BHTT = path_logits(*map(at_least_float32, (q_BTD, k_BTD, w_BTD, beta_BTH)))
        return forgetting_mean(logits_BHTT, at_least_float32(v_BTD), log_f_BTH).to(v_BTD.dtype)


def path_logits(q_BTD: Tensor, k_BTD: Tensor, w_BTD: Tensor, beta_BTH: Tensor) -> Tensor:
    """Return the logits (B, H, T, T), arbitrary where the key is later, by the paper's algorithm (section 3.3).

    1. Inside all chunks at once: a triangular system gives the products of any range of matrices (UT transform).
    2. Keys go to the end of their chunk, and queries to its start.
    3. Queries go from chunk to chunk, all chunks at once, and read the keys of each.
    """
    length, heads = q_BTD.shape[1], beta_BTH.shape[-1]
    pad = -length % CHUNK

    def chunks(y_BTX: Tensor) -> Tensor:
        padded = F.pad(y_BTX, (0, 0, 0, pad))
        return rearrange(padded, "b (n c) (h k) -> b h n c k", c=CHUNK, h=heads)

    # 1. Chunks (B, H, N, C, K).
    q, k, w, beta = map(chunks, (q_BTD, k_BTD, w_BTD, beta_BTH))
    w = unit(w)
    identity = torch.eye(CHUNK, dtype=w.dtype, device=w.device)
    system = identity + beta * (w @ w.mT).tril(-1)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    u = inverse * beta.mT
    ut_w, ut_k = u @ w, u @ (w @ k.mT).tril(-1)
    qw = (q @ w.mT).tril()
    blocks = [q @ k.mT - qw @ ut_k]

    # 2. Keys behind their chunk, queries before it, and the product of each chunk.
    k = k - ut_k.mT @ w
    q = q - qw @ ut_w
    whole = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - w.mT @ ut_w

    # 3. Chunks at distance ``back``, with zeros in front.
    count = q.shape[2]
    for back in range(1, count):
        q = q[:, :, 1:] if back == 1 else (q @ whole[:, :, : count - back + 1])[:, :, 1:]
        blocks.append(F.pad(q @ k[:, :, : count - back].mT, (0, 0, 0, 0, back, 0)))

    # From distances to chunks of keys.
    to_N = torch.arange(count, device=q.device)
    at_NN = (to_N[:, None] - to_N).clamp(min=0)
    logits = torch.stack(blocks)[at_NN, :, :, to_N[:, None].expand_as(at_NN)]
    logits = rearrange(logits, "n m b h c d -> b h (n c) (m d)")
    return logits[..., :length, :length] * k.shape[-1] ** -0.5


def transported(k_BJHK: Tensor, w_BHK: Tensor, beta_BH: Tensor) -> Tensor:
    """Return keys behind one more position, ``(I - β w w^T) k`` (B, J, H, K), for w of length one."""
    along_BJH1 = (k_BJHK * w_BHK[:, None]).sum(-1, keepdim=True)
    return k_BJHK - beta_BH[:, None, :, None] * along_BJH1 * w_BHK[:, None]
