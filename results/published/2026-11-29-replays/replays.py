"""Both passes of RT and of the Feedback Transformer in a loop of one's own, beside a CUDA graph of the caller.

    python replays.py passes.csv

The first pass over a shape is compiled, the second one launched from Python, the third one captured, and later ones are
replayed: medians of six. Milliseconds, in bfloat16; the graph of the caller holds both passes.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable

import torch

from mixers import MIXERS
from mixers.base import Shape

CASES = (
    ("rt", 256, 8, 64, 256),
    ("rt", 512, 8, 32, 512),
    ("rt", 1024, 16, 32, 512),
    ("rt", 2048, 32, 16, 512),
    ("feedback-transformer", 2048, 32, 16, 512),
)
"""Layer, width, heads, sequences, positions."""


def milliseconds(call: Callable[[], None], count: int) -> list[float]:
    """Times of calls, one after another."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def measure(mixer: str, D: int, H: int, B: int, T: int) -> list[float]:
    """First, launched, captured and replayed passes, those of a graph of the caller, and GiB at most."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    kind = MIXERS[mixer]
    layer = kind(kind.Config(heads=H), Shape(width=D, mlp_width=4 * D, layers=1)).cuda()
    x, dz = torch.randn(B, T, D, device="cuda", requires_grad=True), torch.randn(B, T, D, device="cuda")

    def passes() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            z = layer(x)
        z.backward(dz.to(z.dtype))
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    first, launched, captured, _, *replayed = milliseconds(passes, 10)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        passes()
    own = statistics.median(milliseconds(graph.replay, 7))
    return [first, launched, captured, statistics.median(replayed), own, torch.cuda.max_memory_allocated() / 2**30]


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        times = ("first_ms", "launched_ms", "captured_ms", "replayed_ms", "graph_of_the_caller_ms", "peak_gib")
        table.writerow(["layer", "width", "heads", "sequences", "length", *times])
        for case in CASES:
            table.writerow([*case, *(f"{y:.2f}" for y in measure(*case))])
            file.flush()
