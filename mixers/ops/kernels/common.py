"""The common part of the fused kernels of ``mixers.ops``: constants, device functions and sizes.

The kernels compute what layers share: embedding, norms, projections, softmax attention with ALiBi, and the MLP. On
small models these parts are bound by memory traffic and by the number of launches, not by arithmetic. Hence a kernel
applies as many operations as possible to a tile of rows while the tile is on the chip, and backward passes recompute
cheap values instead of reading them.

Products are in the dtype of the weights (bfloat16, or float32 in tests). Sums and statistics are in float32. There are
no atomics, so results are bitwise reproducible. Tests compare every operation with its plain PyTorch form.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions). In kernels, ``rows`` is the number of
rows of a run, M the rows of a tile, and E the width padded to a power of two. Logits are in units of log2.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.base import log_once
from mixers.ops.numerics import NORM_EPS

EPS: tl.constexpr = tl.constexpr(NORM_EPS)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

MASKED: tl.constexpr = tl.constexpr(-1e30)

Settings = dict[str, Any]
"""Compile-time settings of a launch."""


def kernels_take(what: str, sizes: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Let a function that returns whether kernels take some sizes say once which ones they take, if not these.

    Args:
        what: the operation.
        sizes: what the kernels take.
    """

    def decorated(fits: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(fits)
        def asked(*given: int) -> bool:
            found = fits(*given)
            if not found and not torch.compiler.is_compiling():
                log_once(f"{what} without its fast kernels, which take {sizes}")
            return found

        return asked

    return decorated


@cache
def launches_early(device: torch.device) -> bool:
    """Return whether a GPU can launch a kernel before the previous one has ended (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


class GpuLimits(NamedTuple):
    """Properties of a GPU on which settings of kernels depend.

    Attributes:
        multiprocessors: number of multiprocessors.
        memory: largest shared memory of a program in bytes.
        early_launch: whether a kernel can be launched before the previous one has ended.
    """

    multiprocessors: int
    memory: int
    early_launch: bool


@cache
def gpu_limits(device: torch.device) -> GpuLimits:
    """Return the limits of a GPU; for the CPU, where kernels run in Triton's interpreter, those of an H200."""
    if device.type != "cuda":
        return GpuLimits(multiprocessors=132, memory=232448, early_launch=False)
    properties = torch.cuda.get_device_properties(device)
    return GpuLimits(
        multiprocessors=properties.multi_processor_count,
        memory=getattr(properties, "shared_memory_per_block_optin", 65536),
        early_launch=launches_early(device),
    )


@triton.jit
def normal_cdf(h: tl.tensor):
    """Standard normal distribution function at h, and exp(-h^2 / 2).

    Abramowitz & Stegun 7.1.26: its error is below 1.5e-7 at half the instructions of erf, which took a sixth of the
    time of the forward pass.
    """
    bell = tl.exp2(h * h * (-0.5 * LOG2E))
    r = 1.0 + tl.abs(h) * (0.3275911 * 0.7071067811865476)
    r = tl.rsqrt(r * r)  # 1 / r, at a third of the instructions of a division
    tail = 0.5 * bell * r
    tail *= 0.254829592 + r * (-0.284496736 + r * (1.421413741 + r * (-1.453152027 + r * 1.061405429)))
    return tl.where(h < 0, tail, 1.0 - tail), bell


@triton.jit
def gelu_slope(h: tl.tensor, below: tl.tensor, bell: tl.tensor):
    """Slope of the GELU at h, for ``below, bell = normal_cdf(h)``."""
    return below + h * bell * 0.3989422804014327


@triton.jit
def sigmoid(y: tl.tensor):
    """Logistic function, without overflow."""
    return 1.0 / (1.0 + tl.exp2(y * -LOG2E))


@triton.jit
def rms(y_MD: tl.tensor, D: tl.constexpr):
    """Reciprocal root mean square of each row."""
    return tl.rsqrt(tl.sum(y_MD * y_MD, 1) / D + EPS)


@triton.jit
def rms_bwd(dy_MD: tl.tensor, normed_MD: tl.tensor, r_M: tl.tensor, D: tl.constexpr):
    """Gradient of y, given the gradient ``dy`` of ``normed = y * r`` with ``r = rms(y)``."""
    return r_M[:, None] * (dy_MD - normed_MD * (tl.sum(dy_MD * normed_MD, 1) / D)[:, None])


@triton.jit
def square(
    w_ptr: tl.tensor,
    D: tl.constexpr,
    first: int,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Rows first .. first + ROWS of W^T (TRANSPOSED) or W, for W (D, D)."""
    inner = first + tl.arange(0, ROWS)
    outer = tl.arange(0, D)
    at = outer[None, :] * D + inner[:, None] if TRANSPOSED else inner[:, None] * D + outer[None, :]
    return tl.load(w_ptr + at)


@triton.jit
def product(
    y_MD: tl.tensor,
    sum_MD: tl.tensor,
    w_ptr: tl.tensor,
    w_DD: tl.tensor,
    D: tl.constexpr,
    PINNED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """sum + y W^T (TRANSPOSED) or sum + y W; W is ``w_DD`` if PINNED, else read in halves of the summed axis."""
    if PINNED:
        sum_MD = tl.dot(y_MD, w_DD, sum_MD, input_precision="ieee")
    else:
        halves = tl.permute(tl.reshape(y_MD, [y_MD.shape[0], 2, D // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        sum_MD = tl.dot(left, square(w_ptr, D, 0, D // 2, TRANSPOSED), sum_MD, input_precision="ieee")
        sum_MD = tl.dot(right, square(w_ptr, D, D // 2, D // 2, TRANSPOSED), sum_MD, input_precision="ieee")
    return sum_MD


def rows_of(x: Tensor) -> int:
    """Number of rows of one run of x (R, ..., D)."""
    return x[0].numel() // x.shape[-1]


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensors without gaps between their numbers; None stays None."""
    return tuple(y if y is None else y.contiguous() for y in tensors)


def evenly_spaced(x: Tensor) -> tuple[Tensor, int]:
    """x (R, ..., D) with all rows at equal distances in memory, and this distance in elements.

    A slice of wider rows is returned as it is; other layouts are copied.
    """
    distance = step = x.stride(-2)
    even = x.stride(-1) == 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        even &= size == 1 or stride == step
        step *= size
    return (x, distance) if even else (x.contiguous(), x.shape[-1])


@triton.jit
def sum_columns(y_MN: tl.tensor, M: tl.constexpr, N: tl.constexpr):
    """Sum (M) over the columns of M x N numbers, if each thread holds four adjacent columns of several rows.

    ``tl.sum`` would shuffle the partial sum of every row through all lanes that share the row. Here the partial sums
    first move between threads, so that one thread holds all of a row, because ``tl.split`` needs its two operands in
    the same thread. The rest of the sum needs no shuffle.
    """
    if N < 8:
        y_M = tl.sum(y_MN, 1)
    else:
        y_MP = tl.sum(tl.reshape(y_MN, [M, N // 4, 4]), 2)
        y_M = _sum_by_halves(y_MP, M, N // 4)
    return y_M


@triton.jit
def sum_rows(y_MN: tl.tensor, M: tl.constexpr, N: tl.constexpr):
    """Sum (N) over the rows of M x N numbers, if each thread holds every fourth row; see ``sum_columns``."""
    if M < 8:
        y_N = tl.sum(y_MN, 0)
    else:
        y_PN = tl.sum(tl.reshape(y_MN, [M // 4, 4, N]), 0)
        y_N = _sum_by_halves(tl.trans(y_PN), N, 4)
    return y_N


@triton.jit
def _sum_by_halves(y_MN: tl.tensor, M: tl.constexpr, N: tl.constexpr):
    """Sum (M) over the second axis, whose extent N is a power of two."""
    if N == 1:
        y_M = tl.reshape(y_MN, [M])
    else:
        even, odd = tl.split(tl.reshape(y_MN, [M, N // 2, 2]))
        y_M = _sum_by_halves(even + odd, M, N // 2)
    return y_M
