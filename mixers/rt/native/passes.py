"""Both passes of the recurrence in C: its tensors, its threads, and products over all positions."""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS
from mixers.rt.naive import Weights
from mixers.rt.native.library import library
from mixers.rt.native.matrices import Matrices

GROUP = 24
"""Sequences of a group, at most; the weights are read once for each position of a group."""

TENSORS = (
    *("q", "k", "v", "slopes", "gain"),
    *("out", "up", "down", "pairs"),
    *("a", "n", "n_scale", "g", "g_slope", "m", "m_scale", "c", "c_scale", "keys", "values", "top", "share"),
    *("x", "z"),
    *("dz", "dq", "dk", "dv", "dgain", "dpairs", "dy", "dh", "du"),
)
"""Tensors of ``struct call`` in recurrence.c, which tells their shapes."""
KEPT = TENSORS[TENSORS.index("a") : TENSORS.index("x")]
SIZES = ("B", "T", "F", "kv_norm")


class _Call(ctypes.Structure):
    """``struct call`` in recurrence.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_double),
    )


def native_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of the recurrence.

    Args:
        x_RBTD, q_RBTD, k_RBTD, v_RBTD, weights: as in ``naive_recurrence``, each with a leading run axis, all in one
            dtype, float32 or float64.
        slopes_H, scale: as in ``naive_recurrence``.
        block: 1.

    Returns:
        Outputs z (R, B, T, D), and tensors that ``native_backward`` takes as ``saved``.
    """
    recurrence = _Recurrence(q_RBTD, k_RBTD, v_RBTD, weights, slopes_H)
    R, B, T, D = x_RBTD.shape
    hidden, new = weights.up_FD.shape[1], x_RBTD.new_empty

    kept = {
        **{name: new(R, T, B, D) for name in ("a", "n", "m", "c")},
        **{name: new(R, T, B) for name in ("n_scale", "m_scale", "c_scale")},
        **{name: new(R, T, B, hidden) for name in ("g", "g_slope")},
        **{name: new(R, B, T, recurrence.pair_size) for name in ("keys", "values")},
        **{name: new(R, B, T, recurrence.softmax_size) for name in ("top", "share")},
    }
    matrices = Matrices._make(w.mT for w in Matrices.of(weights, scale))
    z_RBTD = new(R, B, T, D)
    recurrence.run("forward", matrices, {**kept, "x": x_RBTD.contiguous(), "z": z_RBTD})
    return z_RBTD, tuple(kept[name] for name in KEPT)


def native_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Gradients of x, q, k, v (each R, B, T, D) and of the weights.

    Arguments are the gradient of the outputs, the arguments of ``native_forward``, its outputs, and its saved tensors.
    """
    recurrence = _Recurrence(q_RBTD, k_RBTD, v_RBTD, weights, slopes_H)
    R, B, T, D = x_RBTD.shape
    new, kept = x_RBTD.new_empty, dict(zip(KEPT, saved, strict=True))

    # Activations.
    gradients = {
        "dz": dz_RBTD.contiguous(),
        **{name: new(R, B, T, D) for name in ("dq", "dk", "dv")},
        **{name: new(R, T, B, D) for name in ("dgain", "dy", "du")},
        "dpairs": new(R, T, B, 2 * D),
        "dh": torch.empty_like(kept["g"]),
    }
    matrices = Matrices.of(weights, scale)
    recurrence.run("backward", matrices, {**kept, **gradients})

    # Weights, all positions at once.
    names = (("du", "a"), ("dh", "n"), ("dy", "g"), ("dpairs", "m"))
    products = (gradients[dy].flatten(1, 2).mT @ kept[y].flatten(1, 2) for dy, y in names)
    dk_norm = None if weights.k_norm_D is None else gradients["dgain"].sum((1, 2))
    dweights = Matrices._make(products).through(weights, scale, dk_norm)

    return gradients["du"].transpose(1, 2), *(gradients[name] for name in ("dq", "dk", "dv")), dweights


class _Recurrence:
    """What the calls of both passes share.

    Attributes:
        pair_size: numbers that a key or a value takes in the order of attention.
        softmax_size: numbers that the softmax of a query keeps for the backward pass, each of two kinds.
    """

    def __init__(self, q_RBTD: Tensor, k_RBTD: Tensor, v_RBTD: Tensor, weights: Weights, slopes_H: Tensor) -> None:
        self._runs, B, T, D = q_RBTD.shape
        found = library(q_RBTD.dtype, len(slopes_H), D // len(slopes_H))
        assert found is not None  # the dispatch asked before
        self._library = found
        self.pair_size, self.softmax_size = found.pair_size(), found.softmax_size()

        self._tensors = {
            "q": q_RBTD.contiguous(),
            "k": k_RBTD.contiguous(),
            "v": v_RBTD.contiguous(),
            "slopes": slopes_H.to(q_RBTD),
        }
        if weights.k_norm_D is not None:
            self._tensors["gain"] = weights.k_norm_D.contiguous()
        self._sizes = {
            "B": B,
            "T": T,
            "F": weights.up_FD.shape[1],
            "kv_norm": weights.kv_norm_D is not None,
        }

    def run(self, name: str, matrices: Matrices, tensors: dict[str, Tensor]) -> None:
        """Call a function of the library for all groups of sequences, in as many threads as PyTorch uses.

        Args:
            name: ``forward`` or ``backward``.
            matrices: as (R, inputs, outputs), each row of inputs times its matrix.
            tensors: tensors of the call that are not of all calls.
        """
        # Groups of sequences, and scratch memory of the threads.
        R, B = self._runs, self._sizes["B"]
        workers = max(1, min(torch.get_num_threads(), R * B))
        size = min(GROUP, -(-R * B // workers))
        groups = iter([(r, b, min(size, B - b)) for r in range(R) for b in range(0, B, size)])
        room = getattr(self._library, f"{name}_scratch")(ctypes.byref(_Call(**self._sizes)), size)
        scratch = self._tensors["q"].new_empty(workers, room)
        if isinstance(scratch, FakeTensor):
            return  # memory is counted

        # Addresses.
        panels = zip(("out", "up", "down", "pairs"), map(self._panels, matrices), strict=True)
        tensors = {**self._tensors, **tensors, **dict(panels)}
        addresses: dict[str, Any] = {field: y.data_ptr() for field, y in tensors.items()}
        call = _Call(**addresses, **self._sizes, eps=NORM_EPS)

        # Threads; each takes the next group until none is left.
        def work(worker: int) -> None:
            for group in groups:
                getattr(self._library, name)(ctypes.byref(call), *group, scratch[worker].data_ptr())

        others = [threading.Thread(target=work, args=(worker,)) for worker in range(1, workers)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()

    def _panels(self, w_RIO: Tensor) -> Tensor:
        """(R, inputs, outputs) -> (R, outputs / PANEL, inputs, PANEL), with zeros for missing outputs."""
        panel = self._library.panel()
        padded = F.pad(w_RIO, (0, -w_RIO.shape[2] % panel))
        return padded.unflatten(2, (-1, panel)).transpose(1, 2).contiguous()
