"""Mean cross-entropy of runs that are trained together, as Triton kernels.

Dimensions: R runs, V vocabulary, U the least power of two from V on, M rows of a program. The rows of a run are the
positions of its batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors
from tasks.base import IGNORE

NO_TARGET: tl.constexpr = tl.constexpr(IGNORE)
LOGITS = 2048
"""Logits that a program reads at once."""
MAX_VOCABULARY = 8192


@triton.jit
def _log_softmax(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    rows: tl.tensor,
    V: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
):
    """Log-probabilities of M rows.

    1. Load the targets; a row without one, or beyond the last row, is not asked.
    2. Load the logits of the rows that are asked; columns from V on are minus infinity.
    3. Rows that are not asked become zeros, which keeps them finite.
    4. Subtract the maximum, then the logarithm of the sum of the exponentials.

    Returns:
        Log-probabilities (M, U), mask of the target's column (M, U), mask of the rows that are asked (M,), and the
        offsets of the logits (M, U).
    """
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    u = tl.arange(0, U)

    # 1. Targets.
    target_M = tl.load(targets_ptr + run * rows + m, m < rows, NO_TARGET)
    asked_M = target_M != NO_TARGET

    # 2. Logits.
    at_MU = (run * rows + m)[:, None] * V + u[None, :]
    logit_MU = tl.load(logits_ptr + at_MU, asked_M[:, None] & (u < V)[None, :], -float("inf")).to(tl.float32)

    # 3. Rows that are not asked.
    logit_MU = tl.where(asked_M[:, None], logit_MU, 0.0)

    # 4. Log-softmax.
    logit_MU -= tl.max(logit_MU, 1)[:, None]
    logit_MU -= tl.log(tl.sum(tl.exp(logit_MU), 1))[:, None]
    return logit_MU, u[None, :] == target_M[:, None], asked_M, at_MU


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.tensor,
    V: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
):
    """Sum the cross-entropies of M rows. Grid: (programs of a run, R).

    1. Log-probabilities of the rows.
    2. Store the sum of the targets' log-probabilities, negated.
    3. Store the number of targets.

    ========  ================  ===========  =================================
    tensor    shape             written by   read by
    ========  ================  ===========  =================================
    logits    (R, rows, V)      caller       this kernel, the backward
    targets   (R, rows)         caller       this kernel, the backward
    sums      (R, programs, 2)  this kernel  ``group_sum``, over the programs
    ========  ================  ===========  =================================
    """
    # 1. Log-probabilities.
    log_MU, right_MU, asked_M, _ = _log_softmax(logits_ptr, targets_ptr, rows, V, U, M)

    # 2. Cross-entropies.
    to = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(sums_ptr + to, -tl.sum(tl.sum(tl.where(right_MU, log_MU, 0.0), 1), 0))

    # 3. Targets.
    tl.store(sums_ptr + to + 1, tl.sum(asked_M.to(tl.float32), 0))


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    dloss_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    dlogits_ptr: tl.tensor,
    rows: tl.tensor,
    V: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
):
    """Gradient of M rows of logits. Grid: (programs of a run, R).

    1. Log-probabilities of the rows.
    2. ``scale = dloss / number of the run's targets``.
    3. ``dlogits = scale (probability - 1 at the target)``, and zero where there is no target.
    4. Store the rows.

    ========  ============  ======================  ===========
    tensor    shape         written by              read by
    ========  ============  ======================  ===========
    logits    (R, rows, V)  caller                  this kernel
    targets   (R, rows)     caller                  this kernel
    dloss     (R,)          autograd                this kernel
    sums      (R, 2)        forward, ``group_sum``  this kernel
    dlogits   (R, rows, V)  this kernel             autograd
    ========  ============  ======================  ===========
    """
    # 1. Log-probabilities.
    log_MU, right_MU, asked_M, at_MU = _log_softmax(logits_ptr, targets_ptr, rows, V, U, M)

    # 2. Scale.
    run = tl.program_id(1)
    scale = tl.load(dloss_ptr + run) / tl.load(sums_ptr + run * 2 + 1)

    # 3. Gradient.
    dlogit_MU = tl.where(asked_M[:, None], scale * (tl.exp(log_MU) - right_MU.to(tl.float32)), 0.0)

    # 4. Store.
    m = tl.program_id(0) * M + tl.arange(0, M)
    tl.store(dlogits_ptr + at_MU, dlogit_MU, (m < rows)[:, None] & (tl.arange(0, U) < V)[None, :])


def cross_entropy_method() -> Method:
    """Mean cross-entropy (R,) in nats over the targets of each run; NaN where a run has none.

    Tensors: logits (R, ..., V) in float32 or bfloat16, targets (R, ...) int64, ``IGNORE`` where there is none.
    """

    def grid(targets: Tensor, V: int) -> tuple[dict[str, int], int, tuple[int, int]]:
        """Return the sizes of a tile, the rows of a run, and the grid."""
        rows = targets[0].numel()
        U = triton.next_power_of_2(V)
        M = max(1, LOGITS // U)
        return {"V": V, "U": U, "M": M}, rows, (triton.cdiv(rows, M), len(targets))

    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensors, Tensors]:
        logits, targets = logits.contiguous(), targets.contiguous()
        tile, rows, programs = grid(targets, logits.shape[-1])

        parts = logits.new_empty(programs[1], programs[0], 2, dtype=torch.float32)
        cross_entropy_fwd_kernel[programs](logits, targets, parts, rows, **tile)

        sums = group_sum(parts)
        return (sums[:, 0] / sums[:, 1],), (sums,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dloss, logits, targets, sums = (y.contiguous() for y in (*gradients, *tensors, *saved))
        tile, rows, programs = grid(targets, logits.shape[-1])

        dlogits = torch.empty_like(logits)
        cross_entropy_bwd_kernel[programs](logits, targets, dloss, sums, dlogits, rows, **tile)
        return dlogits, None

    return Method(forward, backward)
