"""Work to time: forward and backward passes of a layer, and the trainer's optimizer step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mixers.attention_layer import AttentionLayer
from mixers.base import Layer
from mixers.decoding import LayerDecoder
from mixers.models import BACKBONES
from runners.bench.implementations import Implementation, Setting
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.step import Stepper
from tasks.base import Task


class Work(ABC):
    """Something to time, pass by pass.

    Attributes:
        replay: replays the captured CUDA graph of a pass; None before the capture.
        facts: what is stored beside the figures, by name.
    """

    replay: Callable[[], None] | None = None
    facts: Mapping[str, Any] = MappingProxyType({})

    def run(self) -> None:
        """Run one pass: a replay of its CUDA graph after ``capture``, an eager pass before."""
        if self.replay is None:
            self.run_eagerly()
        else:
            self.replay()

    @abstractmethod
    def run_eagerly(self) -> None:
        """Run one eager pass."""

    def capture(self) -> None:
        """Capture one pass as a CUDA graph, after a warm-up on a side stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run_eagerly()
        self.replay = graph.replay

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether all results of the last pass are finite."""


class LayerWork(Work):
    """Forward pass of R runs of a layer, or forward and backward pass: gradients of the inputs and all parameters.

    Parameters and inputs carry the run axis, which ``vmap`` adds to the layer as in ``runners.mad.training.ensemble``.
    A forward pass alone also saves what a backward pass would need.

    Args:
        layer: layer of one run.
        params: parameters by name, with a leading run axis.
        x_RBTD: inputs.
        dz_RBTD: gradients of the outputs.
        backward: whether a pass includes the backward pass.
        autocast: whether a pass runs under bfloat16 autocast.

    Attributes:
        outputs: tensors of the last pass; ``names`` says which.
    """

    def __init__(
        self,
        layer: nn.Module,
        params: dict[str, Tensor],
        x_RBTD: Tensor,
        dz_RBTD: Tensor,
        *,
        backward: bool,
        autocast: bool,
    ) -> None:
        self.layer = layer
        self.params = params
        self.x_RBTD = x_RBTD
        self.dz_RBTD = dz_RBTD
        self.backward = backward
        self.autocast = autocast
        self.outputs: list[Tensor] = []

    @property
    def names(self) -> list[str]:
        """Names of ``outputs``: z and, with a backward pass, dx and the gradient of each parameter."""
        return ["z", *(["dx", *(f"d{name}" for name in self.params)] if self.backward else [])]

    def run_eagerly(self) -> None:
        self.outputs = []
        leaves = [y.detach().requires_grad_() for y in (self.x_RBTD, *self.params.values())]
        x_RBTD, *params = leaves

        with torch.autocast(x_RBTD.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            z_RBTD = self.call_runs(dict(zip(self.params, params, strict=True)), x_RBTD)

        # All gradients in one pass.
        gradients = torch.autograd.grad(z_RBTD, leaves, self.dz_RBTD.to(z_RBTD.dtype)) if self.backward else ()

        self.outputs = [z_RBTD.detach(), *gradients]

    def call_runs(self, params: dict[str, Tensor], x_RBTD: Tensor) -> Tensor:
        """Return the outputs (R, B, T, D) of all runs."""
        return vmap(self.call_run)(params, x_RBTD)

    def call_run(self, params: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
        """Return the outputs (B, T, D) of one run."""
        return functional_call(self.layer, params, (x_BTD,))

    def capture(self) -> None:
        self.outputs = []
        super().capture()

    def is_finite(self) -> bool:
        return all(bool(y.isfinite().all()) for y in self.outputs)


class SingleWork(LayerWork):
    """Passes of a single run, whose layer is called without ``vmap``.

    Args:
        *arguments: as ``LayerWork``, with R = 1.
        form: "single", "compiled", "step" or "static-cache", as ``Implementation.form``.
        **settings: as ``LayerWork``.
    """

    def __init__(self, *arguments: Any, form: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if form == "compiled":
            # Forget earlier shapes. PyTorch stops compiling a function after a few of them.
            torch.compiler.reset()
            self.call_runs = torch.compile(self.call_runs, dynamic=False)  # type: ignore[method-assign]
        elif form in ("step", "static-cache"):
            self.layer = (_StepByStep if form == "step" else _WithStaticCache)(cast(Layer, self.layer))
            self.params = {f"layer.{name}": p for name, p in self.params.items()}

    def call_runs(self, params: dict[str, Tensor], x_RBTD: Tensor) -> Tensor:
        return self.call_run({name: p.squeeze(0) for name, p in params.items()}, x_RBTD.squeeze(0)).unsqueeze(0)


class _StepByStep(nn.Module):
    """A layer that computes its outputs position by position, in its step form."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor) -> Tensor:
        state, outputs = self.layer.init_state(len(x_BTD)), []
        for x_BD in x_BTD.unbind(1):
            z_BD, state = self.layer.step(x_BD, state)
            outputs.append(z_BD)
        return torch.stack(outputs, dim=1)


