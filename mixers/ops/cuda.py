"""Kernels in CUDA C++ for what Triton cannot express: clusters of programs that wait for each other.

NVRTC compiles them. It and the package cuda-bindings come with PyTorch for GPUs.
"""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixers.base import log_once
from mixers.ops.cache import from_cache


class Kernel:
    """A kernel in the memory of a GPU, whose programs work in clusters.

    A launch has clusters in two dimensions, and its programs an index of their cluster in each.

    Args:
        device: the GPU.
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

    def __init__(
        self, device: torch.device, cubin: bytes, name: str, *, programs: int, threads: int, shared_bytes: int
    ) -> None:
        self.device, self.programs, self.threads, self.shared_bytes = device, programs, threads, shared_bytes
        self._driver: Any = import_module("cuda.bindings.driver")
        attribute = self._driver.CUfunction_attribute

        with torch.cuda.device(device):
            self._module = _checked(self._driver.cuModuleLoadData(cubin))
            self._function = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
            for key, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
                (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
            ):
                _checked(self._driver.cuFuncSetAttribute(self._function, key, value))
            self.fit: int = _checked(self._driver.cuOccupancyMaxActiveClusters(self._function, self._config(1, 1)))

    def launch(
        self, arguments: type[ctypes.Structure], values: Mapping[str, Tensor | float], clusters: tuple[int, int]
    ) -> None:
        """Launch clusters on the GPU's current stream. ``mixers.ops.ahead`` can skip launches.

        Args:
            arguments: the structure that is the kernel's only argument.
            values: its fields by name; of a tensor, the structure has the address.
            clusters: numbers of clusters in both dimensions.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        filled = arguments(**{name: y.data_ptr() if isinstance(y, Tensor) else y for name, y in values.items()})
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(filled))
        with torch.cuda.device(self.device):
            config = self._config(*clusters)
            config.hStream = torch.cuda.current_stream().cuda_stream
            _checked(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

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


def compiled(
    source: str,
    constants: Mapping[str, float],
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
        The kernel; None if cuda-bindings or NVRTC is missing, or the compiler or the driver fails. A warning in the log
        says why, once.
    """
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{key}={y}" for key, y in constants.items())]
    try:
        build = partial(_compile, source, options)
        cubin = from_cache(f"{name}-{_key(source, options)}", ".cubin", build, Path.read_bytes)
        return Kernel(device, cubin, name, programs=programs, threads=threads, shared_bytes=shared_bytes)
    except (ImportError, OSError, RuntimeError) as error:
        log_once(f"{name} is not used, and launches of smaller kernels take its place: {error}")
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
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error:
            messages = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))  # which the next call fills
            _checked(nvrtc.nvrtcGetProgramLog(program, messages))
            raise RuntimeError(f"{error!r}\n{messages.decode(errors='replace')}".rstrip("\0\n"))
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    path.write_bytes(cubin)


def _checked(result: Sequence[Any]) -> Any:
    """Return the value of a call's result (error, value), None if it has none.

    Raises:
        RuntimeError: there is an error.
    """
    error, *values = result
    if error:
        raise RuntimeError(f"CUDA: {error!r}")
    return values[0] if values else None
