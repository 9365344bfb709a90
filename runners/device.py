"""The devices there are."""

import platform

import torch


def find_devices(name: str) -> list[torch.device]:
    """Devices of ``--device``: the CPU, or every GPU that PyTorch sees.

    Raises:
        ValueError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def device_name(device: torch.device) -> str:
    """Model of the GPU, or of the machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"
