"""Kernels in CUDA C++ where something is missing or fails. Fake modules stand for NVRTC and the driver."""

import ctypes
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mixers.ops import cuda

DEVICE = torch.device("cuda", 1)
SHAPE: Any = {"programs": 8, "threads": 256, "shared_bytes": 1024}


class Nvrtc:
    """A compiler whose machine code is the source in capitals; it fails at the word ``garbage``."""

    def __init__(self) -> None:
        self.destroyed: list[bytes] = []

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, 13, 0

    def nvrtcCreateProgram(self, source: bytes, *_: Any) -> tuple[int, bytes]:
        return 0, source

    def nvrtcCompileProgram(self, program: bytes, count: int, options: list[bytes]) -> tuple[int]:
        assert count == len(options)
        return (6 if b"garbage" in program else 0,)

    def nvrtcGetProgramLogSize(self, program: bytes) -> tuple[int, int]:
        return 0, 8

    def nvrtcGetProgramLog(self, program: bytes, messages: bytes) -> tuple[int]:
        return self._fill(messages, b"line 1\n\0")

    def nvrtcGetCUBINSize(self, program: bytes) -> tuple[int, int]:
        return 0, len(program)

    def nvrtcGetCUBIN(self, program: bytes, cubin: bytes) -> tuple[int]:
        return self._fill(cubin, program.upper())

    def nvrtcDestroyProgram(self, program: bytes) -> tuple[int]:
        self.destroyed.append(program)
        return (0,)

    @staticmethod
    def _fill(place: bytes, content: bytes) -> tuple[int]:
        assert len(place) == len(content)
        ctypes.memmove(place, content, len(content))
        return (0,)


class Driver:
    """A driver that loads any code but ``REFUSED``, on which 15 clusters fit."""

    CUlaunchAttributeID = CUfunction_attribute = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14,
    )
    CUlaunchConfig = SimpleNamespace

    def __init__(self) -> None:
        self.launched: list[tuple[Any, str]] = []

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, bytes | None]:
        return (200, None) if cubin == b"REFUSED" else (0, cubin)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuFuncSetAttribute(self, function: str, key: int, value: int) -> tuple[int]:
        return (0,)

    def cuOccupancyMaxActiveClusters(self, function: str, config: Any) -> tuple[int, int]:
        return 0, 15

    def cuLaunchKernelEx(self, config: Any, function: str, parameters: int, extra: int) -> tuple[int]:
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        self.launched.append((config, ctypes.cast(pointers[0], ctypes.POINTER(Arguments)).contents.count))
        return (0,)


class Arguments(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("count", ctypes.c_int))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Nvrtc, Driver]:
    nvrtc, driver = Nvrtc(), Driver()
    for name, module in (("nvrtc", nvrtc), ("driver", driver)):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return nvrtc, driver


def test_a_kernel_is_compiled_once_and_launched_with_its_arguments(modules: tuple[Nvrtc, Driver]) -> None:
    nvrtc, driver = modules
    for _ in range(2):
        kernel = cuda.compiled("code", {"K": 4}, DEVICE, name="f", **SHAPE)
        assert kernel is not None
    assert nvrtc.destroyed == [b"code"]
    assert (kernel.fit, kernel.device) == (15, DEVICE)
    kernel.launch(Arguments, {"x": torch.zeros(1), "count": 5}, (2, 3))
    ((config, count),) = driver.launched
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (8, 2, 3, 256)
    assert (config.hStream, config.sharedMemBytes, config.attrs[0].value.clusterDim.x, count) == (7, 1024, 8, 5)


@pytest.mark.parametrize(
    ("source", "reason"), [("garbage", "6\nline 1"), ("refused", "CUDA: 200"), ("missing", "cuda.bindings")]
)
def test_a_kernel_that_cannot_be_had_is_one_warning(
    source: str,
    reason: str,
    modules: tuple[Nvrtc, Driver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if source == "missing":
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cuda.compiled(source, {}, DEVICE, name="f", **SHAPE) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("f is not used, and launches of smaller kernels take its place: ")
    assert reason in record.getMessage()
    assert "\0" not in record.getMessage()
    assert len(modules[0].destroyed) == {"garbage": 2, "refused": 1, "missing": 0}[source]
