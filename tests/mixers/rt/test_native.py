"""The Recurrent Transformer in C against the naive form: outputs and gradients."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from mixers.base import Shape
from mixers.ops.native.norm import norm_library
from mixers.ops.norm import naive_rms_norm, rms_norm
from mixers.rt.dispatch import choose
from mixers.rt.layer import RecurrentTransformer
from mixers.rt.native.passes import library

TOLERANCE = 1e-12  # relative, float64

needs_compiler = pytest.mark.skipif(library(torch.float64, 4, 4) is None, reason="needs a C compiler")


class Case(NamedTuple):
    """Runs and the shape of a layer and its inputs."""

    R: int
    B: int
    T: int
    D: int = 16
    H: int = 4
    F: int = 32
    qk_norm: bool = True
    persistent_norm: bool = True


def layer(case: Case, implementation: str) -> RecurrentTransformer:
    config = RecurrentTransformer.Config(
        heads=case.H,
        qk_norm=case.qk_norm,
        persistent_norm=case.persistent_norm,
        implementation=implementation,  # type: ignore[arg-type]
    )
    return RecurrentTransformer(config, Shape(width=case.D, mlp_width=case.F, layers=2)).double()


def draw(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Inputs "x" and parameters of all runs."""
    generator = torch.Generator().manual_seed(sum(case))
    shapes = {"x": (case.B, case.T, case.D), **{n: p.shape for n, p in layer(case, "naive").named_parameters()}}
    tensors = {}
    for name, shape in shapes.items():
        y = torch.randn(case.R, *shape, generator=generator, dtype=torch.float64)
        tensors[name] = (y * shape[-1] ** -0.5 if len(shape) == 2 else y).to(dtype).requires_grad_()
    return tensors


def outputs_and_gradients(case: Case, implementation: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    model = layer(case, implementation).to(tensors["x"].dtype)
    z = vmap(lambda named: functional_call(model, {n: y for n, y in named.items() if n != "x"}, (named["x"],)))(tensors)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(z)
    return {
        "z": z.detach(),
        **dict(zip(tensors, torch.autograd.grad(z, list(tensors.values()), upstream), strict=True)),
    }


def assert_equal_to_oracle(case: Case, tensors: dict[str, Tensor]) -> None:
    oracle = outputs_and_gradients(case, "naive", tensors)
    found = outputs_and_gradients(case, "native", tensors)
    for name, want in oracle.items():
        size = torch.linalg.vector_norm(want).clamp(min=1.0)  # some gradients are exactly zero
        assert torch.linalg.vector_norm(found[name] - want) <= TOLERANCE * size, name


@needs_compiler
@pytest.mark.usefixtures("nan_filled_scratch")
@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(runs, batch, length, qk_norm=qk_norm, persistent_norm=persistent_norm)
            for length in (1, 8, 21)
            for qk_norm, persistent_norm in ((True, True), (False, True), (True, False))
            for runs, batch in ((1, 1), (2, 3), (1, 29))
        ),
        *(Case(2, 5, 11, *sizes) for sizes in ((15, 5, 21), (16, 1, 32), (36, 6, 20))),  # heads that fill no vector
        Case(2, 0, 5),  # no sequences
    ],
)
def test_outputs_and_every_gradient_are_those_of_naive(case: Case) -> None:
    assert_equal_to_oracle(case, draw(case))


@needs_compiler
@pytest.mark.parametrize(("width", "heads"), [(32, 8), (15, 3)])
def test_float32_is_as_exact_as_naive(width: int, heads: int) -> None:
    case = Case(2, 5, 40, width, heads, 60)
    oracle = outputs_and_gradients(case, "naive", draw(case))
    plain, found = (outputs_and_gradients(case, name, draw(case, torch.float32)) for name in ("naive", "native"))
    for name, want in oracle.items():
        allowed = torch.linalg.vector_norm(plain[name] - want)
        assert torch.linalg.vector_norm(found[name] - want) <= 2 * allowed, name


