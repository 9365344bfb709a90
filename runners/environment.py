"""Where things run, and in which precision: devices, and the versions of libraries."""

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


def product_precision(device: torch.device) -> str:
    """What the matrix products of a model run in on a device, wherever it is trained, evaluated or diagnosed."""
    return "bfloat16" if device.type == "cuda" else "float32"


def product_autocast(device: torch.device) -> torch.autocast:
    """Context of forward passes in ``product_precision``; parameters stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=product_precision(device) == "bfloat16")


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
