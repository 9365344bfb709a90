"""Chunk kernels on a CPU: the same source, run thread by thread in place of a GPU."""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

AVAILABLE = platform.machine() in ("x86_64", "AMD64") and shutil.which("g++") is not None


class EmulatedKernel:
    """A kernel that runs on the CPU; stands in for ``mixers.ops.cuda.compiled``, whose arguments it takes.

    Args:
        fit: clusters that would fit on the GPU at once.
        order: which of the threads that can go on does so: 0 the first, 1 the last, 2 one at random, 3 one of the warp
            that is first in a random order of warps.
        folder: where compiled kernels stay.

    Attributes:
        memory: tensors in whose memory the kernel may read and write; any other access ends the process.
    """

    def __init__(
        self,
        source: str,
        constants: Mapping[str, float],
        device: torch.device,
        *,
        name: str,
        programs: int,
        threads: int,
        shared_bytes: int,
        fit: int,
        order: int,
        folder: Path,
    ) -> None:
        assert (constants["PROGRAMS"], constants["THREADS"], device.type) == (programs, threads, "cpu")
        self.library = _library(source, {"KERNEL": name, "EMULATE": 1, **constants}, folder)
        self.shared_bytes, self.fit, self.order = shared_bytes, fit, order
        self.memory: Sequence[Tensor] = ()

    def launch(
        self, arguments: type[ctypes.Structure], values: Mapping[str, Tensor | float], clusters: tuple[int, int]
    ) -> None:
        """Run the clusters one after the other."""
        filled = arguments(**{name: y.data_ptr() if isinstance(y, Tensor) else y for name, y in values.items()})
        storages = [tensor.untyped_storage() for tensor in self.memory]
        starts = (ctypes.c_void_p * len(storages))(*(storage.data_ptr() for storage in storages))
        sizes = (ctypes.c_size_t * len(storages))(*(storage.nbytes() for storage in storages))
        seed, count = ctypes.c_uint64(12345), len(storages)
        self.library.run(ctypes.byref(filled), *clusters, self.shared_bytes, self.order, seed, count, starts, sizes)


FLAGS = [
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
]
HERE = Path(__file__).parent
RUN = """
static Arguments gpu_arguments;
extern "C" __attribute__((visibility("default")))
void run(const Arguments* arguments, int clusters, int layers, int shared_bytes, int order, uint64_t seed, int count,
         const void* const* starts, const size_t* sizes) {
  gpu_arguments = *arguments;
  gpu::run([] { KERNEL(gpu_arguments); }, C, THREADS, clusters, layers, shared_bytes, order, seed, count, starts,
           sizes);
}
"""


def _built(made: Path, text: str, *options: str) -> str:
    """A file that g++ makes of a source unless it is there; several processes may make it at the same time."""
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            command = ["g++", *FLAGS, f"-I{HERE}", "-xc++", "-", "-xnone", *options, "-o", f"{folder}/made"]
            subprocess.run(command, input=text, text=True, check=True)
            os.replace(f"{folder}/made", made)
    return str(made)


@cache
def _compiler() -> str:
    """The compiler's version, and the processor that it compiles for."""
    return subprocess.run(["g++", *FLAGS, "-###", "-E", "-xc++", os.devnull], capture_output=True, text=True).stderr


def _library(kernel: str, constants: Mapping[str, object], folder: Path) -> ctypes.CDLL:
    """The kernel compiled for the CPU; what is compiled stays in the folder for the next time."""
    kernel = kernel.replace("extern __shared__ uint4 shared[];", "uint4* const shared = gpu::shared_memory();")
    text = "\n".join(('#include "gpu.h"', *(f"#define {name} {y}" for name, y in constants.items()), kernel, RUN))

    header, emulator = ((HERE / name).read_text() for name in ("gpu.h", "gpu.cpp"))
    name = sha256("\0".join((_compiler(), header, emulator)).encode()).hexdigest()
    compiled = _built(folder / f"{name}.o", emulator, "-O3", "-c")
    name = sha256((name + text).encode()).hexdigest()
    return ctypes.CDLL(_built(folder / f"{name}.so", text, "-O1", "-shared", compiled))
