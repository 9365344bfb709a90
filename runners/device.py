"""The devices that PyTorch sees, and their names."""

import platform

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
