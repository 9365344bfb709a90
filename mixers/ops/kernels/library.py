"""The recurrence of ``mixers.ops.linear_recurrence`` in the kernels of flash-linear-attention, the extra ``baselines``.

Yang & Zhang 2024, https://github.com/fla-org/flash-linear-attention. Their products take bfloat16 and sum in float32.
"""

from functools import partial

import torch
from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.rwkv6 import chunk_rwkv6
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.runs import over_batch

LEAST_CHANNELS = 16
"""Least number of channels of a head that tensor cores take; smaller heads are padded with zeros."""
MOST_HEADS = 2**16 - 1
"""Largest number of heads of all sequences in one launch: the limit of a grid's second axis."""


def matrix_recurrence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor | None = None,
    a_BTHK: Tensor | None = None,
    b_BTHK: Tensor | None = None,
    bonus_HK: Tensor | None = None,
) -> Tensor:
    """Return the outputs o (B, T, H, V) in float32, on a GPU; arguments as ``mixers.ops.linear_recurrence``.

    Raises:
        ValueError: A bonus is given together with a and b.
    """
    if a_BTHK is not None and bonus_HK is not None:
        raise ValueError("flash-linear-attention has no kernel for a bonus together with a delta rule")

    q_BTHK, k_BTHK = (y.expand(*v_BTHV.shape[:-1], -1) for y in (q_BTHK, k_BTHK))
    present = [y for y in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, a_BTHK, b_BTHK) if y is not None]
    o_BTHV = over_batch(partial(_in_parts, g_BTHK is not None, bonus_HK is not None), *present)
    if bonus_HK is not None:
        o_BTHV = o_BTHV + (q_BTHK * bonus_HK * k_BTHK).sum(-1, keepdim=True) * v_BTHV
    return o_BTHV


def _in_parts(decays: bool, exclusive: bool, *tensors: Tensor) -> Tensor:
    """Call ``_recur`` for as many sequences at a time as one launch takes."""
    sequences = MOST_HEADS // tensors[0].shape[2]
    parts = zip(*(y.split(sequences) for y in tensors), strict=True)
    return torch.cat([_recur(decays, exclusive, *part) for part in parts])


def _recur(decays: bool, exclusive: bool, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """Call the library's kernel.

    Args:
        decays: whether the first of ``others`` is g.
        exclusive: whether a position does not read its own pair.
        q: queries (B, T, H, K).
        k: keys.
        v: values (B, T, H, V).
        *others: g, if there are ``decays``, then a and b, if any.
    """
    g = others[0] if decays else None
    channels, values = q.shape[-1], v.shape[-1]
    q, k, v, *rank_one = (_padded(y).bfloat16() for y in (q, k, v, *others[decays:]))
    gate = torch.zeros_like(q, dtype=torch.float32) if g is None else _padded(g.expand(*g.shape[:3], channels))

    if rank_one:
        writes, reads = rank_one
        o, _ = chunk_dplr_delta_rule(q, k, v, reads, writes, gate, scale=1.0)
    elif exclusive:
        o, _ = chunk_rwkv6(q, k, v, gate, q.new_zeros(q.shape[2:]), scale=1.0)
    else:  # its kernels for one decay per head are wrong on Hopper with Triton before 3.7.1 (its issue 640)
        o, _ = chunk_gla(q, k, v, gate, scale=1.0)
    return o[..., :values].float()


def _padded(y: Tensor) -> Tensor:
    return F.pad(y, (0, max(0, LEAST_CHANNELS - y.shape[-1])))
