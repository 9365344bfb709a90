"""Kernels in CUDA C++ for what Triton cannot express: clusters of programs that wait for each other.

NVRTC compiles them. It and the package cuda-bindings come with PyTorch for GPUs.
"""

import ctypes
import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mixers.ops.cache import from_cache

log = logging.getLogger(__name__)


class Kernel:
    """A kernel in the memory of a GPU, whose programs work in clusters.

    A launch has clusters in two dimensions, and its programs an index of their cluster in each.

    Args:
        cubin: machine code.
        name: name of the function.
        programs: programs of a cluster.
        threads: threads of a program.
        shared_bytes: shared memory of a program.

    Attributes:
        fit: clusters that fit on the GPU at once.

    Raises:
        RuntimeError: the driver refuses the code or the settings.
    """

    def __init__(self, cubin: bytes, name: str, *, programs: int, threads: int, shared_bytes: int) -> None:
        self.programs, self.threads, self.shared_bytes = programs, threads, shared_bytes
        self._driver: Any = import_module("cuda.bindings.driver")
        attribute = self._driver.CUfunction_attribute

        self._module = self._checked(self._driver.cuModuleLoadData(cubin))
        self._function = self._checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
        for key, value in (
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            self._checked(self._driver.cuFuncSetAttribute(self._function, key, value))
        self.fit: int = self._checked(self._driver.cuOccupancyMaxActiveClusters(self._function, self._config(1, 1)))

    def launch(self, arguments: ctypes.Structure, y: int, z: int) -> None:
        """Launch y times z clusters on the current stream, with a structure as the only argument.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = self._config(y, z)
        config.hStream = torch.cuda.current_stream().cuda_stream
        self._checked(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _config(self, y: int, z: int) -> Any:
        cluster = self._driver.CUlaunchAttribute()
        cluster.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = cluster.value.clusterDim
        dim.x, dim.y, dim.z = self.programs, 1, 1
        cluster.value.clusterDim = dim

        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.programs, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.attrs, config.numAttrs = [cluster], 1
        return config

    def _checked(self, result: Sequence[Any]) -> Any:
        """The value of a driver call's result (error, value)."""
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA: {error}")
        return values[0] if values else None


def compiled(
    source: str,
    constants: Mapping[str, int],
    device: torch.device,
    *,
    name: str,
    programs: int,
    threads: int,
    shared_bytes: int,
) -> Kernel | None:
    """Return a kernel for a GPU of compute capability 9.0, from the cache folder or compiled now, in about a second.

    Args:
        source: the complete source.
        constants: constants of the source by name, passed with ``-D``.
        device: the GPU.
        name: name of the function.
        programs: programs of a cluster.
        threads: threads of a program.
        shared_bytes: shared memory of a program.

    Returns:
        The kernel; None if cuda-bindings or NVRTC is missing, or the compiler or the driver fails. A debug message in
        the log says why.
    """
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{key}={y}" for key, y in constants.items())]
    try:
        with torch.cuda.device(device):
            build = partial(_compile, source, options)
            cubin = from_cache(f"{name}-{_key(source, options)}", ".cubin", build, Path.read_bytes)
            return Kernel(cubin, name, programs=programs, threads=threads, shared_bytes=shared_bytes)
    except (ImportError, OSError, RuntimeError) as error:
        log.debug("%s is not used: %s", name, error)
        return None


def _key(source: str, options: list[str]) -> str:
    """Return a hash of everything that determines the machine code."""
    nvrtc: Any = import_module("cuda.bindings.nvrtc")
    return hashlib.sha256(repr((source, options, nvrtc.nvrtcVersion())).encode()).hexdigest()[:16]


def _compile(source: str, options: list[str], path: Path) -> None:
    """Write the machine code of a source to a file.

    Raises:
        RuntimeError: with the compiler's messages, if it fails.
    """
    nvrtc: Any = import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        messages = b" " * size
        nvrtc.nvrtcGetProgramLog(program, messages)
        raise RuntimeError(f"{error}\n{messages.decode(errors='replace')}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    path.write_bytes(cubin)
