"""The precision in which operations run, and the choice between fused kernels and plain PyTorch."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""The dtypes of 16 bits."""
NORM_EPS = 1e-6
"""Epsilon of RMS normalisation, added to the mean square."""


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of x: its own, or the dtype of autocast, which does not change float64."""
    device = x.device.type
    if x.dtype == torch.float64 or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x.dtype
    return torch.get_autocast_dtype(device)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations keep the dtypes of their inputs, also on devices without autocast."""
    enabled = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()  # the former takes longer


def at_least_float32(y: Tensor | None) -> Any:
    """Return 16-bit tensors in float32, for statistics and long sums; return other tensors, and None, unchanged."""
    return y.float() if y is not None and y.dtype in HALF else y


def runs_fused(x: Tensor) -> bool:
    """Return whether an operation on x runs in ``mixers.ops.kernels``: on a GPU under bfloat16 autocast."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    wanted = x.is_cuda and autocast and x.dtype in (torch.float32, torch.bfloat16)
    return wanted and has_triton()


def has_triton() -> bool:
    """Return whether Triton is installed, which does not exist on every platform."""
    return find_spec("triton") is not None


def product_precision(device: torch.device) -> str:
    """Return the precision of a model's matrix products on a device, in training, evaluation and diagnosis alike."""
    return "bfloat16" if device.type == "cuda" else "float32"


def product_autocast(device: torch.device) -> torch.autocast:
    """Return the context of forward passes in ``product_precision``; parameters stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=product_precision(device) == "bfloat16")
