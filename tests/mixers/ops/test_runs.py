"""Operations on all runs: as they are, and as operators in a trace."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from mixers.ops.method import Method
from mixers.ops.operators import as_operators
from mixers.ops.runs import methods_met, over_batch, over_runs


def scaled_sum(factor: Tensor) -> Method:
    """``factor (x w + y)`` and x; y may be None. Two of the tensors saved share memory, and so do two gradients."""

    def forward(x: Tensor, w: Tensor, y: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        product = x * w[:, None]
        return (factor * (product if y is None else product + y), x), (product, product[:, :1])

    def backward(gradients, tensors, outputs, saved):  # type: ignore[no-untyped-def]
        (d, dx), (x, w, y) = gradients, tensors
        both = torch.stack([factor * d * w[:, None] + dx, factor * d])
        return both[0], (both[1] * x).sum(1), None if y is None else both[1]

    return Method(forward, backward, outputs=2)


def step(factor: Tensor, x_RBD: Tensor, w_RD: Tensor, y_RBD: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of all tensors over R runs."""
    tensors = [z.detach().requires_grad_() for z in (x_RBD, w_RD, y_RBD) if z is not None]

    def loss_of_one_run(x: Tensor, w: Tensor, y: Tensor | None = None) -> Tensor:
        z, same_x = over_runs(scaled_sum(factor), x, w, y)
        return (z * z + same_x**3).sum()

    loss_R = vmap(loss_of_one_run)(*tensors)
    return torch.autograd.grad(loss_R.sum(), tensors)


def test_operators_in_a_trace_compute_what_the_operation_computes() -> None:
    """Also with a tensor that the method holds or hands on, with None, and with results that share memory."""
    generator = torch.Generator().manual_seed(0)
    x_RBD, y_RBD = (torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    w_RD, factor = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (1,)))

    for y in (y_RBD, None):
        arguments = (x_RBD, w_RD) if y is None else (x_RBD, w_RD, y)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return step(factor, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)

        with as_operators():
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)

        names = [str(node.target) for node in graph.graph.nodes]
        assert names.count("mixers.forward.default") == names.count("mixers.backward.default") == 1
        for got, want in zip(graph(*arguments), run(*arguments), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_outside_of_a_trace_there_are_no_operators() -> None:
    graph = make_fx(lambda x, w: step(torch.ones(1), x, w, None))(torch.ones(1, 2, 3), torch.ones(1, 3))
    assert not any("mixers" in str(node.target) for node in graph.graph.nodes)


def test_methods_that_are_met_are_named_once_and_only_inside() -> None:
    tensors = torch.ones(1, 2, 3), torch.ones(1, 3)
    with methods_met() as inside:
        over_runs(scaled_sum(torch.ones(1)), *(y[0] for y in tensors), None)
        step(torch.ones(1), *tensors, None)
        over_runs(replace(scaled_sum(torch.ones(1)), label="sum"), *(y[0] for y in tensors), None)
    step(torch.ones(1), *tensors, None)
    assert list(inside) == ["scaled_sum", "sum"]


def test_an_operation_hands_on_what_another_one_has_computed() -> None:
    """Both keep the same tensor for their backward passes, so neither may touch it."""
    x, w = torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(3)
    y, _ = over_runs(scaled_sum(torch.full((1,), 2.0)), x, w, None)
    z, same_y = over_runs(scaled_sum(torch.full((1,), 5.0)), y, w, None)
    (gradient,) = torch.autograd.grad((z + 3 * same_y).sum(), x)
    assert torch.equal(same_y, y)
    torch.testing.assert_close(gradient, torch.full_like(x, 2.0 * (5 + 3)))


def test_a_second_derivative_is_refused_where_it_is_taken() -> None:
    """To autograd the first one is a constant, which a sum with another term hides."""
    x = torch.ones(1, 2, 3, requires_grad=True)
    y, _ = over_runs(scaled_sum(torch.ones(1)), x[0], torch.ones(3), None)
    (first,) = torch.autograd.grad((y + x**2).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * torch.ones_like(x))
    with pytest.raises(NotImplementedError, match="scaled_sum has no second derivative"):
        torch.autograd.grad((first**2).sum(), x)


def test_a_second_derivative_over_the_batch() -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    (first,) = torch.autograd.grad(over_batch(torch.sin, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close((first, second), (x.cos(), -x.sin()))


def test_first_derivatives_by_torch_func() -> None:
    """Of one run, of each sequence, and as a Jacobian: gradients alone are mapped, all tensors are, or runs are."""
    method = scaled_sum(torch.full((1,), 3.0))
    x_BD, w_D = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0, 4.0])

    def first(x_BD: Tensor, w_D: Tensor) -> Tensor:
        return over_runs(method, x_BD, w_D, None)[0]

    def total(x_BD: Tensor, w_D: Tensor) -> Tensor:
        return first(x_BD, w_D).sum()

    torch.testing.assert_close(grad(total)(x_BD, w_D), (3 * w_D).expand(2, 3))
    each = vmap(grad(total, argnums=1), in_dims=(0, None))(x_BD[:, None], w_D)
    torch.testing.assert_close(each, 3 * x_BD)

    jacobian = jacrev(first)(x_BD, w_D).reshape(6, 6)
    torch.testing.assert_close(jacobian, torch.diag(3 * w_D.repeat(2)))
    of_runs = jacrev(vmap(first, in_dims=(0, None)))(x_BD[:, None], w_D).reshape(6, 6)
    torch.testing.assert_close(of_runs, torch.diag(3 * w_D.repeat(2)))
