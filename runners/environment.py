"""Where things run: devices, and the versions of libraries."""

import platform
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
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


def versions() -> dict[str, str | None]:
    """Versions that a result depends on; None for what is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "numpy": np.__version__,
        "optuna": version("optuna"),
    }


def device_name(device: torch.device) -> str:
    """Model of the GPU, or of the machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"
