"""The recurrence of linear-attention layers: chunks of positions against one position at a time."""

import pytest
import torch
from torch import Tensor

from mixers.ops.linear_recurrence import CHUNK, matrix_recurrence, matrix_step

BATCH, HEADS, KEY, VALUE = 2, 3, 4, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float64)


def steps(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
    """Outputs one position at a time; ``others`` are g, a and b of every position, and the bonus."""
    state, outputs = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=torch.float64), []
    for t in range(q.shape[1]):
        here = (None if y is None else y[:, t] for y in others[:3])
        o, state = matrix_step(state, q[:, t], k[:, t], v[:, t], *here, others[3])
        outputs.append(o)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("rank_one", [False, True])
@pytest.mark.parametrize("decays", [0, 1, KEY])
@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 5])
def test_chunks_equal_single_steps(length: int, decays: int, rank_one: bool, bonus: bool) -> None:
    """Outputs and gradients, strong decays included, which must not overflow."""
    shape = (BATCH, length, HEADS)
    q, k, v = (normal(*shape, n).requires_grad_() for n in (KEY, KEY, VALUE))
    g = -30 * normal(*shape, decays).square().requires_grad_() if decays else None
    a, b = (0.3 * normal(*shape, KEY), 0.3 * normal(*shape, KEY)) if rank_one else (None, None)
    u = normal(HEADS, KEY) if bonus else None
    got, want = matrix_recurrence(q, k, v, g, a, b, u), steps(q, k, v, g, a, b, u)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    gradients = [torch.autograd.grad(y.square().sum(), (q, k, v), retain_graph=True) for y in (got, want)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_very_strong_decay_leaves_the_others_their_precision() -> None:
    q, k, v = (normal(BATCH, CHUNK, HEADS, n).float() for n in (KEY, KEY, VALUE))
    g = torch.where(torch.arange(CHUNK)[:, None, None] == 3, -1e9, -0.01).expand(BATCH, -1, HEADS, 1)
    alone = matrix_recurrence(q[:, 3:], k[:, 3:], v[:, 3:], g[:, 3:].clamp(min=-200))
    # float32, whose running sums reach 60
    torch.testing.assert_close(matrix_recurrence(q, k, v, g)[:, 3:], alone, rtol=1e-4, atol=1e-4)


def test_delta_rule_overwrites_a_key() -> None:
    """With unit keys and full strength, the value stored last under a key is what it returns (arXiv:2102.11174)."""
    key = torch.nn.functional.normalize(normal(1, 1, 1, KEY), dim=-1).expand(1, 3, 1, KEY)
    v = normal(1, 3, 1, VALUE)
    o = matrix_recurrence(key, key, v, a_BTHK=-key, b_BTHK=key)
    torch.testing.assert_close(o, v)
