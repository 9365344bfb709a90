"""Seconds of a CPU core that compiling a recurrence's kernels takes, with Triton's cache empty. No GPU is needed.

    PYTHONPATH=.:results/published/2026-11-30-beside-flash-linear-attention python compile_time.py compile.csv

Both passes are traced for an H100 as ``tests.golden.ptx`` traces models, and each kernel is compiled to a binary, one
after the other: 16,384 tokens, 16 heads of 64 channels. Launching, which needs a GPU, is not in it.
"""

import csv
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import beside_fla
import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

from tests.golden import ptx

MAKE_CUBIN, RUN = CUDABackend.make_cubin, triton.JITFunction.run
RUNS: list[tuple[Any, float]] = []
"""Kernels that were met, and the seconds that each took."""


def timed(kernel: Any, *arguments: Any, **settings: Any) -> Any:
    """Compile a kernel that Triton does not have yet."""
    began = time.perf_counter()
    compiled = RUN(kernel, *arguments, **settings)
    RUNS.append((kernel, time.perf_counter() - began))
    return compiled


def given(kind: str, T: int) -> dict[str, Tensor]:
    """Inputs of ``beside_fla``, without numbers."""
    y = torch.empty(beside_fla.TOKENS // T, T, beside_fla.HEADS, 64, dtype=torch.bfloat16, device=ptx.GPU)
    inputs = {name: torch.empty_like(y) for name in "qkv"}
    if "delta" in kind or kind == "KDA":
        inputs["beta"] = y[..., 0].contiguous()
    if kind == "RWKV-7":
        inputs |= {name: torch.empty_like(y) for name in "ab"}
    if kind not in ("delta", "linear"):
        decays = y.float()
        inputs["g"] = decays if kind in ("GLA", "KDA", "RWKV-7") else decays[..., 0].contiguous()
    return inputs


def measured() -> Iterator[None]:
    """Write a line for each recurrence; ``tests.golden.ptx`` takes it for a list of no models."""
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["triton", "recurrence", "positions", "kernels", "seconds"])
        for T in (2048, 512):
            for kind in beside_fla.KINDS:
                for kernel, _ in RUNS:
                    kernel.device_caches.clear()
                RUNS.clear()
                with tempfile.TemporaryDirectory() as triton.knobs.cache.dir:
                    beside_fla.ours(kind, **given(kind, T))
                kernels = sum(seconds > 0.05 for _, seconds in RUNS)
                table.writerow([triton.__version__, kind, T, kernels, f"{sum(y for _, y in RUNS):.1f}"])
                file.flush()
    yield from ()


def with_binaries() -> Iterator[None]:
    """The measurements, where ``tests.golden.ptx`` makes no binaries."""
    with patch.object(CUDABackend, "make_cubin", MAKE_CUBIN):
        yield from measured()


if __name__ == "__main__":
    with (
        patch.object(ptx, "models", with_binaries),
        patch.object(ptx, "product", lambda *_: ()),
        patch.object(ptx, "SPECIALISATIONS", 99),
        patch.object(triton.JITFunction, "run", timed),
    ):
        ptx.compiled_kernels(ptx.H100)
