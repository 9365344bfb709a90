"""Forward and backward pass of a layer in C: tensors, threads, and the weights' gradients as products in PyTorch."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.native.library import compiled
from mixers.ops.native.threads import share_among_threads, workers_for
from mixers.ops.numerics import NORM_EPS
from mixers.ops.weights import LayerWeights
from mixers.rt.native.matrices import Matrices, NativeSetting, Order, query_gain

SOURCE = Path(__file__).with_name("layer.c")

GROUP = 24
"""Largest number of sequences of a group; the weights are read once per position of a group."""

MATRICES = ("project", "out", "up", "down", "pairs")
KEPT = (
    *("x_norm", "x_scale", "q", "q_scale", "k", "k_scale", "v", "keys", "keys_scale", "values", "top", "share"),
    *("a", "n", "n_scale", "g", "g_slope", "m", "m_scale"),
)
TENSORS = (
    *("slopes", "gain", *MATRICES, *KEPT, "x", "z"),
    *("dz", "dx", "dgain", "dproject", "dpairs", "dy", "dh", "du"),
)
"""Tensors of ``struct call`` in layer.c, which states their shapes."""
SIZES = ("B", "T", "F", "qk_norm", "kv_norm")


class _Call(ctypes.Structure):
    """``struct call`` in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_double),
    )


@cache
def library(dtype: torch.dtype, heads: int, head_dim: int) -> ctypes.CDLL | None:
    """Return the layer compiled for a precision, a number of heads H, and a number K of channels per head.

    Returns:
        The library; None if no C compiler works.
    """
    found = compiled(SOURCE, dtype, H=heads, K=head_dim)
    if found is None:
        return None

    number, pointer = ctypes.c_int64, ctypes.c_void_p
    for name in ("panel", "pair_size", "softmax_size", "channel"):
        getattr(found, name).restype = number
    found.channel.argtypes = [number]
    for name in ("forward", "backward"):
        scratch, run = getattr(found, f"{name}_scratch"), getattr(found, name)
        scratch.restype, scratch.argtypes = number, [pointer, number]
        run.restype, run.argtypes = None, [pointer, number, number, number, pointer]
    return found


