"""The delta rule without decays, forward and backward, as layers call it: 16 heads, bfloat16.

    PYTHONPATH=. python delta_time.py

Medians of 20 passes in milliseconds, launched from Python, and as a CUDA graph; then the time of each kernel. For the
kernels before, it runs in a checkout of commit 5a62df36.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.linear_recurrence import matrix_recurrence

HEADS = 16
CASES = ((1, 8, 2048, 64), (1, 2, 8192, 64), (1, 8, 2048, 128), (2, 8, 2048, 64))
"""Pairs of a position, sequences, positions, channels."""


def median(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(N: int, B: int, T: int, K: int) -> None:
    """Print the times of a case."""
    torch.manual_seed(0)
    q = torch.randn(B, T, HEADS, K, device="cuda")
    k, v = (torch.randn(B, T * N, HEADS, K, device="cuda") for _ in range(2))
    beta = torch.rand(B, T * N, HEADS, device="cuda")
    inputs = [y.bfloat16().requires_grad_() for y in (q, F.normalize(k, dim=-1), v, beta)]
    upstream = torch.randn_like(q).bfloat16()

    def passes() -> list[Tensor]:
        q, k, v, beta = inputs
        with torch.autocast("cuda", torch.bfloat16):
            o = matrix_recurrence(q, beta[..., None] * k, v, None, None, k)
        return [o, *torch.autograd.grad(o, inputs, upstream.to(o.dtype))]

    for _ in range(3):
        passes()
    launched = median(passes)
    with torch.cuda.stream(torch.cuda.Stream()):
        passes()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    print(N, B, T, K, f"launched {launched:.3f} graph {median(graph.replay):.3f} ms", flush=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        passes()
        torch.cuda.synchronize()
    for kernel in sorted(profile.key_averages(), key=lambda kernel: -kernel.device_time_total)[:14]:
        print(f"    {kernel.device_time_total:7.0f} us {kernel.count} x {kernel.key[:90]}", flush=True)


if __name__ == "__main__":
    for case in CASES:
        measure(*case)
