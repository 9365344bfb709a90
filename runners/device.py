"""The devices that PyTorch sees, their names, CUDA graphs, and what fits into their memory."""

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from mixers.origin import origin

OF_MEMORY = re.compile("out of memory|can't allocate memory|can't start new thread|could not create a primitive")
"""In messages of errors that a lack of memory causes, where their type does not tell."""
MOST_PROCESSES = 8
"""Processes that share a CPU at most; each takes about a gigabyte."""
PROCESSES_PER_GPU = 4


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


def find_places(name: str, ladders: int) -> list[torch.device]:
    """Return the devices of processes that share work: each once, or several times if the work is that of a profile.

    Its ladders of difficulty are independent. So one thread for each is faster than several for one, and small models
    leave room on a GPU.

    Args:
        name: as ``find_devices`` takes it.
        ladders: how many there are; 0 for other work.
    """
    devices = find_devices(name)
    if devices[0].type == "cuda":
        return devices * max(1, min(PROCESSES_PER_GPU, ladders // len(devices)))
    return devices * max(1, min(MOST_PROCESSES, torch.get_num_threads(), ladders))


@contextmanager
def shared_threads(places: Sequence[torch.device]) -> Iterator[None]:
    """Let PyTorch use a process's share of the CPU's cores, if the processes in these places share them."""
    threads = torch.get_num_threads()
    if places[0].type == "cpu":
        torch.set_num_threads(max(1, threads // len(places)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a pass that is captured as a CUDA graph; what the pass reads must live as long.

    It is warmed up on a side stream before (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(needed: int, device: torch.device, what: str, advice: str) -> None:
    """Refuse what cannot fit.

    Args:
        needed: least bytes that it takes.
        device: where it lies.
        what: what takes the memory.
        advice: what to do.

    Raises:
        ValueError: ``needed`` is more than the memory of ``device``.
    """
    if needed > (total := total_memory(device)):
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ValueError(f"too little memory for {what}: at least {_gib(needed)}, {where} has {_gib(total)}: {advice}")


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that was handled when it was raised, is a lack of memory.

    When memory runs out during the capture of a CUDA graph, the end of the capture raises an error of its own.
    """
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or OF_MEMORY.search(str(error)):
            return True
        error = error.__context__
    return False


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory; one that a user's code raises is, if its class says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return origin(error) is None and lacks_memory(error)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
