"""The devices that PyTorch sees, and their names."""

import ctypes
import platform
from functools import cache

import torch


def find_devices(name: str) -> list[torch.device]:
    """Return the devices of ``--device``: the CPU, or every GPU that PyTorch sees.

    Args:
        name: ``cpu``, ``cuda`` or ``auto``, which takes the GPUs if there are any.

    Raises:
        ValueError: ``cuda`` is asked for, and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def device_name(device: torch.device) -> str:
    """Return the model of the GPU, or the architecture of the machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


@cache
def keep_freed_memory() -> None:
    """Let the C library keep up to 1 GiB of freed memory, for the next step of a training on a CPU.

    By default glibc gives the memory of large tensors back, and the system clears each page again for the next step:
    a fifth of the time of a step of RT. Other C libraries stay as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return

    trim_threshold, mmap_threshold = -1, -3  # in malloc.h
    library, size = ctypes.CDLL(None), 1 << 30
    if not library.mallopt(mmap_threshold, size):
        library.mallopt(mmap_threshold, 32 << 20)  # old versions take no more
    library.mallopt(trim_threshold, size)
