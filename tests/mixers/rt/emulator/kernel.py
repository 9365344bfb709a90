"""Chunk kernels on a CPU: the same source, run thread by thread in place of a GPU."""

import ctypes
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
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
    ) -> None:
        assert (constants["PROGRAMS"], constants["THREADS"], device.type) == (programs, threads, "cpu")
        self.library = _library(source, {"KERNEL": name, "EMULATE": 1, **constants})
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
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
]


@cache
def _header() -> tempfile.TemporaryDirectory[str]:
    """A folder with gpu.h and its compiled form, for the time of the process."""
    folder = tempfile.TemporaryDirectory()
    header = shutil.copy(Path(__file__).with_name("gpu.h"), folder.name)
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


def _library(kernel: str, constants: Mapping[str, object]) -> ctypes.CDLL:
    """The kernel compiled for the CPU."""
    kernel = kernel.replace("extern __shared__ uint4 shared[];", "uint4* const shared = gpu::shared_memory();")
    defines = [f"#define {name} {y}" for name, y in constants.items()]  # a compiled header comes before them
    text = "\n".join(('#include "gpu.h"', *defines, kernel, Path(__file__).with_name("run.h").read_text()))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        command = ["g++", *FLAGS, "-shared", f"-I{_header().name}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
