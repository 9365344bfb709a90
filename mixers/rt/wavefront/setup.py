"""The common part of forward and backward pass: settings, sizes and matrices."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixers.ops.weights import LayerWeights
from mixers.rt.wavefront.launch import row_tile
from mixers.rt.wavefront.schedule import Schedule
from mixers.rt.wavefront.weights import key_gain, operands_of


@dataclass(frozen=True, kw_only=True)
class WavefrontSetting:
    """Settings that layers share.

    Attributes:
        slopes_H: ALiBi slope of each head.
        scale: factor of the residual branches.
        persistent_norm: RMS norm of outputs before their persistent pairs.
        block: positions that attend to each other's temporary pairs.
        dtype: dtype of the matrix products.
    """

    slopes_H: Tensor
    scale: float
    persistent_norm: bool
    block: int = 1
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a pass over a stack of layers (R = 1), or over one layer of R runs.

    Attributes:
        R: runs.
        L: layers of the stack, or R.
        B: sequences.
        D: model width.
        H: heads.
        F: hidden width of the MLP.
        block: positions of a block, which are computed at the same time.
        schedule: order of the groups.
        low: dtype of the products.
        wide: dtype of inputs, sums and statistics.
        device: device of all tensors.
        chained: whether normed outputs of a layer serve as normed inputs of the next one.
    """

    R: int
    L: int
    B: int
    D: int
    H: int
    F: int
    block: int
    schedule: Schedule
    low: torch.dtype
    wide: torch.dtype
    device: torch.device
    chained: bool

    @property
    def K(self) -> int:
        """Head dim."""
        return self.D // self.H

    @staticmethod
    def of(x_RBTD: Tensor, weights: LayerWeights, setting: WavefrontSetting) -> "Sizes":
        """Sizes for inputs, and weights with a leading axis of layers (R = 1) or runs."""
        R, B, T, D = x_RBTD.shape
        L = len(weights.wq_DD)
        schedule = Schedule.of_stack(L, B, T) if R == 1 else Schedule.of_runs(R, B, T)
        return Sizes(
            R=R,
            L=L,
            B=B,
            D=D,
            H=len(setting.slopes_H),
            F=weights.up_FD.shape[1],
            block=setting.block,
            schedule=schedule,
            low=setting.dtype,
            wide=x_RBTD.dtype,
            device=x_RBTD.device,
            chained=R == 1 and setting.persistent_norm,
        )

    def new_low(self, *shape: int) -> Tensor:
        """Uninitialised memory in the dtype of products."""
        return torch.empty(shape, dtype=self.low, device=self.device)

    def new_wide(self, *shape: int) -> Tensor:
        """Uninitialised memory in the dtype of sums and statistics."""
        return torch.empty(shape, dtype=self.wide, device=self.device)


class Pass:
    """A pass over a stack of layers (R = 1), or over one layer of R runs.

    Args:
        y_RBTD: inputs, or gradients of outputs.
        weights: weights with a leading axis of layers or runs.
        setting: settings that layers share.
    """

    def __init__(self, y_RBTD: Tensor, weights: LayerWeights, setting: WavefrontSetting) -> None:
        self.setting = setting
        self.sizes = sizes = Sizes.of(y_RBTD, weights, setting)
        self.operands = operands_of(weights, setting.persistent_norm, setting.dtype)
        self.key_gain = key_gain(weights)
        self.qk_norm = weights.q_norm_D is not None
        self.slopes_H = setting.slopes_H.float()

        # Constant arguments of the kernels that take whole rows, and of ``past_kernels``.
        self.row_arguments: dict[str, Any] = row_tile(sizes.D)
        self.past_arguments: dict[str, Any] = {
            "slopes_ptr": self.slopes_H,
            "T": sizes.schedule.length,
            "step": sizes.B,
            "D": sizes.D,
            "K": sizes.K,
            "UNIT": sizes.K**-0.5,
            "S": sizes.schedule.group,
            "G": 1,
            "E": sizes.K,
            "SKEW": sizes.schedule.skew,
        }
