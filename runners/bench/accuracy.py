"""Outputs and all gradients of an implementation against the naive oracle in float64, before anything is timed."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixers.rt.layer import RecurrentTransformer
from runners.bench.timing import Clock, Implementation, Setting, stacked

CHECK_LENGTHS = (33, 100)
CHECK_RUNS = 2
CHECK_BATCH = 4
FLOAT32_BOUND = 1e-5
BFLOAT16_FACTOR = 2.0
"""Largest error of an implementation in bfloat16, in errors of the oracle under bfloat16 autocast."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Largest relative error of outputs and gradients against float64 (None: not finite), and what is wrong if any.

    ``first_seconds`` are those of the first pass, in which kernels are compiled.
    """

    error: float | None
    problem: str | None
    first_seconds: float | None = None


class Sample(NamedTuple):
    """Parameters, inputs and output gradients of R runs, float32 on the CPU."""

    params: dict[str, Tensor]
    x_RBTD: Tensor
    dz_RBTD: Tensor


class Oracle:
    """The naive recurrence on the CPU, in float64 and under bfloat16 autocast; on the CPU, for there no norm or product
    of it runs in one of our kernels. With all positions in one block it is the Transformer.
    """

    def __init__(self, setting: Setting, autocast: bool, runs: int = CHECK_RUNS, wide: bool = False) -> None:
        """``runs`` are checked together; ``wide`` layers at the last length alone, for it takes seconds."""
        self.setting, self.autocast, self.runs = setting, autocast, runs
        self.lengths = CHECK_LENGTHS[-1:] if wide else CHECK_LENGTHS
        self._known: dict[tuple[int, bool], tuple[list[Tensor], list[float]]] = {}

    def sample(self, length: int) -> Sample:
        """Inputs of the check at one length: random matrices, and gains that are not 1."""
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.runs, *shape, generator=generator)

        params = {
            name: normal(*p.shape) * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.2 * normal(*p.shape)
            for name, p in self._layer(1).named_parameters()
        }
        shape = (CHECK_BATCH, length, self.setting.width)
        return Sample(params, normal(*shape), normal(*shape))

    def wanted(self, length: int, parallel: bool) -> tuple[list[Tensor], list[float]]:
        """Output and gradients in float64, and the largest error that each may have."""
        key = length, parallel
        if key not in self._known:
            layer, sample = self._layer(length if parallel else 1), self.sample(length)
            exact = _alone(layer.double(), sample, torch.float64, autocast=False)
            bounds = [FLOAT32_BOUND] * len(exact)
            if self.autocast:
                low = _alone(layer.float(), sample, torch.float32, autocast=True)
                bounds = [BFLOAT16_FACTOR * error(y, y_exact) for y, y_exact in zip(low, exact, strict=True)]
            self._known[key] = exact, bounds
        return self._known[key]

    def _layer(self, block: int) -> nn.Module:
        config = RecurrentTransformer.Config(heads=self.setting.heads, implementation="naive", block=block)
        return stacked([RecurrentTransformer(config, self.setting.shape) for _ in range(self.setting.layers)])


def _alone(layer: nn.Module, sample: Sample, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """Outputs and gradients of a layer whose runs are computed one by one, without ``vmap``."""
    by_run = []
    for r in range(len(sample.x_RBTD)):
        leaves = [y[r].to(dtype).requires_grad_() for y in (sample.x_RBTD, *sample.params.values())]
        x_BTD, *params = leaves
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            z_BTD: Tensor = functional_call(layer, dict(zip(sample.params, params, strict=True)), (x_BTD,))
        by_run.append([z_BTD.detach(), *torch.autograd.grad(z_BTD, leaves, sample.dz_RBTD[r].to(z_BTD.dtype))])
    return [torch.stack(runs) for runs in zip(*by_run, strict=True)]


def check(implementation: Implementation, oracle: Oracle, clock: Clock) -> Check:
    """Compare an implementation with the oracle at small lengths, as it will be timed: runs stacked, in its graph."""
    errors, failures, firsts = [], [], []
    for length in oracle.lengths:
        params, x_RBTD, dz_RBTD = oracle.sample(length)
        work = implementation.passes(
            implementation.build(oracle.setting).to(clock.device),
            {name: p.to(clock.device) for name, p in params.items()},
            x_RBTD.to(clock.device),
            dz_RBTD.to(clock.device),
            backward=True,
            autocast=oracle.autocast,
        )
        with clock.side_stream():
            firsts.append(clock.seconds(work.run))
        if implementation.graph:
            work.capture()
            for y in work.outputs:
                y.fill_(torch.nan)
            work.run()
        exact, bounds = oracle.wanted(length, implementation.parallel)
        for name, y, y_exact, bound in zip(work.names, work.outputs, exact, bounds, strict=True):
            errors.append(error(y.cpu(), y_exact))
            if not errors[-1] <= bound:
                text = f"error {errors[-1]:.1e} > {bound:.1e} in {name} at N = {length}"
                failures.append((errors[-1] / bound if math.isfinite(errors[-1]) else math.inf, text))
    return Check(
        error=max(errors) if all(map(math.isfinite, errors)) else None,
        problem=max(failures)[1] if failures else None,
        first_seconds=firsts[0],
    )


def error(y: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of ``exact``."""
    return float((y.double() - exact).norm() / exact.norm())
