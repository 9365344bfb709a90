"""Sizes that the fused kernels want, and tensors of a layer of other sizes in them."""

import math

from torch import Tensor
from torch.nn.functional import pad

CHUNK = 16
"""Positions between two launches of a loop."""


class Room:
    """Sizes of a layer's tensors by axis, and of the kernels' tensors, in which those lie with zeros behind.

    Axes: T positions, D channels, H heads, K channels by heads, F channels of the MLP's hidden layer. Zeros change
    nothing where sums of squares are divided by the layer's own width and logits are scaled by its own head dim.

    Args:
        length: positions of the layer's tensors.
        width: their channels.
        heads: which divide the width.
        hidden: width of the MLP's hidden layer.
        block: positions of a block.

    Attributes:
        T: positions, whole steps of them.
        D: width, a power of two from 64 on.
        H: heads, which fill the width.
        K: head dim, a power of two from 8 on.
        F: width of the MLP's hidden layer, a multiple of 64.
        width: the layer's own.
        head_dim: the layer's own.
        block: positions of a block.
        step: positions that a loop takes at once, a block or a chunk of it.
    """

    def __init__(self, length: int, width: int, heads: int, hidden: int, block: int) -> None:
        self.width, self.head_dim = width, width // heads
        self.block, self.step = block, min(block, CHUNK)
        self.T = -(-length // self.step) * self.step
        self.K = max(_power_of_two(self.head_dim), 8)
        self.D = max(_power_of_two(width), _power_of_two(heads * self.K), 64)
        self.H = self.D // self.K
        self.F = -(-hidden // 64) * 64
        self._small = {"T": (length,), "D": (width,), "H": (heads,), "K": (heads, self.head_dim), "F": (hidden,)}
        self._full = {"T": (self.T,), "D": (self.D,), "H": (self.H,), "K": (self.H, self.K), "F": (self.F,)}

    def fill(self, y: Tensor, axes: str) -> Tensor:
        """``y``, whose last axes are given, in the kernels' sizes; contiguous."""
        small, full, lead = self._sizes(y, axes)
        if small == full:
            return y.contiguous()
        behind = [(0, n - m) for m, n in zip(reversed(small), reversed(full), strict=True)]
        y = pad(y.reshape(*lead, *small), [n for pair in behind for n in pair])
        return y.reshape(*lead, *(math.prod(self._full[axis]) for axis in axes)).contiguous()  # pad may keep strides

    def cut(self, y: Tensor, axes: str) -> Tensor:
        """The layer's part of ``y``, whose last axes are given; no view of a part, which may not be written into."""
        small, full, lead = self._sizes(y, axes)
        if small == full:
            return y
        y = y.reshape(*lead, *full)
        for axis, size in enumerate(small, len(lead)):
            y = y.narrow(axis, 0, size)
        return y.reshape(*lead, *(math.prod(self._small[axis]) for axis in axes)).contiguous()

    def _sizes(self, y: Tensor, axes: str) -> tuple[list[int], list[int], list[int]]:
        small, full = ([n for axis in axes for n in sizes[axis]] for sizes in (self._small, self._full))
        return small, full, list(y.shape[: -len(axes)])


def _power_of_two(n: int) -> int:
    """The smallest from ``n`` on."""
    return 1 << (n - 1).bit_length()
