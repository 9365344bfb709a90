"""Sizes that the fused kernels support, and zero padding of a layer's tensors to these sizes."""

import math

from torch import Tensor
from torch.nn import functional

CHUNK = 16
"""Number of positions per launch of a loop."""


class PaddedSizes:
    """Sizes of a layer's tensors by axis, and the sizes that they have in the kernels.

    Axes: T positions, D channels, H heads, K channels by heads, F channels of the MLP's hidden layer. Padding with
    zeros changes no result, because the kernels divide sums of squares by the layer's own width and scale logits by
    its own head dim.

    Args:
        length: positions of the layer's tensors.
        width: channels of the layer's tensors.
        heads: number of heads, a divisor of the width.
        hidden: width of the MLP's hidden layer.
        block: positions of a block.

    Attributes:
        T: positions, a multiple of ``step``.
        D: width, a power of two from 64 on.
        H: heads, which fill the width.
        K: head dim, a power of two from 8 on.
        F: width of the MLP's hidden layer, a multiple of 64.
        width: the layer's own width.
        head_dim: the layer's own head dim.
        block: positions of a block.
        step: positions that a step of the loop takes: a block, or a chunk of it.
    """

    def __init__(self, length: int, width: int, heads: int, hidden: int, block: int) -> None:
        self.width = width
        self.head_dim = width // heads
        self.block = block
        self.step = min(block, CHUNK)

        self.T = -(-length // self.step) * self.step
        self.K = max(_power_of_two(self.head_dim), 8)
        self.D = max(_power_of_two(width), _power_of_two(heads * self.K), 64)
        self.H = self.D // self.K
        self.F = -(-hidden // 64) * 64

        self._own = {"T": (length,), "D": (width,), "H": (heads,), "K": (heads, self.head_dim), "F": (hidden,)}
        self._padded = {"T": (self.T,), "D": (self.D,), "H": (self.H,), "K": (self.H, self.K), "F": (self.F,)}

    def pad(self, y: Tensor, axes: str) -> Tensor:
        """Return ``y`` padded to the kernels' sizes, contiguous; ``axes`` names its last axes."""
        own, padded, lead = self._shapes(y, axes)
        if own == padded:
            return y.contiguous()

        # torch.nn.functional.pad takes the last axis first, and may keep the strides.
        widths = [(0, n - m) for m, n in zip(reversed(own), reversed(padded), strict=True)]
        y = functional.pad(y.reshape(*lead, *own), [n for pair in widths for n in pair])
        return y.reshape(*lead, *(math.prod(self._padded[axis]) for axis in axes)).contiguous()

    def crop(self, y: Tensor, axes: str) -> Tensor:
        """Return the layer's part of ``y`` as a copy, which may be written into; ``axes`` names its last axes."""
        own, padded, lead = self._shapes(y, axes)
        if own == padded:
            return y

        y = y.reshape(*lead, *padded)
        for axis, size in enumerate(own, len(lead)):
            y = y.narrow(axis, 0, size)
        return y.reshape(*lead, *(math.prod(self._own[axis]) for axis in axes)).contiguous()

    def _shapes(self, y: Tensor, axes: str) -> tuple[list[int], list[int], list[int]]:
        """Sizes of the named axes in the layer and in the kernels, and the sizes of the axes before them."""
        own, padded = ([n for axis in axes for n in sizes[axis]] for sizes in (self._own, self._padded))
        return own, padded, list(y.shape[: -len(axes)])


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
