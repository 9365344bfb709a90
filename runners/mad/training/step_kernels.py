"""Fused Triton kernels of an optimizer step of runs trained together: cross-entropy, and AdamW with clipping.

For small models these parts are bound by the number of launches, which as PyTorch operations are dozens. There are no
atomics, and a run's results do not depend on how many others there are. Checked against their PyTorch form.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.runs import Method, Optionals, Tensors
from runners.mad.training.ensemble import Ensemble
from tasks.base import IGNORE

NO_TARGET: tl.constexpr = tl.constexpr(IGNORE)
LOGITS = 2048
"""Logits that a program reads at once."""
SQUARES = {"N": 4096, "num_warps": 4}
MOST_SUMS = 1024
ADAMW = {"N": 1024, "num_warps": 4}


@triton.jit
def _log_softmax(logits_ptr, targets_ptr, rows, V: tl.constexpr, U: tl.constexpr, M: tl.constexpr):
    """Of M rows: logarithms of probabilities, whether they are the target's, whether there is one, and the place."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    u = tl.arange(0, U)
    target_M = tl.load(targets_ptr + run * rows + m, m < rows, NO_TARGET)
    asked_M = target_M != NO_TARGET
    at_MU = (run * rows + m)[:, None] * V + u[None, :]
    logit_MU = tl.load(logits_ptr + at_MU, asked_M[:, None] & (u < V)[None, :], -float("inf")).to(tl.float32)
    logit_MU = tl.where(asked_M[:, None], logit_MU, 0.0)
    logit_MU -= tl.max(logit_MU, 1)[:, None]
    logit_MU -= tl.log(tl.sum(tl.exp(logit_MU), 1))[:, None]
    return logit_MU, u[None, :] == target_M[:, None], asked_M, at_MU


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr, targets_ptr, sums_ptr, rows, V: tl.constexpr, U: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Sum of the cross-entropies of M rows of logits (rows, V), and of how many have a target; U is a power of two."""
    log_MU, right_MU, asked_M, _ = _log_softmax(logits_ptr, targets_ptr, rows, V, U, M)
    to = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(sums_ptr + to, -tl.sum(tl.sum(tl.where(right_MU, log_MU, 0.0), 1), 0))
    tl.store(sums_ptr + to + 1, tl.sum(asked_M.to(tl.float32), 0))


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr, targets_ptr, dloss_ptr, sums_ptr, dlogits_ptr, rows, V: tl.constexpr, U: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Gradient of the logits for the gradient of a run's mean over its targets."""
    log_MU, right_MU, asked_M, at_MU = _log_softmax(logits_ptr, targets_ptr, rows, V, U, M)
    run = tl.program_id(1)
    scale = tl.load(dloss_ptr + run) / tl.load(sums_ptr + run * 2 + 1)
    dlogit_MU = tl.where(asked_M[:, None], scale * (tl.exp(log_MU) - right_MU.to(tl.float32)), 0.0)
    m = tl.program_id(0) * M + tl.arange(0, M)
    tl.store(dlogits_ptr + at_MU, dlogit_MU, (m < rows)[:, None] & (tl.arange(0, U) < V)[None, :])


@triton.jit
def square_sums_kernel(gradient_ptr, sums_ptr, P, N: tl.constexpr):
    """Sums of the squares of a run's gradients, one a program, N at a time."""
    run = tl.program_id(1).to(tl.int64)
    squares_N = tl.zeros([N], tl.float32)
    for first in range(tl.program_id(0) * N, P, tl.num_programs(0) * N):
        n = first + tl.arange(0, N)
        gradient_N = tl.load(gradient_ptr + run * P + n, n < P, 0.0)
        squares_N += gradient_N * gradient_N
    tl.store(sums_ptr + run * tl.num_programs(0) + tl.program_id(0), tl.sum(squares_N, 0))


