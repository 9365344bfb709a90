"""Our recurrences beside flash-linear-attention's: forward and backward, 16,384 tokens, 16 heads, bfloat16.

    pip install fla-core==0.6.0
    python beside_fla.py compile      # all candidates of their kernels, in processes side by side
    python beside_fla.py times.csv delta linear GLA KDA RWKV-7

Each of their kernels is tuned, 16 ms a candidate, and timed with the GPU to itself: medians of 20 passes in
milliseconds, theirs and ours in turn, five at a time; launched from Python, and as CUDA graphs. Errors are the largest
of outputs and gradients against our plain recurrence in float64, in shares of the norm, for 150 positions.
"""

import os

os.environ["FLA_CACHE_RESULTS"] = "0"

import csv
import itertools
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.linear_recurrence import matrix_recurrence

TOKENS, HEADS = 16_384, 16
KINDS = ("delta", "linear", "GLA", "KDA", "RWKV-7", "gated delta", "scalar decay")
CASES = [(64, 128), (64, 512), (64, 2048), (64, 8192), (128, 512), (128, 2048), (128, 8192)]
"""Channels of keys and values, and positions."""
SHARES = 4
"""Processes among which the candidates of a recurrence are divided."""


def given(kind: str, B: int, T: int, K: int) -> dict[str, Tensor]:
    """Inputs by name; g are logarithms of decays, of a head or of its channels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, HEADS, K, device="cuda") for _ in range(3))
    k, beta = F.normalize(k, dim=-1), torch.rand(B, T, HEADS, device="cuda")
    inputs = {"q": q, "k": k, "v": v}
    if "delta" in kind or kind == "KDA":
        inputs["beta"] = beta
    if kind == "RWKV-7":
        inputs |= {"a": k * beta[..., None], "b": -k}
    inputs = {name: y.bfloat16() for name, y in inputs.items()}
    if kind not in ("delta", "linear"):
        inputs["g"] = -0.1 * torch.rand_like(k if kind in ("GLA", "KDA", "RWKV-7") else beta)
    return {name: y.requires_grad_() for name, y in inputs.items()}


def theirs(kind: str, q: Any, k: Any, v: Any, beta: Any = None, g: Any = None, a: Any = None, b: Any = None) -> Tensor:
    """Outputs of flash-linear-attention."""
    from fla import ops

    calls = {
        "delta": lambda: ops.chunk_delta_rule(q, k, v, beta, scale=1.0),
        "linear": lambda: ops.chunk_linear_attn(q, k, v, scale=1.0, normalize=False),
        "GLA": lambda: ops.chunk_gla(q, k, v, g, scale=1.0),
        "KDA": lambda: ops.chunk_kda(q, k, v, g, beta, scale=1.0),
        "RWKV-7": lambda: ops.chunk_rwkv7(q, g, k, v, b, a, scale=1.0),
        "gated delta": lambda: ops.chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0),
        "scalar decay": lambda: ops.chunk_simple_gla(q, k, v, g=g, scale=1.0),
    }
    return calls[kind]()[0]


def ours(kind: str, q: Any, k: Any, v: Any, beta: Any = None, g: Any = None, a: Any = None, b: Any = None) -> Tensor:
    """Outputs of this project, called as its layers do."""
    if beta is not None:
        k, b = beta[..., None] * k, k
    if g is not None and g.ndim == 3:
        g = g[..., None]
    with torch.autocast("cuda", torch.bfloat16):
        return matrix_recurrence(q, k, v, g, a, b)


def passes(call: Any, inputs: dict[str, Tensor], upstream: Tensor) -> list[Tensor]:
    """Outputs and gradients."""
    outputs = call(**inputs)
    return [outputs, *torch.autograd.grad(outputs, [*inputs.values()], upstream.to(outputs))]


def error(call: Any, kind: str) -> float:
    """Largest error of outputs and gradients."""
    inputs = given(kind, 2, 150, 64)
    upstream = torch.randn(2, 150, HEADS, 64, device="cuda").bfloat16()
    exact = {name: y.detach().double().cpu().requires_grad_() for name, y in inputs.items()}
    pairs = zip(passes(call, inputs, upstream), passes(partial(ours, kind), exact, upstream), strict=True)
    return max(float((y.double().cpu() - z).norm() / z.norm()) for y, z in pairs)


def compile_theirs(case: tuple[str, int, int]) -> str:
    """Compile a share of the candidates of a recurrence's kernels."""
    kind, K, share = case
    seen = itertools.count()

    def once(call: Any, warmup: int = 0, rep: int = 0, quantiles: Any = None, **_: Any) -> Any:
        time = 1.0
        if next(seen) % SHARES == share:
            call()
        else:
            time = float("inf")
        return [time] * len(quantiles) if quantiles else time

    triton.testing.do_bench = once
    try:
        inputs = given(kind, TOKENS // 2048, 2048, K)
        passes(partial(theirs, kind), inputs, torch.ones_like(inputs["v"]))
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{kind} {K}: {problem}"
    return f"{kind} {K} {share}: compiled"


def as_graph(call: Any, inputs: dict[str, Tensor], upstream: Tensor) -> Any:
    """The passes as a CUDA graph, which a call replays."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            passes(call, inputs, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes(call, inputs, upstream)
    return graph.replay


def medians(calls: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each call, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in 4 * [*times]:
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(path: str) -> None:
    """Time every case, and write them into a CSV file one after the other."""
    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=4, rep=16)
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        names = "ours_ms,theirs_ms,ratio,ours_graph_ms,theirs_graph_ms,graph_ratio"
        table.writerow(f"recurrence,channels,positions,{names},ours_error,theirs_error,problem".split(","))
        for kind in sys.argv[2:] or KINDS:
            calls = {"ours": partial(ours, kind), "theirs": partial(theirs, kind)}
            errors = {}
            for K, T in CASES:
                inputs = given(kind, TOKENS // T, T, K)
                upstream, launched, graphs, problem = torch.randn_like(inputs["v"]), {}, {}, ""

                # Tune both, and record their graphs.
                for name, call in calls.items():
                    try:
                        for _ in range(3):
                            passes(call, inputs, upstream)
                        launched[name] = partial(passes, call, inputs, upstream)
                        graphs[name] = as_graph(call, inputs, upstream)
                    except Exception as found:
                        problem = f"{name}: {str(found)[:100]}"

                # Errors, once a recurrence, and times.
                errors |= {name: error(calls[name], kind) for name in launched.keys() - errors.keys()}
                numbers = []
                for times in (medians(launched), medians(graphs)):
                    ratio = times["ours"] / times["theirs"] if len(times) == 2 else None
                    numbers += [times.get("ours"), times.get("theirs"), ratio]
                numbers += [errors.get("ours"), errors.get("theirs")]

                table.writerow([kind, K, T, *(y and f"{y:.4g}" for y in numbers), problem])
                file.flush()
                print(kind, K, T, *(y and f"{y:.3g}" for y in numbers), problem, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
            cases = [(kind, K, share) for K in (64, 128) for kind in KINDS[4::-1] for share in range(SHARES)]
            for line in pool.map(compile_theirs, cases):
                print(line, flush=True)
    else:
        measure(sys.argv[1])
