"""DeltaProduct as in its authors' experiments with groups, for ``replicate.py``."""

from torch import Tensor

from mixers.base import Shape, State
from mixers.deltaproduct import DeltaProduct
from mixers.ops.linear_recurrence import matrix_recurrence


class UngatedDeltaProduct(DeltaProduct):
    """DeltaProduct without decays and without the gate of its outputs.

    In the code of Siems et al. 2025 (https://github.com/automl/DeltaProduct) these are ``use_forget_gate=False`` and
    ``use_gate=False``. A convolution of one position leaves a learnt scale of each channel where theirs has nothing.
    """

    def __init__(self, config: DeltaProduct.Config, shape: Shape) -> None:
        """Build the layer.

        Raises:
            ValueError: the configuration has decays.
        """
        if config.gated:
            raise ValueError("gated: must be False")
        super().__init__(config, shape)
        del self.gate

    def mix(self, x_BTD: Tensor) -> Tensor:
        parts = self.convolution.parts(self.qkv(x_BTD), self._shapes)
        q, k, v, g, b = self._pairs(parts, self.strength(x_BTD))
        k, v, b = (y.flatten(1, 2) for y in (k, v, b))
        return self._output(x_BTD, matrix_recurrence(q, k, v, g, b_BTHK=b))

    def init_state(self, batch: int) -> State:
        raise NotImplementedError("trainings alone need this layer")