@triton.jit
def adamw_kernel(
    params_ptr, moment1_ptr, moment2_ptr, gradient_ptr, decay_ptr, sums_ptr, loss_ptr, lr_ptr, step_ptr, diverged_ptr,
    P, sums, total_steps, beta1, beta2, eps, final_lr, clip, N: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """``Ensemble.update`` of N parameters of a run, the squares of whose gradients have the sums given."""
    run = tl.program_id(1).to(tl.int64)
    of_run = tl.arange(0, SUMS)
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + run * sums + of_run, of_run < sums, 0.0), 0))
    done = tl.load(step_ptr)
    diverged = tl.load(diverged_ptr + run)
    finite = (tl.abs(tl.load(loss_ptr + run)) < float("inf")) & (norm < float("inf"))
    alive = finite & (diverged < 0)
    if tl.program_id(0) == 0:  # the others may read it before or after: such a run is not alive to them either
        tl.store(diverged_ptr + run, tl.where(finite | (diverged >= 0), diverged, done + 1))
    peak = tl.load(lr_ptr + run)
    last = tl.minimum(peak, final_lr)
    lr = last + (peak - last) * 0.5 * (1 + tl.cos(done.to(tl.float32) / total_steps * 3.141592653589793))
    lr = tl.where(alive, lr, 0.0)
    step = (done + 1).to(tl.float32)
    corrected1 = 1 - tl.exp2(step * tl.log2(beta1))
    corrected2 = 1 - tl.exp2(step * tl.log2(beta2))
    n = tl.program_id(0) * N + tl.arange(0, N)
    at_N = run * P + n
    gradient_N = tl.load(gradient_ptr + at_N, n < P, 0.0)
    gradient_N = tl.where(alive, gradient_N, 0.0) * tl.where(alive, 1 / tl.maximum(norm / clip, 1.0), 0.0)
    moment1_N = tl.load(moment1_ptr + at_N, n < P, 0.0)
    moment2_N = tl.load(moment2_ptr + at_N, n < P, 0.0)
    params_N = tl.load(params_ptr + at_N, n < P, 0.0)
    decay_N = tl.load(decay_ptr + at_N, n < P, 0.0)
    moment1_N += (1 - beta1) * (gradient_N - moment1_N)
    moment2_N += (1 - beta2) * (gradient_N * gradient_N - moment2_N)
    tl.store(moment1_ptr + at_N, moment1_N, n < P)
    tl.store(moment2_ptr + at_N, moment2_N, n < P)
    params_N *= 1 - lr * decay_N
    params_N -= moment1_N / (tl.sqrt(moment2_N / corrected2) + eps) * (lr / corrected1)
    tl.store(params_ptr + at_N, params_N, n < P)


def fits_cross_entropy(V: int) -> bool:
    """Whether ``cross_entropy_method`` takes a vocabulary of this size."""
    return V <= 4096


def cross_entropy_method() -> Method:
    """Mean cross-entropy (R,) in nats over the targets of each run; NaN where a run has none.

    Tensors: logits (R, ..., V) in float32 or bfloat16, targets (R, ...) int64, ``IGNORE`` where there is none.
    """

    def grid(targets: Tensor, V: int) -> tuple[dict[str, int], int, tuple[int, int]]:
        rows, U = targets[0].numel(), triton.next_power_of_2(V)
        M = max(1, LOGITS // U)
        return {"V": V, "U": U, "M": M}, rows, (triton.cdiv(rows, M), len(targets))

    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensors, Tensors]:
        logits, targets = logits.contiguous(), targets.contiguous()
        tile, rows, programs = grid(targets, logits.shape[-1])
        sums = logits.new_empty(programs[1], programs[0], 2, dtype=torch.float32)
        cross_entropy_fwd_kernel[programs](logits, targets, sums, rows, **tile)
        sums = group_sum(sums)
        return (sums[:, 0] / sums[:, 1],), (sums,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dloss, logits, targets, sums = (y.contiguous() for y in (*gradients, *tensors, *saved))
        tile, rows, programs = grid(targets, logits.shape[-1])
        dlogits = torch.empty_like(logits)
        cross_entropy_bwd_kernel[programs](logits, targets, dloss, sums, dlogits, rows, **tile)
        return dlogits, None

    return Method(forward, backward)


def update(members: Ensemble, gradient_RP: Tensor, loss_R: Tensor) -> None:
    """``Ensemble.update`` in two launches."""
    hyper, (R, P) = members.optimizer, members.params_RP.shape
    sums = min(triton.cdiv(P, SQUARES["N"]), MOST_SUMS)
    sums_RS = loss_R.new_empty(R, sums)
    square_sums_kernel[sums, R](gradient_RP, sums_RS, P, **SQUARES)
    adamw_kernel[triton.cdiv(P, ADAMW["N"]), R](
        members.params_RP, members.moment1_RP, members.moment2_RP, gradient_RP, members.decay_RP, sums_RS, loss_R,
        members.lr_R1, members.step, members.diverged_R, P, sums, members.total_steps,
        hyper.beta1, hyper.beta2, hyper.eps, hyper.final_lr, hyper.clip,
        SUMS=triton.next_power_of_2(sums), **ADAMW,
    )  # fmt: skip
