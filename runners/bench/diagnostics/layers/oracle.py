"""What a layer should compute: its plain form in float64, with parameters as at the start of training."""

from statistics import median

import torch
from torch import Tensor, nn

from mixers.base import Layer
from mixers.contract import CLOSED
from runners.bench.accuracy import BFLOAT16_FACTOR, CHECK_BATCH, FLOAT32_BOUND, Oracle, Sample
from runners.bench.implementations import Setting

FEW = 16
"""Numbers of a run's tensor up to which its error is mostly chance.

Over 14 samples, the plain form of Mamba-2 under autocast has an error of 0.3e-2 to 5.8e-2 in the gradient of its step
size's bias (4 numbers per run; root mean square 1.9e-2). With its kernels' roundings: 0.7e-2 to 4.0e-2 (1.7e-2).
"""


class LayerOracle(Oracle):
    """The plain form of any layer on the CPU, where no kernel of the project runs.

    Parameters are those of the layer's own start, because decays and gates mean little at others. Those next to zero
    are drawn at random: they would hide what they multiply.

    Args:
        layer: class of the layer.
        setting: shape of the layer.
        autocast: whether the layer runs under bfloat16 autocast.
    """

    def __init__(self, layer: type[Layer], setting: Setting, autocast: bool) -> None:
        super().__init__(setting, autocast, wide=True)
        self.layer = layer

    def sample(self, length: int) -> Sample:
        generator = torch.Generator().manual_seed(length)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [self._build(block=1) for _ in range(self.runs)]

        def opened(p: Tensor) -> Tensor:
            closed = p.numel() > 0 and p.abs().max() < CLOSED
            return 0.1 * torch.randn(p.shape, generator=generator) if closed else p.detach()

        params = {
            name: torch.stack([opened(layer.get_parameter(name)) for layer in layers])
            for name, _ in layers[0].named_parameters()
        }
        shape = (self.runs, CHECK_BATCH, length, self.setting.width)
        return Sample(params, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))

    def _bounds(self, layer: nn.Module, sample: Sample, exact: list[Tensor]) -> list[float]:
        """Return twice the errors of the plain form in the precision of training, for few numbers four times.

        Small tensors may have a small error by chance, so no bound is below twice the median of all tensors.
        """
        errors = self._errors(layer, sample, exact)
        factors = [BFLOAT16_FACTOR * (2 if y[0].numel() <= FEW else 1) for y in exact]
        return [
            max(FLOAT32_BOUND, factor * max(error, median(errors)))
            for factor, error in zip(factors, errors, strict=True)
        ]

    def _build(self, block: int) -> nn.Module:
        return self.layer(self.layer.plain_config(self.layer.Config()), self.setting.shape)
