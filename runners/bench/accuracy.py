"""Check of an implementation before it is timed: outputs and all gradients against the naive oracle in float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixers.rt.layer import RecurrentTransformer
from runners.bench.clock import Clock
from runners.bench.implementations import Implementation, Setting, stack
from runners.bench.work import LayerWork, layer_work

CHECK_LENGTHS = (33, 100)
CHECK_RUNS = 2
CHECK_BATCH = 4
ORACLE_THREADS = 4
"""Most threads of the oracle: its products are small, and threads on many cores that others use wait for each other."""
FLOAT32_BOUND = 1e-5
"""Largest relative error of an implementation in float32."""
BFLOAT16_FACTOR = 2.0
"""Largest relative error of an implementation in bfloat16, in errors of the oracle under bfloat16 autocast."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outcome of a check.

    Attributes:
        error: largest relative error of outputs and gradients against float64; None if it is not finite.
        problem: what is wrong; None if nothing is.
        first_seconds: seconds of the first pass, in which kernels are compiled.
    """

    error: float | None
    problem: str | None
    first_seconds: float | None = None


class Sample(NamedTuple):
    """Parameters, inputs and output gradients of R runs, in float32 on the CPU."""

    params: dict[str, Tensor]
    x_RBTD: Tensor
    dz_RBTD: Tensor


class Oracle:
    """The naive recurrence on the CPU, in float64 and under bfloat16 autocast.

    It runs on the CPU because none of its norms and products uses one of our kernels there. With all positions in one
    block it is the Transformer.

    Args:
        setting: shape of the layers.
        autocast: whether the implementations run under bfloat16 autocast.
        runs: number R of runs that are checked together.
        wide: whether to check the last of ``CHECK_LENGTHS`` alone, because wide layers take seconds.
    """

    def __init__(self, setting: Setting, autocast: bool, runs: int = CHECK_RUNS, wide: bool = False) -> None:
        self.setting = setting
        self.autocast = autocast
        self.runs = runs
        self.lengths = CHECK_LENGTHS[-1:] if wide else CHECK_LENGTHS
        self._known: dict[tuple[int, bool], tuple[list[Tensor], list[float]]] = {}

    def sample(self, length: int) -> Sample:
        """Draw the sample for one length: random matrices, and gains that are not 1."""
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.runs, *shape, generator=generator)

        params = {
            name: normal(*p.shape) * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.2 * normal(*p.shape)
            for name, p in self._build(block=1).named_parameters()
        }
        shape = (CHECK_BATCH, length, self.setting.width)
        return Sample(params, normal(*shape), normal(*shape))

    def expected(self, length: int, parallel: bool) -> tuple[list[Tensor], list[float]]:
        """Return what an implementation should compute for the sample of one length.

        Args:
            length: length of the sample.
            parallel: whether the implementation is the Transformer.

        Returns:
            Output and gradients in float64, and for each of them the largest relative error that is accepted.
        """
        key = length, parallel
        if key not in self._known:
            layer = self._build(block=length if parallel else 1)
            sample = self.sample(length)

            with _few_threads():
                exact = _run_one_by_one(layer.double(), sample, torch.float64, autocast=False)
                self._known[key] = exact, self._bounds(layer.float(), sample, exact)
        return self._known[key]

    def _bounds(self, layer: nn.Module, sample: Sample, exact: list[Tensor]) -> list[float]:
        """Return the largest relative error that is accepted for each of the ``exact`` outputs and gradients."""
        if not self.autocast:
            return [FLOAT32_BOUND] * len(exact)
        return [BFLOAT16_FACTOR * error for error in self._errors(layer, sample, exact)]

    def _errors(self, layer: nn.Module, sample: Sample, exact: list[Tensor]) -> list[float]:
        """Return the relative errors of the oracle in the precision of the implementations."""
        low = _run_one_by_one(layer, sample, torch.float32, autocast=self.autocast)
        return [relative_error(y, y_exact) for y, y_exact in zip(low, exact, strict=True)]

    def _build(self, block: int) -> nn.Module:
        """Return the layers of the naive method, with ``block`` positions in one block."""
        config = RecurrentTransformer.Config(heads=self.setting.heads, implementation="naive", block=block)
        return stack([RecurrentTransformer(config, self.setting.shape) for _ in range(self.setting.layers)])


@contextmanager
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, ORACLE_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_one_by_one(layer: nn.Module, sample: Sample, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """Return the output and gradients of a layer whose runs are computed one by one, without ``vmap``."""
    by_run = []
    for r in range(len(sample.x_RBTD)):
        leaves = [y[r].to(dtype).requires_grad_() for y in (sample.x_RBTD, *sample.params.values())]
        x_BTD, *params = leaves

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            z_BTD: Tensor = functional_call(layer, dict(zip(sample.params, params, strict=True)), (x_BTD,))
        gradients = torch.autograd.grad(z_BTD, leaves, sample.dz_RBTD[r].to(z_BTD.dtype))

        by_run.append([z_BTD.detach(), *gradients])
    return [torch.stack(runs) for runs in zip(*by_run, strict=True)]


def check_implementation(implementation: Implementation, oracle: Oracle, clock: Clock) -> Check:
    """Compare an implementation with the oracle at small lengths, run as it will be timed: stacked, in its graph."""
    errors: list[float] = []
    failures: list[tuple[float, str]] = []
    first_seconds: list[float] = []
    for length in oracle.lengths:
        work, seconds = _run_sample(implementation, oracle, length, clock)
        first_seconds.append(seconds)

        exact, bounds = oracle.expected(length, implementation.parallel)
        # The output comes first. Without a backward pass, there is nothing else.
        for name, y, y_exact, bound in zip(work.names, work.outputs, exact, bounds, strict=work.backward):
            error = relative_error(y.cpu(), y_exact)
            errors.append(error)
            if not error <= bound:  # NaN, too
                excess = error / bound if math.isfinite(error) else math.inf
                failures.append((excess, f"error {error:.1e} > {bound:.1e} in {name} at N = {length}"))

    return Check(
        error=max(errors) if all(map(math.isfinite, errors)) else None,
        problem=max(failures)[1] if failures else None,
        first_seconds=first_seconds[0],
    )


def _run_sample(implementation: Implementation, oracle: Oracle, length: int, clock: Clock) -> tuple[LayerWork, float]:
    """Run an implementation on the oracle's sample; return its work and the seconds of the first pass."""
    params, x_RBTD, dz_RBTD = oracle.sample(length)
    work = layer_work(
        implementation,
        implementation.build(oracle.setting).to(clock.device),
        {name: p.to(clock.device) for name, p in params.items()},
        x_RBTD.to(clock.device),
        dz_RBTD.to(clock.device),
        backward=implementation.form != "static-cache",
        autocast=oracle.autocast,
    )
    with clock.side_stream():
        seconds = clock.seconds(work.run)

    # Fill the outputs with NaN, so that a graph that writes nothing is found.
    if implementation.graph:
        work.capture()
        for y in work.outputs:
            y.fill_(torch.nan)
        work.run()
    return work, seconds


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``."""
    return float((y.double() - exact).norm() / exact.norm())
