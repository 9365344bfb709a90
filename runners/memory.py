"""What fits into memory: settings that ask for more are refused before anything is allocated."""

import os
import re

import torch

from mixers.origin import origin

OF_MEMORY = re.compile("out of memory|can't allocate memory|can't start new thread|could not create a primitive")
"""In messages of errors that a lack of memory causes, where their type does not tell."""


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
