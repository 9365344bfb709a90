"""Token shifts: several mixtures of each position with the one before it (Peng et al. 2024, section 4).

Dimensions beside those of ``mixers.base``: N mixtures.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def token_shifts(x_BTD: Tensor, shift_ND: Tensor, *change_BTD: Tensor) -> tuple[Tensor, ...]:
    """Return ``x_t + (x_{t-1} - x_t) * shift`` (B, T, D) for each shift, with zeros before the first position.

    Under bfloat16 autocast on a GPU the results are bfloat16, because matrix products read them.

    Args:
        x_BTD: inputs.
        shift_ND: shifts.
        change_BTD: what each position adds to each shift; none if nothing.
    """
    if runs_fused(x_BTD):
        from mixers.ops.kernels.token_shift import token_shifts_method

        return over_runs(token_shifts_method(len(shift_ND), torch.bfloat16), x_BTD, shift_ND, *change_BTD)

    step_BTD = shifted(x_BTD) - x_BTD
    shifts = (
        [shift_D + change for shift_D, change in zip(shift_ND, change_BTD, strict=True)] if change_BTD else shift_ND
    )
    return tuple(x_BTD + step_BTD * shift for shift in shifts)


def shifted(y_BTX: Tensor) -> Tensor:
    """Return at each position what stood at the one before it; zeros at the first."""
    return F.pad(y_BTX[:, :-1], (*(0, 0) * (y_BTX.ndim - 2), 1, 0))
