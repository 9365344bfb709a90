"""Our recurrences beside flash-linear-attention's: forward and backward, 16,384 tokens, 16 heads, bfloat16.

    pip install fla-core==0.6.0
    python beside_fla.py compile      # all candidates of their kernels, in processes side by side
    python beside_fla.py times.csv

Each of their kernels is tuned, 16 ms a candidate, and timed with the GPU to itself: medians of 20 passes in
milliseconds, theirs and ours in turn, five at a time. Errors are the largest of outputs and gradients against our plain
recurrence in float64, in shares of the norm, for 150 positions.

The times in this folder are of an earlier form, with 64 channels, in which theirs got a and b of RWKV-7 exchanged.
"""

import os

os.environ["FLA_CACHE_RESULTS"] = "0"

import csv
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


def once(call: Any, warmup: int = 0, rep: int = 0, quantiles: Any = None, **_: Any) -> Any:
    """In place of a measurement, where compiling is all that is wanted."""
    call()
    return [1.0] * len(quantiles) if quantiles else 1.0


def compile_theirs(case: tuple[str, int]) -> str:
    """Compile the candidates of a recurrence."""
    (kind, K), triton.testing.do_bench = case, once
    try:
        inputs = given(kind, TOKENS // 2048, 2048, K)
        passes(partial(theirs, kind), inputs, torch.ones_like(inputs["v"]))
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{kind} {K}: {problem}"
    return f"{kind} {K}: compiled"


def milliseconds(calls: dict[str, Any], inputs: dict[str, Tensor], upstream: Tensor) -> tuple[dict[str, float], str]:
    """Medians, and why there is none."""
    times: dict[str, list[float]] = {}
    problem = ""
    for name, call in calls.items():
        try:
            for _ in range(3):
                passes(call, inputs, upstream)
            times[name] = []
        except Exception as found:
            problem = f"{name}: {str(found)[:100]}"
    for name in 4 * [*times]:
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            passes(calls[name], inputs, upstream)
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}, problem


def measure(path: str) -> None:
    """Time every case, and write them into a CSV file one after the other."""
    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=4, rep=16)
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        names = "recurrence,channels,positions,ours_ms,theirs_ms,ratio,ours_error,theirs_error,problem"
        table.writerow(names.split(","))
        for kind in KINDS:
            calls = {"ours": partial(ours, kind), "theirs": partial(theirs, kind)}
            errors = {}
            for K, T in CASES:
                inputs = given(kind, TOKENS // T, T, K)
                times, problem = milliseconds(calls, inputs, torch.randn_like(inputs["v"]))
                errors |= {name: error(calls[name], kind) for name in times.keys() - errors.keys()}
                pair = [times.get(name) for name in calls]
                ratio = times["ours"] / times["theirs"] if len(times) == 2 else None
                numbers = [y and f"{y:.4g}" for y in (*pair, ratio, errors.get("ours"), errors.get("theirs"))]
                table.writerow([kind, K, T, *numbers, problem])
                file.flush()
                print(kind, K, T, *numbers, problem, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
            for line in pool.map(compile_theirs, [(kind, K) for K in (64, 128) for kind in KINDS[:5]]):
                print(line, flush=True)
    else:
        measure(sys.argv[1])
