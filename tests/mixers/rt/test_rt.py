"""The Recurrent Transformer: tiled against the oracle, which ``test_plain_loops.py`` holds to the paper."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import vmap

from mixers.base import Shape
from mixers.ops.attention import alibi_slopes
from mixers.rt.dispatch import choose, recurrence
from mixers.rt.layer import RecurrentTransformer
from mixers.rt.naive import Weights
from mixers.rt.native.passes import library
from mixers.rt.tiled.attention import Tile, _own_block_logits, _tile_logits
from mixers.transformer import Transformer

TOLERANCE = 1e-12  # relative, float64: the ladder's first rung

needs_compiler = pytest.mark.skipif(library(torch.float64, 4, 4) is None, reason="needs a C compiler")
NATIVE = pytest.param("native", marks=needs_compiler)


def case(
    runs: int,
    batch: int,
    length: int,
    *,
    width: int = 16,
    heads: int = 4,
    hidden: int = 32,
    kv_norm: bool = True,
    k_norm: bool = True,
) -> tuple[list[Tensor], Weights, Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).requires_grad_()

    weights = Weights(
        wo_DD=draw(runs, width, width, std=width**-0.5),
        mlp_norm_D=draw(runs, width),
        up_FD=draw(runs, hidden, width, std=width**-0.5),
        down_DF=draw(runs, width, hidden, std=hidden**-0.5),
        kv_norm_D=draw(runs, width) if kv_norm else None,
        wk_DD=draw(runs, width, width, std=width**-0.5),
        k_norm_D=draw(runs, width) if k_norm else None,
        wv_DD=draw(runs, width, width, std=width**-0.5),
    )
    return [draw(runs, batch, length, width) for _ in range(4)], weights, alibi_slopes(heads)


def outputs_and_gradients(
    implementation: str, inputs: list[Tensor], weights: Weights, slopes: Tensor, scale: float, block: int
) -> list[Tensor]:
    def one(x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Weights) -> Tensor:
        return recurrence(x, q, k, v, w, slopes, scale, block, implementation)  # type: ignore[arg-type]

    z = vmap(one, (0, 0, 0, 0, weights.map(lambda _: 0)))(*inputs, weights)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(z)
    leaves = [*inputs, *(w for w in weights if w is not None)]
    return [z, *torch.autograd.grad(z, leaves, upstream, allow_unused=True, materialize_grads=True)]


def assert_equal_to_oracle(
    implementation: str, inputs: list[Tensor], weights: Weights, slopes: Tensor, scale: float, block: int
) -> None:
    names = ["z", "x", "q", "k", "v", *(f for f, w in zip(Weights._fields, weights, strict=True) if w is not None)]
    oracle = outputs_and_gradients("naive", inputs, weights, slopes, scale, block)
    found = outputs_and_gradients(implementation, inputs, weights, slopes, scale, block)
    for name, got, want in zip(names, found, oracle, strict=True):
        size = torch.linalg.vector_norm(want).clamp(min=1.0)  # some gradients are exactly zero
        assert torch.linalg.vector_norm(got - want) <= TOLERANCE * size, name


@pytest.mark.parametrize("implementation", ["naive", "tiled"])
@pytest.mark.parametrize("block", [20, 64])
def test_a_block_as_long_as_the_sequence_is_the_transformer(implementation: str, block: int) -> None:
    shape = Shape(width=32, mlp_width=64, layers=3)
    torch.manual_seed(0)
    transformer = Transformer(Transformer.Config(heads=4), shape).double()
    config = RecurrentTransformer.Config(heads=4, block=block, implementation=implementation)  # type: ignore[arg-type]
    rt = RecurrentTransformer(config, shape).double()
    rt.load_state_dict(transformer.state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    torch.testing.assert_close(rt(x), transformer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("runs", "length", "norms", "scale", "block"),
    [
        *(
            (2, length, {"kv_norm": kv_norm, "k_norm": k_norm}, 0.7, 1)
            for length in (1, 2, 7, 31, 32, 50)
            for kv_norm, k_norm in ((True, True), (False, True), (True, False))
        ),
        *((1, length, {}, 1.0, block) for length in (1, 7, 64) for block in (2, 3, 200)),
    ],
)
def test_tiled_equals_naive_in_output_and_every_gradient(
    runs: int, length: int, norms: dict[str, bool], scale: float, block: int
) -> None:
    assert_equal_to_oracle("tiled", *case(runs, 2, length, **norms), scale=scale, block=block)


@pytest.mark.parametrize("implementation", ["tiled", NATIVE])
def test_fake_tensors_have_shapes_alone(implementation: str) -> None:
    """Costs of models that are too large for the machine are counted with them."""
    with FakeTensorMode():
        config = RecurrentTransformer.Config(heads=4, implementation=implementation)  # type: ignore[arg-type]
        x = torch.randn(2, 5, 16).requires_grad_()
        z = RecurrentTransformer(config, Shape(width=16, mlp_width=32))(x)
        z.sum().backward()
    assert z.shape == x.shape
    assert x.grad.shape == x.shape


def test_passes_gradcheck() -> None:
    """Against finite differences: implementations could share an error, this could not."""
    inputs, weights, slopes = case(1, 1, 5, width=4, heads=2, hidden=3)
    leaves = [*inputs, *(w for w in weights if w is not None)]

    def function(*tensors: Tensor) -> Tensor:
        x, q, k, v, *rest = (tensor[0] for tensor in tensors)
        return recurrence(x, q, k, v, Weights(*rest), slopes, 0.7, 1, "tiled")

    assert torch.autograd.gradcheck(function, leaves, check_undefined_grad=False)


def test_tiled_adds_alibi_in_float32_to_logits_of_bfloat16() -> None:
    """Distances above 256 have no exact form in bfloat16; with queries of zero, the logits are the bias alone."""
    length, slopes = 1000, alibi_slopes(1)
    q, k = torch.zeros(length, 1, 1, 4).bfloat16(), torch.ones(length, 1, 1, 4).bfloat16()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    expected = -slopes * distance

    own = _own_block_logits(q, k, slopes, block=length)[0, 0, 0, 0]
    assert torch.equal(own.tril(), expected.tril())
    tile = _tile_logits(q, k, slopes, Tile(keys=slice(0, 500), queries=slice(500, length)))[0, 0, 0]
    assert torch.equal(tile, expected[500:, :500])


def test_inputs_of_16_bits_on_a_gpu_run_in_plain_pytorch_and_it_says_why(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    layer = RecurrentTransformer(RecurrentTransformer.Config(), Shape(width=128, mlp_width=512))
    with FakeTensorMode():
        x = torch.zeros(1, 4, 128, device="cuda", dtype=torch.bfloat16)
    assert choose("auto", x, 512, 16, 1) == "fused"
    assert layer._choose(x) == layer._choose(x) == "tiled"
    (record,) = caplog.records
    assert "because fused takes inputs and parameters in float32, not torch.bfloat16" in record.getMessage()


def test_an_unsupported_shape_says_why_it_falls_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("triton")
    q = torch.zeros(1, 4, 96)
    assert choose("naive", q, 64, 4, 1) == "naive"
    for _ in range(2):
        assert choose("fused", q, 64, 4, 6) == choose("native", q, 64, 4, 6) == "tiled"
    assert [record.getMessage() for record in caplog.records] == [
        "Recurrent Transformer: tiled runs, because fused cannot run on blocks of 6 positions (kernels: powers of two)",
        "Recurrent Transformer: tiled runs, because native cannot run on blocks of 6 positions (native: 1)",
    ]
