"""Triton kernels of a training step: a few launches where PyTorch needs dozens, which bound the speed of small models.

No kernel uses atomics, and the results of a run do not depend on how many runs are trained beside it.
"""

import torch

from mixers.ops.numerics import has_triton


def kernels_run_on(device: torch.device) -> bool:
    """Return whether the kernels can run on a device: on a GPU, where Triton is installed."""
    return device.type == "cuda" and has_triton()
