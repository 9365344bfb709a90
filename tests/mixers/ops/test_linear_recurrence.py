"""The recurrence of linear-attention layers: chunks of positions against one position at a time, C against chunks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from mixers.ops.linear_recurrence import CHUNK, matrix_recurrence, matrix_step
from mixers.ops.native.recurrence import KEPT, METHOD, recurrence_library
from mixers.ops.runs import over_runs

BATCH, HEADS, KEY, VALUE = 2, 3, 4, 5


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tensors of a test differ, also those of one shape: else queries for keys would be no error."""
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


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


@pytest.mark.parametrize("factors", [False, True])
def test_float32_is_as_exact_as_float64(factors: bool) -> None:
    """With a single head of queries and keys, decays beyond any number, and tiny states, which C takes for zeros."""
    rows = (BATCH, 2 * CHUNK + 5)
    q, k, v = normal(*rows, 1, KEY), normal(*rows, 1, KEY), normal(*rows, HEADS, VALUE)
    g = -60 * (normal(*rows, HEADS, KEY) > 0).double()
    g[:, 3] = -torch.inf
    a, b = (0.3 * normal(*rows, HEADS, KEY) for _ in range(2)) if factors else (None, None)
    if factors:
        q, k = (y.expand(-1, -1, HEADS, -1) for y in (q, k))
    leaves = [y.requires_grad_() for y in (q, k, v)]
    found = []
    for dtype in (torch.float32, torch.float64):
        o = matrix_recurrence(*(y if y is None else y.to(dtype) for y in (*leaves, g, a, b)))
        found.append([o.double(), *torch.autograd.grad(o[:, -1].sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_delta_rule_overwrites_a_key() -> None:
    """With unit keys and full strength, the value stored last under a key is what it returns (arXiv:2102.11174)."""
    key = torch.nn.functional.normalize(normal(1, 1, 1, KEY), dim=-1).expand(1, 3, 1, KEY)
    v = normal(1, 3, 1, VALUE)
    o = matrix_recurrence(key, key, v, a_BTHK=-key, b_BTHK=key)
    torch.testing.assert_close(o, v)


@pytest.mark.skipif(recurrence_library(torch.float64) is None, reason="needs a C compiler")
@pytest.mark.parametrize("decays", [0, 1, KEY])
@pytest.mark.parametrize(
    ("factors", "pairs", "bonus"), [("", 1, False), ("", 1, True), ("ab", 1, False), ("b", 1, False), ("b", 3, False)]
)
def test_c_equals_chunks_and_itself_with_any_number_of_threads(
    factors: str, pairs: int, bonus: bool, decays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and the gradients of all tensors, of two runs; the last kept state is before fewer than KEPT pairs."""
    rows, shape = (2, BATCH, (KEPT + 8) * pairs, HEADS), (2, BATCH, KEPT + 8, HEADS)
    given = {"q": normal(*shape, KEY), "k": normal(*rows, KEY), "v": normal(*rows, VALUE)}
    given |= {name: 0.3 * normal(*rows, KEY) for name in factors}
    if decays:
        given["g"] = -normal(*shape, decays).square()
    if bonus:
        given["bonus"] = normal(2, HEADS, KEY)
    leaves, upstream = [y.requires_grad_() for y in given.values()], normal(*shape, VALUE)

    def results(recurrence: Callable[..., Tensor]) -> list[Tensor]:
        def of_a_run(*tensors: Tensor) -> Tensor:
            named = dict(zip(given, tensors, strict=True))
            return recurrence(*(named.get(name) for name in ("q", "k", "v", "g", "a", "b", "bonus")))

        o = vmap(of_a_run)(*leaves)
        return [o, *torch.autograd.grad(o, leaves, upstream)]

    def by_c(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *others: Tensor | None) -> Tensor:
        return over_runs(METHOD, q, k, v, g if g is None else g.exp(), *others)[0]

    in_c = []
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        in_c.append(results(by_c))
    assert all(map(torch.equal, *in_c))
    torch.testing.assert_close(in_c[0], results(matrix_recurrence), rtol=1e-11, atol=1e-11)
