"""Products of 32 rows with norms, GELU and residual stream inside, beside a library's product and separate kernels.

    python few_rows.py  # microseconds of a launch in a CUDA graph of 64, and of the four in turn

A segment of RMT has 32 rows at width 1,024 with 8 sequences: its four memory tokens of each. PyTorch's products and the
project's norm are what ``mixers.ops.kernels.layer_loop`` launches. It needs a Hopper GPU.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.norm import normed

ROWS, WIDTH, HIDDEN, LAUNCHES = 32, 1024, 4096, 64


@triton.jit
def few_rows_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    h_ptr: tl.tensor,
    y_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = stream + w x, BN of its N columns; with a gain of the normed rows x; with h its GELU."""
    m = tl.arange(0, M)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    y_MN = tl.zeros([M, BN], tl.float32)
    squares_M = tl.zeros([M], tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()

    # Products, and squares for the norm.
    for at in range(0, K, BK):
        w_NK = tl.load(w_ptr + n[:, None] * K + (at + k)[None, :])
        x_MK = tl.load(x_ptr + m[:, None] * K + (at + k)[None, :])
        if gain_ptr is not None:
            wide_MK = x_MK.to(tl.float32)
            squares_M += tl.sum(wide_MK * wide_MK, 1)
            x_MK = (wide_MK * tl.load(gain_ptr + at + k)[None, :]).to(w_NK.dtype)
        y_MN = tl.dot(x_MK, tl.trans(w_NK), y_MN)
    if gain_ptr is not None:
        y_MN *= tl.rsqrt(squares_M / K + 1e-6)[:, None]

    # Stream or GELU.
    at_MN = m[:, None] * N + n[None, :]
    if stream_ptr is not None:
        y_MN += tl.load(stream_ptr + at_MN)
    if h_ptr is not None:
        tl.store(h_ptr + at_MN, y_MN)
        y_MN = 0.5 * y_MN * (1 + tl.erf(y_MN * 0.5**0.5))
    tl.store(y_ptr + at_MN, y_MN)


def few_rows(
    x: Tensor,
    w: Tensor,
    settings: tuple[int, int, int, int, bool],
    gain: Tensor | None = None,
    stream: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Launch it with BN, BK, warps, stages, and whether it is launched early."""
    BN, BK, warps, stages, early = settings
    y = x.new_empty(len(x), len(w))
    h = torch.empty_like(y) if gelu else None
    sizes: dict[str, Any] = {"N": len(w), "K": w.shape[1], "M": ROWS, "BN": BN, "BK": BK, "EARLY": early}
    launch: dict[str, Any] = {"num_warps": warps, "num_stages": stages} | ({"launch_pdl": True} if early else {})
    few_rows_kernel[(len(w) // BN,)](x, w, gain, stream, h, y, **sizes, **launch)
    return y


def microseconds(call: Callable[[], object]) -> float:
    """Time of a call in a CUDA graph of many."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / LAUNCHES


def main() -> None:
    """Print all times."""

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).bfloat16()

    qkv, out, up, down = draw(3 * WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(HIDDEN, WIDTH), draw(WIDTH, HIDDEN)
    x, hidden, gain = draw(ROWS, WIDTH), draw(ROWS, HIDDEN), torch.ones(WIDTH, device="cuda")

    # One kernel each: the fastest settings.
    fused: dict[str, Callable[[Any], Tensor]] = {
        "norm, qkv": lambda s: few_rows(x, qkv, s, gain),
        "out, stream": lambda s: few_rows(x, out, s, None, x),
        "norm, up, GELU": lambda s: few_rows(x, up, s, gain, None, True),
        "down, stream": lambda s: few_rows(hidden, down, s, None, x),
    }
    best = {}
    for name, call in fused.items():
        settings = [*product((16, 32), (128, 256), (4,), (3, 4), (False, True)), (32, 128, 8, 4, True)]
        times = {s: microseconds(lambda call=call, s=s: call(s)) for s in settings}
        best[name] = min(times, key=lambda s: times[s])
        print(f"{name}: {times[best[name]]:.2f} with {best[name]}")

    def chain() -> Tensor:
        s = [*best.values()]
        few_rows(x, qkv, s[0], gain)
        u = few_rows(x, out, s[1], None, x)
        return few_rows(few_rows(u, up, s[2], gain, None, True), down, s[3], None, u)

    print(f"all four in turn: {microseconds(chain):.2f}")

    # Today's launches.
    x3, gain2, maps = x[None], gain[None], qkv.view(1, 3, WIDTH, WIDTH).mT

    def finish() -> Tensor:
        u = torch.baddbmm(x3, x3, out[None].mT)
        h = torch.bmm(normed(u, gain2, torch.bfloat16), up[None].mT)
        return torch.baddbmm(u, F.gelu(h), down[None].mT)

    today: dict[str, Callable[[], Tensor]] = {
        "norm": lambda: normed(x3, gain2, torch.bfloat16),
        "norm and qkv": lambda: torch.matmul(normed(x3, gain2, torch.bfloat16)[:, None], maps),
        "out and stream": lambda: torch.baddbmm(x3, x3, out[None].mT),
        "up": lambda: torch.bmm(x3, up[None].mT),
        "down": lambda: torch.bmm(hidden[None], down[None].mT),
        "all after the attention": finish,
    }
    for name, call in today.items():
        print(f"today, {name}: {microseconds(call):.2f}")


if __name__ == "__main__":
    main()