def native_method(setting: NativeSetting) -> Method:
    """Return a layer as an operation on inputs (R, B, T, D) and the fields of ``LayerWeights``.

    The operation returns outputs (R, B, T, D). All tensors have the same dtype, float32 or float64, on the CPU.
    """

    def forward(x_RBTD: Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
        return _Layer(x_RBTD, LayerWeights(*tensors), setting).forward()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (dz_RBTD,), (x_RBTD, *weights) = gradients, tensors
        dx_RBTD, dweights = _Layer(x_RBTD, LayerWeights(*weights), setting).backward(dz_RBTD, saved)
        return dx_RBTD, *dweights

    return Method(forward, backward, label="rt native")


class _Layer:
    """Both passes of one layer."""

    def __init__(self, x_RBTD: Tensor, weights: LayerWeights, setting: NativeSetting) -> None:
        self._x_RBTD, self._weights, self._setting = x_RBTD.contiguous(), weights, setting
        heads = len(setting.slopes_H)
        found = library(x_RBTD.dtype, heads, x_RBTD.shape[3] // heads)
        assert found is not None  # the dispatch has checked this
        self._library, self._order = found, _order(found, x_RBTD.shape[3])

        # Arguments of both passes.
        self._tensors = {
            "slopes": setting.slopes_H.to(x_RBTD),
            "gain": query_gain(weights, setting, self._order),
        }
        self._sizes = {
            "B": x_RBTD.shape[1],
            "T": x_RBTD.shape[2],
            "F": weights.up_FD.shape[1],
            "qk_norm": weights.k_norm_D is not None,
            "kv_norm": setting.persistent_norm,
        }

    def forward(self) -> tuple[Tensors, Tensors]:
        """Return ``(outputs,)``, and the argument ``saved`` of ``backward``."""
        R, B, T, D = self._x_RBTD.shape
        W, hidden, new = self._library.pair_size(), self._sizes["F"], self._x_RBTD.new_empty

        kept = {
            "x_norm": new(R, B, T, D),
            **{name: new(R, B, T, W) for name in ("q", "k", "v", "keys", "values")},
            **{name: new(R, B, T) for name in ("x_scale", "q_scale", "k_scale", "keys_scale")},
            **{name: new(R, B, T, self._library.softmax_size()) for name in ("top", "share")},
            "a": new(R, T, B, W),
            **{name: new(R, T, B, D) for name in ("n", "m")},
            **{name: new(R, T, B) for name in ("n_scale", "m_scale")},
            **{name: new(R, T, B, hidden) for name in ("g", "g_slope")},
        }
        matrices = Matrices._make(w.mT for w in Matrices.of(self._weights, self._setting, self._order))
        z_RBTD = torch.empty_like(self._x_RBTD)
        self._run("forward", matrices, {**kept, "x": self._x_RBTD, "z": z_RBTD})
        return (z_RBTD,), tuple(kept[name] for name in KEPT)

    def backward(self, dz_RBTD: Tensor, saved: Tensors) -> tuple[Tensor, LayerWeights]:
        """Return the gradients of inputs and weights, given the gradients of the outputs."""
        R, B, T, D = self._x_RBTD.shape
        W, new, kept = self._library.pair_size(), dz_RBTD.new_empty, dict(zip(KEPT, saved, strict=True))

        # Activations.
        gradients = {
            "dz": dz_RBTD.contiguous(),
            "dx": new(R, B, T, D),
            "dgain": new(R, B, W),
            "dproject": new(R, B, T, 3 * W),
            "dpairs": new(R, T, B, 2 * W),
            **{name: new(R, T, B, D) for name in ("dy", "du")},
            "dh": torch.empty_like(kept["g"]),
        }
        matrices = Matrices.of(self._weights, self._setting, self._order)
        self._run("backward", matrices, {**kept, **gradients})

        # Weights, all positions at once.
        names = (("dproject", "x_norm"), ("du", "a"), ("dh", "n"), ("dy", "g"), ("dpairs", "m"))
        products = (gradients[dy].flatten(1, 2).mT @ kept[y].flatten(1, 2) for dy, y in names)
        dgain_RW = gradients["dgain"].sum(1)
        dweights = Matrices._make(products).through(self._weights, self._setting, self._order, dgain_RW)
        return gradients["dx"], dweights

    def _run(self, name: str, matrices: Matrices, tensors: dict[str, Tensor]) -> None:
        """Call a function of the library for all groups of sequences, in as many threads as PyTorch uses.

        Args:
            name: ``forward`` or ``backward``.
            matrices: matrices as (R, inputs, outputs), by which rows of inputs are multiplied.
            tensors: further tensors of this pass by name.
        """
        # Groups of sequences.
        R, B = self._x_RBTD.shape[:2]
        size = max(1, min(GROUP, -(-R * B // workers_for(R * B))))
        groups = [(r, b, min(size, B - b)) for r in range(R) for b in range(0, B, size)]

        # Scratch memory of each thread.
        room = getattr(self._library, f"{name}_scratch")(ctypes.byref(_Call(**self._sizes)), size)
        scratch = self._x_RBTD.new_empty(workers_for(len(groups)), room)
        if isinstance(scratch, FakeTensor):
            return  # fake tensors: only memory is counted

        panels = zip(MATRICES, map(self._panels, matrices), strict=True)
        tensors = {**self._tensors, **tensors, **dict(panels)}
        addresses: dict[str, Any] = {field: y.data_ptr() for field, y in tensors.items()}
        call = _Call(**addresses, **self._sizes, eps=NORM_EPS)

        def compute(worker: int, group: tuple[int, int, int]) -> None:
            getattr(self._library, name)(ctypes.byref(call), *group, scratch[worker].data_ptr())

        share_among_threads(groups, compute)

    def _panels(self, w_RIO: Tensor) -> Tensor:
        """(R, inputs, outputs) -> (R, outputs / PANEL, inputs, PANEL), with zeros for missing outputs."""
        panel = self._library.panel()
        padded = F.pad(w_RIO, (0, -w_RIO.shape[2] % panel))
        return padded.unflatten(2, (-1, panel)).transpose(1, 2).contiguous()


def _order(found: ctypes.CDLL, width: int) -> Order:
    """Return the order of the channels in the attention of a compiled layer."""
    channels = [found.channel(place) for place in range(found.pair_size())]
    places = {channel: place for place, channel in enumerate(channels)}
    return Order(
        channels_W=torch.tensor([width if channel < 0 else channel for channel in channels]),
        places_D=torch.tensor([places[channel] for channel in range(width)]),
    )
