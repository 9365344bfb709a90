"""Kernels of attention to segments and memories, and with gates, against the plain forms in float64.

Outputs and every gradient are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.ops.attention import alibi_slopes, forgetting_mean  # noqa: E402
from mixers.ops.block_attention import block_attention  # noqa: E402
from mixers.ops.kernels.attention import forgetting_attention_method  # noqa: E402
from mixers.ops.kernels.block_attention import block_attention_method  # noqa: E402
from mixers.ops.kernels.common import GpuLimits  # noqa: E402
from mixers.ops.kernels.layer_loop import rounded_maps  # noqa: E402
from mixers.ops.kernels.memory import fits_memory, memory_attention_method  # noqa: E402
from mixers.ops.kernels.memory_loop import memory_loop_method  # noqa: E402
from mixers.ops.kernels.path_attention import path_attention_method  # noqa: E402
from mixers.ops.kernels.relative_attention import relative_attention_method  # noqa: E402
from mixers.ops.kernels.staircase_loop import staircase_loop_method  # noqa: E402
from mixers.ops.memory import _memory_pairs, memory_attention  # noqa: E402
from mixers.ops.method import Method  # noqa: E402
from mixers.ops.path_attention import path_logits  # noqa: E402
from mixers.ops.relative_attention import relative_attention  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from mixers.ops.weights import LayerWeights  # noqa: E402
from mixers.staircase import Staircase  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import errors  # noqa: E402
from tests.mixers.runs import check_repeats  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch", "few_groups")


class Case(NamedTuple):
    """An operation in plain PyTorch for one run, as a method, and its tensors with a run axis."""

    plain: Callable[..., Tensor]
    method: Method
    rows: list[Tensor]
    parameters: list[Tensor]


class Draw:
    def __init__(self, *seed: int) -> None:
        self.generator = torch.Generator().manual_seed(hash(seed))

    def __call__(self, *shape: int) -> Tensor:
        """Numbers that bfloat16 holds exactly."""
        return torch.randn(*shape, generator=self.generator).bfloat16().double().to(DEVICE)


def forgetting_case(R: int, B: int, T: int, D: int, H: int) -> Case:
    """Gates from closed to open."""
    draw = Draw(R, B, T, D, H)
    c = F.logsigmoid(3 * draw(R, B, H, T)).cumsum(-1).float().double()

    def plain(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k))
        return forgetting_mean(q @ k.mT * (D // H) ** -0.5 + c[..., :, None] - c[..., None, :], v, None)

    return Case(plain, forgetting_attention_method(H), [draw(R, B, T, D) for _ in range(3)], [c])


def path_case(R: int, B: int, T: int, D: int, H: int, *, gated: bool = False) -> Case:
    """Strengths from 0 to 2, at which products change signs; some directions are equal; most gates are nearly open."""
    draw = Draw(R, B, T, D, H)
    q, k, v, w = (draw(R, B, T, D) for _ in range(4))
    w[:, :, 1::3] = w[:, :, : T - 1 : 3]
    beta = 2 * (2 * draw(R, B, T, H)).sigmoid()
    c = F.logsigmoid(3 * draw(R, B, H, T) + 6).cumsum(-1).float().double()

    def plain(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *c: Tensor) -> Tensor:
        logits = path_logits(q, k, w, beta)
        return forgetting_mean(logits + c[0][..., :, None] - c[0][..., None, :] if gated else logits, v, None)

    full = path_attention_method(H)
    method = (
        full
        if gated
        else replace(
            full,
            forward=lambda *tensors: full.forward(*tensors, None),
            backward=lambda gradients, tensors, *kept: full.backward(gradients, (*tensors, None), *kept)[:-1],
        )
    )
    return Case(plain, method, [q, k, v, w], [beta, c] if gated else [beta])


def relative_case(R: int, B: int, T: int, D: int, H: int, segment: int) -> Case:
    draw = Draw(R, B, T, D, H, segment)
    segment = min(segment, T)

    def plain(q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, u: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return relative_attention(q, (k, v), (far_k, far_v), (u, w), c, H, segment)

    biases_and_codes = [draw(R, D), draw(R, D), draw(R, 2 * segment, D)]
    rows = [draw(R, B, T, D) for _ in range(5)]
    return Case(plain, relative_attention_method(H, segment), rows, biases_and_codes)


def block_case(R: int, B: int, T: int, D: int, H: int, *, queries: int, block: int, memory: int, earlier: int) -> Case:
    """T positions in blocks, with as many queries per block; masks as in a causal layer."""
    draw = Draw(R, B, T, D, H, queries, block)
    blocks = -(-T // block)
    distance_IJ = torch.arange(queries)[:, None] + earlier * block - torch.arange(-memory, (earlier + 1) * block)
    bias_HIJ = draw(H, *distance_IJ.shape).masked_fill((distance_IJ < 0).to(DEVICE), -torch.inf)

    def plain(q: Tensor, k: Tensor, v: Tensor, memory_k: Tensor, memory_v: Tensor) -> Tensor:
        return block_attention(q, k, v, (memory_k, memory_v), bias_HIJ, earlier)

    count = T if queries == block else blocks * queries
    rows = [draw(R, B, count, D), *(draw(R, B, T, D) for _ in range(2))]
    rows += [draw(R, B, blocks * memory, D) for _ in range(2)]

    # Without the bias, which has no gradient, among the tensors.
    full = block_attention_method(*bias_HIJ.shape, memory, earlier)
    bias = bias_HIJ.float().permute(2, 1, 0)[None]
    method = replace(
        full,
        forward=lambda *tensors: full.forward(*tensors, bias),
        backward=lambda gradients, tensors, *kept: full.backward(gradients, (*tensors, bias), *kept)[:-1],
    )
    return Case(plain, method, rows, [])


def layer_of(draw: Draw, R: int, D: int, F: int, normed: bool) -> tuple[list[Tensor], Callable[..., Any]]:
    """Parameters of a layer with a norm of its outputs, and a function that returns this norm and the other ones."""
    norm, q_norm, k_norm, mlp_norm, output_norm = (1 + draw(R, D) / 8 for _ in range(5))
    wq, wk, wv, wo = (draw(R, D, D) / 8 for _ in range(4))
    up, down = draw(R, F, D) / 8, draw(R, D, F) / 16
    qk_norms = [q_norm, k_norm] if normed else []
    parameters = [output_norm, norm, wq, wk, wv, *qk_norms, wo, mlp_norm, up, down]

    def fields(output_norm: Tensor, *parameters: Tensor) -> tuple[Tensor, LayerWeights]:
        inputs, qk_norms, outputs = parameters[:4], parameters[4:-4] or (None, None), parameters[-4:]
        return output_norm, LayerWeights(*inputs, *qk_norms, *outputs)

    return parameters, fields


def memory_case(
    R: int, B: int, T: int, D: int, H: int, F: int, *, tokens: int, size: int, earlier: int = 0, normed: bool = True
) -> Case:
    """T positions in segments; positions are causal, and the last key is hidden from the first memory token."""
    assert fits_memory(D, H, F, tokens)
    draw = Draw(R, B, T, D, H, F, tokens, size)
    distance_IJ = torch.arange(size)[:, None] + earlier * size - torch.arange(-tokens, (earlier + 1) * size)
    bias_HCJ = draw(H, *distance_IJ.shape).masked_fill((distance_IJ < 0).to(DEVICE), -torch.inf)
    bias_HMJ = draw(H, tokens, tokens + size)
    bias_HMJ[:, 0, -1] = -torch.inf

    parameters, fields = layer_of(draw, R, D, F, normed)

    def plain(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, *parameters: Tensor) -> Tensor:
        output_norm, weights = fields(*parameters)
        biases = bias_HCJ, bias_HMJ
        return memory_attention(q, k, v, memory, biases, weights, output_norm, 2**-0.5, earlier)

    # Without the biases and the matrices in the dtype of products, which have no gradient, among the tensors.
    full = memory_attention_method(H, 2**-0.5, earlier)

    def whole(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, *parameters: Tensor) -> list[Tensor | None]:
        output_norm, weights = fields(*parameters)
        matrices = weights.wq_DD, weights.wk_DD, weights.wv_DD, weights.wo_DD, weights.up_FD, weights.down_DF
        w = torch.cat([y.flatten(1) for y in matrices], 1).to(k.dtype)
        biases = (y.float().permute(2, 1, 0)[None] for y in (bias_HCJ, bias_HMJ))
        return [q, k, v, memory, *biases, output_norm, *weights, w]

    rows = [*(draw(R, B, T, D) for _ in range(3)), draw(R, B, tokens, D)]
    return Case(plain, with_constants(full, whole), rows, parameters)


def with_constants(full: Method, whole: Callable[..., list[Tensor | None]]) -> Method:
    """A method of the tensors that have gradients, from which ``whole`` makes all."""
    return replace(
        full,
        forward=lambda *tensors: full.forward(*whole(*tensors)),
        backward=lambda gradients, tensors, *kept: [
            y for y in full.backward(gradients, whole(*tensors), *kept) if y is not None
        ],
    )


def loop_case(R: int, B: int, T: int, D: int, H: int, F: int, *, tokens: int, size: int, normed: bool = True) -> Case:
    """Pairs of memory tokens; as in ``memory_case``."""
    draw = Draw(R, B, T, D, H, F, tokens, size)
    parameters, fields = layer_of(draw, R, D, F, normed)
    bias_HMJ = draw(H, tokens, tokens + size)

    def plain(k: Tensor, v: Tensor, memory: Tensor, *parameters: Tensor) -> Tensor:
        output_norm, weights = fields(*parameters)
        return torch.stack(_memory_pairs(0.5, k, v, memory, bias_HMJ, output_norm, *weights))

    def whole(k: Tensor, v: Tensor, memory: Tensor, *parameters: Tensor) -> list[Tensor | None]:
        output_norm, weights = fields(*parameters)
        bias = bias_HMJ.float().permute(2, 1, 0)[None]
        return [k, v, memory, bias, output_norm, *weights, *rounded_maps(weights, 0.5, k.dtype)]

    rows = [draw(R, B, T, D), draw(R, B, T, D), draw(R, B, tokens, D)]
    return Case(plain, with_constants(memory_loop_method(H, 0.5), whole), rows, parameters)


NAMES = (
    *("attention_norm.gain", "q.weight", "k.weight", "v.weight", "q_norm.gain", "k_norm.gain", "out.weight"),
    *("mlp_norm.gain", "mlp.up.weight", "mlp.down.weight"),
)
"""Parameters of a Transformer layer in the order of ``LayerWeights``."""


def staircase_case(
    R: int,
    B: int,
    T: int,
    D: int,
    H: int,
    F: int,
    *,
    chunk: int,
    steps: int,
    layers: int = 1,
    normed: bool = True,
    low: Any = None,
) -> Case:
    draw = Draw(R, B, T, D, H, F, chunk, steps)
    config = Staircase.Config(heads=H, chunk=chunk, steps=steps, qk_norm=normed)
    module = Staircase(config, Shape(width=D, mlp_width=F, layers=layers)).double().to(DEVICE)
    parts, fields = zip(*(layer_of(draw, R, D, F, normed) for _ in range(layers)), strict=True)
    parameters = [y for _, *part in parts for y in part]  # without the norm of outputs

    def weights_of(parameters: Sequence[Tensor]) -> list[LayerWeights]:
        size = len(parameters) // layers
        each = [parameters[n : n + size] for n in range(0, len(parameters), size)]
        return [of(part[0], *part)[1] for of, part in zip(fields, each, strict=True)]

    def plain(x: Tensor, *parameters: Tensor) -> Tensor:
        given = {
            f"stack.blocks.{n}.{name}": y
            for n, weights in enumerate(weights_of(parameters))
            for name, y in zip(NAMES, weights, strict=True)
            if y is not None
        }
        return functional_call(module, given, (x,))

    def whole(x: Tensor, *parameters: Tensor) -> list[Tensor | None]:
        scale, each = module.shape.residual_scale, weights_of(parameters)
        maps = (rounded_maps(weights, scale, low or x.dtype) for weights in each)
        tensors = (y for weights, own in zip(each, maps, strict=True) for y in (*weights, *own))
        return [x, slopes, *tensors]

    slopes = alibi_slopes(H).to(DEVICE)[None]
    method = staircase_loop_method(H, chunk, steps, module.shape.residual_scale)
    return Case(plain, with_constants(method, whole), [draw(R, B, T, D)], parameters)


SMALL = {
    "forgetting": partial(forgetting_case, 2, 2, 7, 32, 4),
    "forgetting-one-position": partial(forgetting_case, 1, 1, 1, 16, 1),
    "forgetting-long": partial(forgetting_case, 1, 1, 70, 64, 2),
    "path": partial(path_case, 2, 1, 35, 16, 1),
    "path-gated": partial(path_case, 1, 1, 66, 24, 1, gated=True),
    "path-one-position": partial(path_case, 1, 1, 1, 16, 2),
    "path-long": partial(path_case, 1, 1, 100, 16, 1),
    "path-one-chunk": partial(path_case, 1, 2, 32, 16, 1, gated=True),
    "relative": partial(relative_case, 2, 2, 21, 32, 4, 4),
    "relative-one-position": partial(relative_case, 1, 1, 1, 16, 1, 8),
    "relative-one-segment": partial(relative_case, 3, 1, 5, 16, 2, 8),
    "relative-segments-of-one": partial(relative_case, 1, 2, 18, 24, 3, 1),
    "relative-odd-segments": partial(relative_case, 1, 1, 18, 160, 20, 3),
    "block": partial(block_case, 2, 2, 11, 32, 4, queries=4, block=4, memory=2, earlier=1),
    "block-one-position": partial(block_case, 1, 1, 1, 16, 1, queries=8, block=8, memory=4, earlier=1),
    "block-few-queries": partial(block_case, 3, 2, 5, 32, 2, queries=3, block=5, memory=3, earlier=0),
    "block-of-many-queries": partial(block_case, 1, 1, 40, 8, 1, queries=17, block=17, memory=1, earlier=2),
    "memory": partial(memory_case, 2, 5, 11, 32, 4, 64, tokens=4, size=3, earlier=1),
    "memory-one-token": partial(memory_case, 1, 17, 5, 32, 2, 128, tokens=1, size=2, normed=False),
    "memory-many-tokens": partial(memory_case, 1, 2, 22, 32, 1, 64, tokens=16, size=11),
    "loop": partial(loop_case, 2, 3, 11, 24, 3, 40, tokens=3, size=4),
    "loop-one-token": partial(loop_case, 1, 2, 8, 16, 1, 16, tokens=1, size=2, normed=False),
    "loop-many-tokens": partial(loop_case, 1, 2, 210, 32, 2, 24, tokens=18, size=70),
    "staircase": partial(staircase_case, 2, 2, 11, 48, 3, 40, chunk=3, steps=3),
    "staircase-two-layers": partial(staircase_case, 1, 3, 8, 16, 2, 24, chunk=2, steps=2, layers=2, normed=False),
    "staircase-one-chunk": partial(staircase_case, 1, 1, 3, 64, 1, 16, chunk=4, steps=2),
}
LARGE = {
    "forgetting-8": partial(forgetting_case, 3, 8, 100, 128, 16),
    "forgetting-64": partial(forgetting_case, 1, 2, 1024, 128, 2),
    "path-32": partial(path_case, 3, 8, 128, 128, 4),
    "path-gated": partial(path_case, 2, 3, 100, 128, 4, gated=True),
    "path-64": partial(path_case, 1, 2, 300, 128, 2, gated=True),
    "path-16": partial(path_case, 1, 3, 63, 64, 4),
    "relative-8": partial(relative_case, 3, 8, 100, 128, 16, 8),
    "relative-16": partial(relative_case, 1, 1, 63, 64, 4, 8),
    "relative-64": partial(relative_case, 1, 2, 256, 256, 4, 100),
    "relative-one-position": partial(relative_case, 1, 1, 1, 128, 16, 8),
    "block-8": partial(block_case, 3, 8, 100, 128, 16, queries=8, block=8, memory=4, earlier=1),
    "block-16": partial(block_case, 1, 1, 63, 64, 4, queries=8, block=8, memory=4, earlier=0),
    "block-64": partial(block_case, 1, 2, 256, 256, 4, queries=100, block=100, memory=10, earlier=1),
    "block-few-queries": partial(block_case, 3, 8, 8, 128, 16, queries=4, block=8, memory=4, earlier=0),
    "block-one-position": partial(block_case, 1, 1, 1, 128, 16, queries=8, block=8, memory=4, earlier=1),
    "memory-8": partial(memory_case, 3, 8, 100, 128, 16, 512, tokens=4, size=8, earlier=1),
    "memory-of-many-runs": partial(memory_case, 30, 37, 20, 128, 16, 512, tokens=4, size=8),
    "memory-16": partial(memory_case, 1, 1, 63, 64, 4, 128, tokens=2, size=8, normed=False),
    "memory-32": partial(memory_case, 2, 3, 21, 32, 1, 64, tokens=8, size=10, earlier=2),
    "memory-64": partial(memory_case, 1, 2, 256, 128, 2, 512, tokens=16, size=100),
    "loop-64": partial(loop_case, 1, 8, 100, 1024, 16, 4096, tokens=4, size=8),
    "loop-8": partial(loop_case, 1, 16, 60, 192, 24, 768, tokens=4, size=8),
    "loop-of-many-rows": partial(loop_case, 1, 33, 30, 256, 4, 1024, tokens=4, size=8),
    "loop-of-many-runs": partial(loop_case, 5, 3, 30, 192, 12, 320, tokens=3, size=8, normed=False),
    "loop-of-long-segments": partial(loop_case, 2, 2, 300, 192, 3, 320, tokens=20, size=100),
    "staircase-64": partial(staircase_case, 1, 8, 100, 1024, 16, 4096, chunk=16, steps=4),
    "staircase-of-many-runs": partial(staircase_case, 5, 3, 30, 192, 12, 320, chunk=8, steps=3, layers=2, normed=False),
}


def results(function: Callable[..., Tensor], rows: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a function of one run, for all runs."""
    leaves = [y.clone().requires_grad_() for y in rows + parameters]
    output = vmap(function)(*leaves)
    upstream = Draw(output.numel())(*output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def exact(case: Case) -> list[Tensor]:
    return results(case.plain, case.rows, case.parameters)


def fused(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """With rows in a dtype; parameters are float32."""
    rows, parameters = [y.to(dtype) for y in case.rows], [y.float() for y in case.parameters]
    return results(lambda *tensors: over_runs(case.method, *tensors)[0], rows, parameters)


@interpreted
@pytest.mark.parametrize("name", SMALL)
def test_interpreted(name: str) -> None:
    case = SMALL[name]()
    assert max(errors(fused(case, torch.float32), exact(case))) <= 1e-5


@interpreted
def test_a_residual_stream_in_float32_takes_products_in_16_bits() -> None:
    """As in models; the interpreter's bfloat16 is not one."""
    case = staircase_case(2, 2, 11, 48, 3, 40, chunk=3, steps=3, layers=2, low=torch.float16)
    assert max(errors(fused(case, torch.float32), exact(case))) <= 3e-3


@interpreted
@pytest.mark.parametrize("name", ["relative", "block", "memory"])
def test_a_run_alone_and_in_company_agree(name: str) -> None:
    case = SMALL[name]()
    tensors = [y.float() for y in case.rows + case.parameters]
    together, *_ = case.method.forward(*tensors)
    alone, *_ = case.method.forward(*(y[1:] for y in tensors))
    assert torch.equal(alone[0], together[0][1:])


@interpreted
def test_path_goes_through_heads_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three heads, then the last one."""
    case = path_case(1, 3, 66, 16, 1, gated=True)
    whole = fused(case, torch.float32)
    monkeypatch.setattr("mixers.ops.kernels.path_attention.SCRATCH", 5 * 2 * 3 * 32 * 16 * 4 // 2)
    assert all(torch.equal(a, b) for a, b in zip(fused(case, torch.float32), whole, strict=True))


@interpreted
def test_one_block_of_longer_tensors_is_read_in_place() -> None:
    case = SMALL["block-few-queries"]()
    q, k, v, *memory = (y.float() for y in case.rows)
    longer_k, longer_v = (torch.cat([torch.full_like(y, torch.nan), y, y], 2) for y in (k, v))
    strided = (y[:, :, k.shape[2] : 2 * k.shape[2]] for y in (longer_k, longer_v))
    assert torch.equal(case.method.forward(q, *strided, *memory)[0][0], case.method.forward(q, k, v, *memory)[0][0])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_float32(name: str) -> None:
    case = LARGE[name]()
    assert max(errors(fused(case, torch.float32), exact(case))) <= 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_bfloat16_is_as_exact_as_plain_pytorch(name: str) -> None:
    """Both against float64."""
    case = LARGE[name]()

    def autocast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return case.plain(*tensors).bfloat16()

    want = exact(case)
    rows, parameters = [y.bfloat16() for y in case.rows], [y.float() for y in case.parameters]
    with pytest.MonkeyPatch.context() as patch:
        operations = "relative_attention", "attention", "block_attention", "memory", "projection", "mlp", "norm"
        for module in ("mixers.staircase", *(f"mixers.ops.{operation}" for operation in operations)):
            patch.setattr(f"{module}.runs_fused", lambda x: False)
        plain = errors(results(autocast, rows, parameters), want)
    for i, (ours, theirs) in enumerate(zip(errors(fused(case, torch.bfloat16), want), plain, strict=True)):
        assert ours <= 1.5 * theirs + 1e-6, (i, ours, theirs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_bitwise_repeatable(name: str) -> None:
    case = LARGE[name]()
    check_repeats(partial(fused, case, torch.bfloat16))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", [name for name in LARGE if name.startswith("memory")])
def test_settings_of_smaller_gpus_change_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LARGE[name]()
    expected = fused(case, torch.bfloat16)
    monkeypatch.setattr("mixers.ops.kernels.memory.gpu_limits", lambda _: GpuLimits(20, 101376, early_launch=False))
    assert max(errors(fused(case, torch.bfloat16), expected)) <= 2**-8
