"""The recurrence of linear-attention layers in C, for all runs."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.native.library import compiled, is_recorded
from mixers.ops.native.threads import share_among_threads, workers_for

KEPT = 32
"""The forward pass keeps the state before each pair whose number is a multiple of this."""
PARTS = 4
"""Parts of the heads for each thread."""

_SIZES = ("P", "N", "H", "K", "V", "G", "C")
_FORWARD = ("q", "k", "v", "w", "a", "b", "bonus", "o", "kept", "states")
_BACKWARD = ("d_o", "dq", "dk", "dv", "dw", "da", "db", "dbonus")


class _Call(ctypes.Structure):
    """``struct call`` in recurrence.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in (*_FORWARD, *_BACKWARD)),
    )


@cache
def recurrence_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled recurrence for a precision; None if no C compiler works."""
    library = compiled(Path(__file__).with_suffix(".c"), dtype)
    if library is not None:
        for function in (library.forward, library.backward):
            function.argtypes = [ctypes.c_void_p, *3 * [ctypes.c_int64]]
            function.restype = None
    return library


def runs_in_c(q: Tensor, k: Tensor, v: Tensor, g: Any, a: Any, b: Any, bonus: Any) -> bool:
    """Return whether C computes the recurrence: of float32 on a CPU with a compiler, where all shapes fit.

    Others are for plain PyTorch, or for its error.
    """
    given = [y for y in (q, k, v, g, a, b, bonus) if y is not None]
    if any((y.device.type, y.dtype) != ("cpu", torch.float32) for y in given) or is_recorded():
        return False

    # Several pairs a position, and a bonus, go with some forms alone.
    (B, T, H, K), rows, several = q.shape, v.shape[:3], b is not None and a is None
    fits = rows == (B, rows[1] // max(1, T) * T if several else T, H) and (a is None or b is not None)
    fits &= all(y is None or y.shape == (*rows, K) for y in (k, a, b))
    fits &= g is None or g.shape in ((B, T, H, 1), (B, T, H, K))
    fits &= bonus is None or (b is None and bonus.shape == (H, K))
    return fits and recurrence_library(torch.float32) is not None


def _forward(*tensors: Any) -> tuple[Tensors, Tensors]:
    """Return ``(outputs,)``, and for the backward pass the states before every ``KEPT`` pairs."""
    q, v = tensors[0], tensors[2]
    o = v.new_empty(*q.shape[:4], v.shape[4])
    kept = v.new_empty(*q.shape[:2], q.shape[3], -(-v.shape[2] // KEPT), q.shape[4], v.shape[4])
    _run("forward", *tensors, o=o, kept=kept)
    return (o,), (kept,)


def _backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
    """Return the gradients of all tensors."""
    q, k, v, w, a, b, bonus = tensors
    dq, dk, dv, dw, da, db = (None if y is None else y.new_empty(y.shape) for y in (q, k, v, w, a, b))
    dbonus = None if bonus is None else bonus.new_empty(*q.shape[:2], *bonus.shape[1:])
    (d_o,) = (y.contiguous() for y in gradients)
    found = {"dq": dq, "dk": dk, "dv": dv, "dw": dw, "da": da, "db": db, "dbonus": dbonus}
    _run("backward", *tensors, kept=saved[0], d_o=d_o, **found)
    return dq, dk, dv, dw, da, db, None if dbonus is None else dbonus.sum(1)


def _run(name: str, *tensors: Any, **others: Tensor | None) -> None:
    """Call a function of the library for all heads of all sequences of all runs."""
    contiguous: Any = (y if y is None else y.contiguous() for y in tensors)
    q, k, v, w, a, b, bonus = contiguous
    (R, B, T, H, K), (_, _, P, _, V) = q.shape, v.shape
    heads = R * B * H
    parts = min(heads, PARTS * workers_for(heads))
    bonus = None if bonus is None else bonus[:, None].expand(R, B, H, K).contiguous()
    states = v.new_empty(workers_for(parts), KEPT + 2, K, V)
    if isinstance(q, FakeTensor):
        return  # fake tensors: only memory is counted

    sizes = {"P": P, "N": P // max(1, T), "H": H, "K": K, "V": V, "G": 0 if w is None else w.shape[-1], "C": KEPT}
    given = {"q": q, "k": k, "v": v, "w": w, "a": a, "b": b, "bonus": bonus, "states": states, **others}
    call = _Call(**sizes, **{field: y.data_ptr() for field, y in given.items() if y is not None})
    function = getattr(recurrence_library(q.dtype), name)
    ends = [(heads * part // parts, heads * (part + 1) // parts) for part in range(parts)]
    share_among_threads(ends, lambda worker, part: function(ctypes.byref(call), *part, worker))


METHOD = Method(_forward, _backward, label="matrix_recurrence native")
"""Both passes of ``mixers.ops.linear_recurrence.matrix_recurrence``; tensors have a run axis in front, and are float32
or float64. In place of g there are decays exp(g); without factors, they may be those of each number of the state (R, B,
T, H, K V), of any sign.
"""