class _WithStaticCache(_StepByStep):
    """A layer that computes its outputs position by position, with a static key-value cache."""

    @torch.no_grad()
    def forward(self, x_BTD: Tensor) -> Tensor:
        decoder = LayerDecoder(cast(AttentionLayer, self.layer), *x_BTD.shape[:2])
        position, outputs = torch.zeros(1, dtype=torch.int32, device=x_BTD.device), []
        for x_BD in x_BTD.unbind(1):
            outputs.append(decoder.step(x_BD, position))
            position += 1
        return torch.stack(outputs, dim=1)


class StepWork(Work):
    """The trainer's whole optimizer step of R runs, on data in the device's memory.

    The stepper captures and replays its CUDA graph itself.
    """

    def __init__(self, ensemble: Ensemble, stepper: Stepper) -> None:
        self.ensemble = ensemble
        self.stepper = stepper

    def run_eagerly(self) -> None:
        self.stepper.run(0, 1)

    def capture(self) -> None:
        self.stepper.capture()

    def is_finite(self) -> bool:
        return bool((self.ensemble.diverged_R < 0).all())


def layer_work(
    implementation: Implementation,
    layer: nn.Module,
    params: dict[str, Tensor],
    x_RBTD: Tensor,
    dz_RBTD: Tensor,
    *,
    backward: bool,
    autocast: bool,
) -> LayerWork:
    """Return passes of a layer that are called in the form of the implementation; arguments as ``LayerWork``."""
    work = LayerWork if implementation.form == "stacked" else partial(SingleWork, form=implementation.form)
    return work(layer, params, x_RBTD, dz_RBTD, backward=backward, autocast=autocast)


def random_layer_work(
    implementation: Implementation, setting: Setting, length: int, runs: int, backward: bool, device: torch.device
) -> LayerWork:
    """Return passes of a layer over random inputs.

    All runs have the same parameters, because the time does not depend on them. On a GPU, passes run under bfloat16
    autocast.
    """
    # Parameters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = implementation.build(setting).to(device)
    params = {name: p.detach().expand(runs, *p.shape).clone() for name, p in layer.named_parameters()}

    # Inputs and output gradients.
    generator = torch.Generator(device).manual_seed(0)
    x_RBTD, dz_RBTD = (
        torch.randn(runs, setting.batch_size, length, setting.width, device=device, generator=generator)
        for _ in range(2)
    )

    autocast = device.type == "cuda"
    return layer_work(implementation, layer, params, x_RBTD, dz_RBTD, backward=backward, autocast=autocast)


def step_work(
    implementation: Implementation, setting: Setting, task: Task, runs: int, device: torch.device
) -> StepWork:
    """Return optimizer steps as ``runners.mad.training`` takes them, on the training data of a task."""
    protocol, data = Protocol(batch_size=setting.batch_size), task.split("train")
    build = partial(
        BACKBONES[task.backbone],
        implementation.layer,
        implementation.config(setting),
        setting.shape,
        task.vocab_size,
    )
    members = [Run(lr=1e-3, weight_decay=0.1, seed=seed) for seed in range(runs)]
    ensemble = Ensemble(build, members, protocol.optimizer, protocol.total_steps(len(data)), device)
    return StepWork(ensemble, Stepper(ensemble, data, setting.batch_size))
