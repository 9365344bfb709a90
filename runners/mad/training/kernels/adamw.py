"""AdamW with clipping for runs that are trained together, in two Triton kernels.

Dimensions: R runs, P parameters of a run, N parameters of a program, SUMS the least power of two from ``sums`` on.
"""

import triton
import triton.language as tl
from torch import Tensor

from runners.mad.training.protocol import Optimizer

SQUARES = {"N": 4096, "num_warps": 4}
MAX_SUMS = 1024
"""Most sums of squares of a run: one program of ``adamw_kernel`` adds up all of them."""
ADAMW = {"N": 1024, "num_warps": 4}


@triton.jit
def square_sums_kernel(
    gradient_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    P: tl.tensor,
    N: tl.constexpr,
):
    """Sum the squares of a run's gradient in parts. Grid: (sums of a run, R).

    1. For every N parameters of this program's share: add their squares, column by column.
    2. Store the sum over the columns.

    ========  ==========  ===========  ===================
    tensor    shape       written by   read by
    ========  ==========  ===========  ===================
    gradient  (R, P)      autograd     this kernel
    sums      (R, sums)   this kernel  ``adamw_kernel``
    ========  ==========  ===========  ===================
    """
    run = tl.program_id(1).to(tl.int64)

    # 1. Squares.
    squares_N = tl.zeros([N], tl.float32)
    for first in range(tl.program_id(0) * N, P, tl.num_programs(0) * N):
        n = first + tl.arange(0, N)
        gradient_N = tl.load(gradient_ptr + run * P + n, n < P, 0.0)
        squares_N += gradient_N * gradient_N

    # 2. Their sum.
    tl.store(sums_ptr + run * tl.num_programs(0) + tl.program_id(0), tl.sum(squares_N, 0))


