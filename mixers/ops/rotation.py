"""Queries and keys that are rotated by angles of their position and head, in pairs of channels.

Dimensions beside those of ``mixers.base``: N channels, A ≤ N / 2 angles, R pairs of query and key of a position.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import at_least_float32, runs_fused
from mixers.ops.runs import over_runs
from mixers.ops.token_shift import shifted


def rotated_pairs(
    q_BTRN: Tensor, k_BTRN: Tensor, q_bias_RHN: Tensor, k_bias_RHN: Tensor, angle_BTHA: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each head rotated queries, the rotated keys of the position before, and products without rotation.

    They have the shapes (B, T, R, H, N), twice, and (B, T, R, R, H): those of ``products``.

    Args:
        q_BTRN, k_BTRN: queries and keys that heads share.
        q_bias_RHN, k_bias_RHN: what each head adds to them before.
        angle_BTHA: angles.
    """
    if q_BTRN.shape[2] == 1 and runs_fused(q_BTRN):
        from mixers.ops.kernels.rotation import rotated_pairs_method

        shared, biases = (y.squeeze(2) for y in (q_BTRN, k_BTRN)), (y.squeeze(0) for y in (q_bias_RHN, k_bias_RHN))
        q, k, qk = over_runs(rotated_pairs_method(torch.bfloat16), *shared, *biases, angle_BTHA)
        return q.unsqueeze(2), k.unsqueeze(2), qk[:, :, None, None]

    q, k = of_heads(q_BTRN, q_bias_RHN), of_heads(k_BTRN, k_bias_RHN)
    return rotated(q, angle_BTHA), shifted(rotated(k, angle_BTHA)), products(q, k)


def of_heads(y: Tensor, bias_RHN: Tensor) -> Tensor:
    """Return queries or keys (..., R, H, N) of all heads, at least float32, from those (..., R, N) that they share."""
    return at_least_float32(y)[..., None, :] + bias_RHN


def rotated(y: Tensor, angle: Tensor) -> Tensor:
    """Return queries or keys (..., R, H, N), of which channels i and i + N/2 are turned by the angle i (..., H, A).

    Channels without an angle stay as they are. Only elementwise operations, without concatenations, so that a compiler
    fuses them with what comes before and after.
    """
    pairs = y.unflatten(-1, (2, -1))
    angle = F.pad(angle, (0, pairs.shape[-1] - angle.shape[-1]))[..., None, :, None, :]
    sign = torch.arange(-1, 3, 2, device=y.device)[:, None]
    return (pairs * angle.cos() + pairs.flip(-2) * (sign * angle.sin())).flatten(-2)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products (..., R, S, H) of the queries and keys (..., H, N) of each pair of ranks."""
    return (q[..., :, None, :, :] * k[..., None, :, :, :]).sum(-1)