@needs_compiler
def test_results_repeat_bitwise_for_any_number_of_threads_and_arguments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 31, 19)
    tensors = draw(case)
    before = [y.detach().clone() for y in tensors.values()]
    first = outputs_and_gradients(case, "native", tensors)
    for threads in (1, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        again = outputs_and_gradients(case, "native", tensors)
        assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(map(torch.equal, before, tensors.values()))


@needs_compiler
@pytest.mark.parametrize("factor", [1e3, -1e3])
def test_logits_that_overflow_an_exponential(factor: float) -> None:
    """A query's own pair is far above or far below the others: weights of exactly 1 and 0 are part of the softmax."""
    case = Case(1, 2, 32, qk_norm=False)
    tensors = draw(case)
    tensors["k.weight"] = (factor * tensors["q.weight"].detach()).requires_grad_()
    assert_equal_to_oracle(case, tensors)


@needs_compiler
@pytest.mark.parametrize("name", ["q.weight", "mlp.down.weight", "attention_norm.gain"])
def test_refuses_weights_of_another_dtype_or_device(name: str) -> None:
    """The C code would read their bytes as if they were of the inputs' dtype, beyond their end."""
    model, x = layer(Case(R=1, B=2, T=3), "native").float(), torch.randn(2, 3, 16)
    for other in (torch.float64, torch.device("meta")):
        changed = {name: model.get_parameter(name).to(other)}
        with pytest.raises(ValueError, match=r"inputs are torch.float32 on cpu, but the layer is torch.float\d\d on"):
            functional_call(model, changed, (x,))


@needs_compiler
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_stay_what_they_are_in_naive(value: float) -> None:
    case = Case(1, 2, 5)
    tensors = draw(case)
    with torch.no_grad():
        tensors["mlp.up.weight"][0, 3, 4] = value
    oracle = outputs_and_gradients(case, "naive", tensors)
    found = outputs_and_gradients(case, "native", tensors)
    for name, want in oracle.items():
        torch.testing.assert_close(found[name], want, equal_nan=True, msg=name)


@needs_compiler
def test_passes_gradcheck() -> None:
    """Against finite differences: implementations could share an error, this could not."""
    case = Case(1, 1, 8, 4, 2, 6)
    tensors, model = draw(case), layer(case, "native")

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(list(tensors)[1:], parameters, strict=True)), (x,))

    leaves = [y.detach()[0].requires_grad_() for y in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, check_undefined_grad=False)


def test_without_a_compiler_tiled_runs_and_only_who_asks_for_native_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(1, 4, 96)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", "false", 'cc "'):
        monkeypatch.setenv("CC", compiler)
        library.cache_clear()
        norm_library.cache_clear()
        assert choose("auto", x, 64, 4, 1) == "tiled"
        assert torch.equal(rms_norm(x, x[0, 0]), naive_rms_norm(x, x[0, 0]))
    (line,) = caplog.messages
    assert line.startswith('CC=cc " cannot be read (No closing quotation): slower plain PyTorch runs')

    assert choose("native", x, 64, 4, 1) == "tiled"
    assert "tiled runs, because native cannot run on this machine (no C compiler that works)" in caplog.text
    assert list(tmp_path.rglob("*.so")) == []
    library.cache_clear()
    norm_library.cache_clear()


class Cold(RecurrentTransformer):
    """A layer of a user, with another projection."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return 0 * q, k, v


@needs_compiler
def test_auto_is_native_on_the_cpu_but_for_blocks_bfloat16_and_other_projections() -> None:
    q = torch.zeros(1, 4, 96)
    assert choose("auto", q, 64, 4, 1) == choose("auto", q.double(), 64, 4, 1) == "native"
    assert choose("auto", q, 64, 4, 2) == choose("auto", q.bfloat16(), 64, 4, 1) == "tiled"
    with torch.autocast("cpu", torch.bfloat16):
        assert choose("auto", q, 64, 4, 1) == "tiled"

    x = torch.randn(2, 5, 96)
    cold = Cold(Cold.Config(), Shape(width=96, mlp_width=64))
    assert cold._choose(x) == "tiled"
    warm = RecurrentTransformer(Cold.Config(), cold.shape)
    warm.load_state_dict(cold.state_dict())
    with torch.no_grad():
        warm.q.weight.zero_()
    torch.testing.assert_close(cold(x), warm(x))
