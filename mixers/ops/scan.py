"""The elementwise linear recurrence of state-space layers.

Dimensions beside those of ``mixers.base``: X any further axes.
"""

import torch
from torch import Tensor


def linear_scan(a_BTX: Tensor, b_BTX: Tensor) -> Tensor:
    """Return all h_t (B, T, X) of ``h_t = a_t h_{t-1} + b_t`` over axis 1 from h = 0, elementwise, real or complex.

    Two neighbouring positions make one position of a sequence of half the length,
    ``(a, b), (a', b') -> (a a', a' b + b')``, whose results are every second h (Blelloch 1990, "Prefix sums and their
    applications"): depth 2 log2(T), work O(T). There are no quotients or logarithms, so decays may be 0, and with
    abs(a) <= 1 nothing overflows.

    Args:
        a_BTX: decays; axes other than that of positions may have size 1.
        b_BTX: inputs.
    """
    length = b_BTX.shape[1]
    if length == 1:
        return b_BTX

    # Results at odd positions, by the sequence of pairs.
    whole = length - length % 2
    (a_even, a_odd), (b_even, b_odd) = (y[:, :whole].unflatten(1, (whole // 2, 2)).unbind(2) for y in (a_BTX, b_BTX))
    h_odd = linear_scan(a_odd * a_even, torch.addcmul(b_odd, a_odd, b_even))

    # Results at even positions, one step after those.
    h_before = torch.cat([torch.zeros_like(h_odd[:, :1]), h_odd[:, :-1]], dim=1)
    h_BTX = torch.stack([torch.addcmul(b_even, a_even, h_before), h_odd], dim=2).flatten(1, 2)
    if whole == length:
        return h_BTX

    # The last position of an odd length.
    return torch.cat([h_BTX, a_BTX[:, -1:] * h_BTX[:, -1:] + b_BTX[:, -1:]], dim=1)
