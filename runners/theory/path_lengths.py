"""Theorem 2 (section "Training Stability"): gradients through a layer are sums over paths of length r.

In the layer z_k = x_k + (alpha / k) (V x_k + V sum_{j<k} z_j), of uniform attention alone,
dz_k/dx_1 = (1/k!) sum_r [k r] alpha^r V^r for k >= 2. The unsigned Stirling number of the first kind [k r] counts the
permutations of k elements with r cycles. The weights [k r] / k! of the path lengths r are thus the distribution of the
number of cycles of a random permutation. Its mean 1 + 1/2 + ... + 1/k grows like ln k.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.rt.naive import Weights, naive_recurrence
from runners.theory.checks import BOUND, Check, largest, scaled_error

POSITIONS = (2, 3, 4, 8, 16, 32, 64)
"""Positions k at which gradients are checked."""
WIDTH = 4
"""Model width D."""


def stirling(rows: int) -> Iterator[list[int]]:
    """Yield rows k = 1, ..., ``rows`` of the unsigned Stirling numbers of the first kind, [k 0] ... [k k]."""
    row = [0, 1]
    for k in range(1, rows + 1):
        yield row
        row = [k * stay + join for stay, join in zip([*row, 0], [0, *row], strict=True)]


def stirling_gradient(k: int, matrix_DD: Tensor) -> Tensor:
    """Return ``(1/k!) sum_r [k r] matrix^r``, by Horner's rule."""
    *_, row = stirling(k)
    total_DD = torch.zeros_like(matrix_DD)
    for number in reversed(row[1:]):
        total_DD = matrix_DD @ (total_DD + number / math.factorial(k) * torch.eye(len(matrix_DD)).to(matrix_DD))
    return total_DD


def uniform_layer(x_BTD: Tensor, v_DD: Tensor, alpha: float) -> Tensor:
    """Return the outputs (B, T, D) of the layer of theorem 2.

    It is ``naive_recurrence`` with queries, keys and MLP set to zero and without a norm on z.
    """
    zero_DD = torch.zeros_like(v_DD)
    weights = Weights(
        wo_DD=torch.eye(len(v_DD)).to(v_DD),
        mlp_norm_D=torch.ones_like(v_DD[0]),
        up_FD=zero_DD,
        down_DF=zero_DD,
        kv_norm_D=None,
        wk_DD=zero_DD,
        k_norm_D=None,
        wv_DD=v_DD,
    )

    zero_BTD = torch.zeros_like(x_BTD)
    return naive_recurrence(x_BTD, zero_BTD, zero_BTD, F.linear(x_BTD, v_DD), weights, torch.zeros(1), alpha)


def check_gradient(seed: int) -> Iterator[Check]:
    """Check Jacobians by autograd through the project's recurrence against the exact Stirling numbers.

    The matrices V come from a generator seeded with ``seed``.
    """
    gaussian_DD = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    orthogonal_DD, _ = torch.linalg.qr(gaussian_DD)

    for name, v_DD in (("orthogonal", orthogonal_DD), ("Gaussian", gaussian_DD * WIDTH**-0.5)):
        for alpha in (0.5, 1.0, 2.0):
            jacobians_KDD = first_input_jacobians(v_DD, alpha)
            formulas = [stirling_gradient(k, alpha * v_DD) for k in POSITIONS]
            error = largest(list(map(scaled_error, jacobians_KDD, formulas)))
            yield Check(check="theorem 2, gradients", setting=f"{name} V, alpha {alpha:g}", error=error, bound=BOUND)


def first_input_jacobians(v_DD: Tensor, alpha: float) -> Tensor:
    """Return dz_k/dx_1 (positions, D, D) by autograd at ``POSITIONS``, with zeros as the other inputs.

    Each row of a Jacobian has a sequence of its own in one batch, so that one backward pass computes all rows.
    """
    positions, channels = torch.cartesian_prod(torch.tensor(POSITIONS), torch.arange(WIDTH)).T
    rows = len(positions)

    x_BD = torch.ones(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    rest_BTD = torch.zeros(rows, POSITIONS[-1] - 1, WIDTH, dtype=torch.float64)
    z_BTD = uniform_layer(torch.cat([x_BD[:, None], rest_BTD], dim=1), v_DD, alpha)

    (dx_BD,) = torch.autograd.grad(z_BTD[torch.arange(rows), positions - 1, channels].sum(), x_BD)
    return dx_BD.view(len(POSITIONS), WIDTH, WIDTH)


def check_path_lengths() -> Check:
    """Check in exact fractions that the weights of all path lengths sum to 1 and have the harmonic number as mean."""
    error, harmonic = Fraction(0), Fraction(0)
    for k, row in enumerate(stirling(POSITIONS[-1]), start=1):
        harmonic += Fraction(1, k)
        total = Fraction(sum(row), math.factorial(k))
        mean = Fraction(sum(r * number for r, number in enumerate(row)), math.factorial(k))
        error = max(error, abs(total - 1), abs(mean - harmonic))

    return Check(check="theorem 2, path lengths", setting="sum and mean", error=float(error), bound=0.0)