@triton.jit
def adamw_kernel(
    params_ptr: tl.tensor,
    moment1_ptr: tl.tensor,
    moment2_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lr_ptr: tl.tensor,
    step_ptr: tl.tensor,
    diverged_ptr: tl.tensor,
    P: tl.tensor,
    sums: tl.tensor,
    total_steps: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    final_lr: tl.tensor,
    clip: tl.tensor,
    N: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Take the optimizer step of N parameters of a run. Grid: (programs of a run, R).

    1. ``norm``: root of the sum of ``sums``.
    2. A run is alive if its loss and its norm are finite and it has not diverged before; the first program notes the
       step at which it diverges.
    3. ``lr``: cosine from the run's peak to ``final_lr``; zero for a run that is not alive.
    4. ``corrected = 1 - beta ** step``, for both moments.
    5. Clip the gradient to the norm ``clip``; zero for a run that is not alive.
    6. ``moment1 += (1 - beta1) (gradient - moment1)``, ``moment2 += (1 - beta2) (gradient ** 2 - moment2)``.
    7. ``params *= 1 - lr decay``.
    8. ``params -= lr / corrected1 moment1 / (sqrt(moment2 / corrected2) + eps)``.

    ========  ==========  ======================  ===========
    tensor    shape       written by              read by
    ========  ==========  ======================  ===========
    params    (R, P)      this kernel             this kernel
    moment1   (R, P)      this kernel             this kernel
    moment2   (R, P)      this kernel             this kernel
    gradient  (R, P)      autograd                this kernel
    decay     (R, P)      caller                  this kernel
    sums      (R, sums)   ``square_sums_kernel``  this kernel
    loss      (R,)        forward pass            this kernel
    lr        (R,)        caller                  this kernel
    step      ()          caller                  this kernel
    diverged  (R,)        this kernel             this kernel
    ========  ==========  ======================  ===========
    """
    run = tl.program_id(1).to(tl.int64)
    of_run = tl.arange(0, SUMS)

    # 1. Norm of the gradient.
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + run * sums + of_run, of_run < sums, 0.0), 0))

    # 2. Whether the run is alive.
    done = tl.load(step_ptr)
    diverged = tl.load(diverged_ptr + run)
    finite = (tl.abs(tl.load(loss_ptr + run)) < float("inf")) & (norm < float("inf"))
    alive = finite & (diverged < 0)
    # Other programs may read the entry before or after this write: in both cases the run is not alive to them.
    if tl.program_id(0) == 0:
        tl.store(diverged_ptr + run, tl.where(finite | (diverged >= 0), diverged, done + 1))

    # 3. Learning rate.
    peak = tl.load(lr_ptr + run)
    last = tl.minimum(peak, final_lr)
    lr = last + (peak - last) * 0.5 * (1 + tl.cos(done.to(tl.float32) / total_steps * 3.141592653589793))
    lr = tl.where(alive, lr, 0.0)

    # 4. Corrections of the moments' start at zero.
    step = (done + 1).to(tl.float32)
    corrected1 = 1 - tl.exp2(step * tl.log2(beta1))
    corrected2 = 1 - tl.exp2(step * tl.log2(beta2))

    # 5. Clipped gradient.
    n = tl.program_id(0) * N + tl.arange(0, N)
    at_N = run * P + n
    gradient_N = tl.load(gradient_ptr + at_N, n < P, 0.0)
    gradient_N = tl.where(alive, gradient_N, 0.0) * tl.where(alive, 1 / tl.maximum(norm / clip, 1.0), 0.0)

    moment1_N = tl.load(moment1_ptr + at_N, n < P, 0.0)
    moment2_N = tl.load(moment2_ptr + at_N, n < P, 0.0)
    params_N = tl.load(params_ptr + at_N, n < P, 0.0)
    decay_N = tl.load(decay_ptr + at_N, n < P, 0.0)

    # 6. Moments.
    moment1_N += (1 - beta1) * (gradient_N - moment1_N)
    moment2_N += (1 - beta2) * (gradient_N * gradient_N - moment2_N)
    tl.store(moment1_ptr + at_N, moment1_N, n < P)
    tl.store(moment2_ptr + at_N, moment2_N, n < P)

    # 7. Weight decay.
    params_N *= 1 - lr * decay_N

    # 8. Step.
    params_N -= moment1_N / (tl.sqrt(moment2_N / corrected2) + eps) * (lr / corrected1)
    tl.store(params_ptr + at_N, params_N, n < P)


def adamw_step(
    params_RP: Tensor,
    moment1_RP: Tensor,
    moment2_RP: Tensor,
    gradient_RP: Tensor,
    decay_RP: Tensor,
    loss_R: Tensor,
    lr_R1: Tensor,
    step: Tensor,
    diverged_R: Tensor,
    total_steps: int,
    settings: Optimizer,
) -> None:
    """Take one optimizer step in two launches; all tensors are contiguous.

    Args:
        params_RP: parameters, changed in place.
        moment1_RP: first moment, changed in place.
        moment2_RP: second moment, changed in place.
        gradient_RP: gradient of the parameters.
        decay_RP: weight decay of each parameter.
        loss_R: losses that the gradient is of.
        lr_R1: peak learning rates.
        step: steps done before, int64.
        diverged_R: step at which a run diverged, counted from 1; -1 while it has not. Changed in place.
        total_steps: steps of the whole training.
        settings: constants of AdamW and its schedule.
    """
    R, P = params_RP.shape

    # Sums of the gradients' squares.
    sums = min(triton.cdiv(P, SQUARES["N"]), MAX_SUMS)
    sums_RS = loss_R.new_empty(R, sums)
    square_sums_kernel[sums, R](gradient_RP, sums_RS, P, **SQUARES)

    adamw_kernel[triton.cdiv(P, ADAMW["N"]), R](
        params_RP,
        moment1_RP,
        moment2_RP,
        gradient_RP,
        decay_RP,
        sums_RS,
        loss_R,
        lr_R1,
        step,
        diverged_R,
        P,
        sums,
        total_steps,
        settings.beta1,
        settings.beta2,
        settings.eps,
        settings.final_lr,
        settings.clip,
        SUMS=triton.next_power_of_2(sums),
        **ADAMW,
    )
