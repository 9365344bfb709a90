"""Seconds that compiling a recurrence's kernels takes in one thread and in two, by stage of Triton's compiler.

    F=results/published/2026-11-30-
    PYTHONPATH=.:${F}beside-flash-linear-attention:${F}plain-delta-and-first-use python compile_threads.py threads.csv

As ``compile_time``, 2,048 positions. Stages are sums over kernels, in seconds of a thread; ``python`` is the trace of a
kernel's source, ``cubin`` NVIDIA's assembler. With one thread kernels are compiled one after the other.
"""

import csv
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import beside_fla
import triton
from compile_time import MAKE_CUBIN, given
from triton.backends.nvidia.compiler import CUDABackend

from tests.golden import ptx

STAGES = ("python", "ttir", "ttgir", "llir", "ptx", "cubin")
SPENT: Counter[str] = Counter()
"""Microseconds by stage."""
MET: set[Any] = set()
RUN = triton.JITFunction.run


def met(kernel: Any, *arguments: Any, **settings: Any) -> Any:
    """Compile a kernel that Triton does not have yet, and remember it."""
    MET.add(kernel)
    return RUN(kernel, *arguments, **settings)


def listen(*, times: Any, **_: Any) -> None:
    """Add up the stages of a compilation."""
    SPENT.update({"python": times.ir_initialization, **dict(times.lowering_stages)})


def measured() -> Iterator[None]:
    """Write a line for each recurrence and number of threads."""
    with open(sys.argv[1], "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["triton", "recurrence", "threads", "seconds", *STAGES])
        for kind in ("linear", *3 * ("KDA", "RWKV-7")):  # the first warms up
            for threads in (1, 2):
                for kernel in MET:
                    kernel.device_caches.clear()
                SPENT.clear()
                began = time.perf_counter()
                with (
                    tempfile.TemporaryDirectory() as triton.knobs.cache.dir,
                    ThreadPoolExecutor(threads) as pool,
                    triton.AsyncCompileMode(pool),
                ):
                    beside_fla.ours(kind, **given(kind, 2048))
                seconds = [time.perf_counter() - began, *(SPENT[stage] / 1e6 for stage in STAGES)]
                table.writerow([triton.__version__, kind, threads, *(f"{y:.1f}" for y in seconds)])
                file.flush()
    yield from ()


def with_binaries() -> Iterator[None]:
    """The measurements, where ``tests.golden.ptx`` makes no binaries."""
    with patch.object(CUDABackend, "make_cubin", MAKE_CUBIN):
        yield from measured()


if __name__ == "__main__":
    triton.knobs.compilation.listener = listen
    with (
        patch.object(ptx, "models", with_binaries),
        patch.object(ptx, "product", lambda *_: ()),
        patch.object(ptx, "SPECIALISATIONS", 99),
        patch.object(triton.JITFunction, "run", met),
    ):
        ptx.compiled_kernels(ptx.H100)
