"""RMS normalisation in C, for the rows of all runs."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.native.library import compiled
from mixers.ops.native.threads import share_among_threads
from mixers.ops.numerics import NORM_EPS

NUMBERS_OF_A_PART = 2**18
"""Size of the parts into which a run's rows are divided. Threads share the parts; each has its own sum for the gain."""


class _Call(ctypes.Structure):
    """``struct call`` in norm.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "D", "P")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("x", "gain", "scale", "y", "dy", "dx", "dgain")),
    )


@cache
def norm_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled norm for a precision; None if no C compiler works."""
    library = compiled(Path(__file__).with_suffix(".c"), dtype)
    if library is not None:
        for function in (library.forward, library.backward):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
            function.restype = None
    return library


def _forward(x: Tensor, gain_RD: Tensor) -> tuple[Tensors, Tensors]:
    """Return ``(outputs,)``, and for the backward pass the inverse root mean squares (R, N) of the rows."""
    x_RND = _rows(x)
    y_RND, scale_RN = torch.empty_like(x_RND), x_RND.new_empty(x_RND.shape[:2])
    _run("forward", x=x_RND, gain=gain_RD.contiguous(), scale=scale_RN, y=y_RND)
    return (y_RND.view(x.shape),), (scale_RN,)


def _backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
    """Return the gradients of rows and gains."""
    (dy,), (x, gain_RD), (scale_RN,) = gradients, tensors, saved
    x_RND = _rows(x)
    dx_RND, dgain_RPD = torch.empty_like(x_RND), x_RND.new_empty(len(x_RND), _parts(x_RND), x_RND.shape[2])
    _run("backward", x=x_RND, gain=gain_RD.contiguous(), scale=scale_RN, dy=_rows(dy), dx=dx_RND, dgain=dgain_RPD)
    return dx_RND.view(x.shape), dgain_RPD.sum(1)


def _run(name: str, **tensors: Tensor) -> None:
    """Call a function of the library for all parts of all runs."""
    x_RND = tensors["x"]
    if isinstance(x_RND, FakeTensor):
        return  # fake tensors: only memory is counted

    R, N, D = x_RND.shape
    call = _Call(N=N, D=D, P=_parts(x_RND), eps=NORM_EPS, **{field: y.data_ptr() for field, y in tensors.items()})
    function = getattr(norm_library(x_RND.dtype), name)
    parts = [(run, part) for run in range(R) for part in range(call.P)]
    share_among_threads(parts, lambda worker, part: function(ctypes.byref(call), *part))


def _rows(x: Tensor) -> Tensor:
    """(R, ..., D) -> (R, N, D), contiguous."""
    return x.unsqueeze(1).flatten(1, -2).contiguous()


def _parts(x_RND: Tensor) -> int:
    """Number of parts of a run's rows."""
    return max(1, x_RND.shape[1] * x_RND.shape[2] // NUMBERS_OF_A_PART)


METHOD = Method(_forward, _backward, label="rms_norm native")
"""Both passes of the norm. PyTorch's own backward pass runs the norm as separate operations."""
