"""What ``runners.bench`` times: passes of a layer and the trainer's optimizer step, eagerly or as one CUDA graph."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mixers.attention_layer import AttentionLayer
from mixers.base import Layer, Shape
from mixers.models import BACKBONES, Stack
from mixers.rt.dispatch import Implementation as RecurrenceMethod
from mixers.rt.dispatch import choose
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.cli import override
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.step import Stepper
from tasks.base import Task

Phase = Literal["forward", "forward+backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "forward+backward", "step")
"""Each contains the one before it."""

WARM_UPS = 2
SECONDS_A_REPEAT = 0.02
"""A repeat is as many passes as fill this time."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Shape of the layer, or of a stack of layers, and of a batch."""

    width: int
    heads: int
    mlp_width: int
    batch_size: int
    layers: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(width=self.width, mlp_width=self.mlp_width, layers=self.layers)


def stacked(layers: Sequence[Layer]) -> nn.Module:
    """Layers on top of each other; a single one as it is."""
    return layers[0] if len(layers) == 1 else Stack(layers)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A way to compute a layer.

    Attributes:
        label: its name in tables.
        layer: class of the layer.
        method: the recurrence's method.
        graph: whether it runs as one CUDA graph.
        form: how the layer is called: on runs stacked by ``vmap``; on the only run, as it is or under
            ``torch.compile``; or position by position in its step form.
    """

    label: str
    layer: type[AttentionLayer]
    method: RecurrenceMethod | None = None
    graph: bool = False
    form: Literal["stacked", "single", "compiled", "step"] = "stacked"

    @property
    def parallel(self) -> bool:
        """Whether this is the Transformer: the Recurrent Transformer with all positions in one block."""
        return not issubclass(self.layer, RecurrentTransformer)

    @property
    def stepwise(self) -> bool:
        """Whether Python goes from position to position, so that an eager pass takes time in proportion to N."""
        return self.method in ("naive", "tiled", "wavefront")

    def config(self, setting: Setting) -> Any:
        values: dict[str, Any] = {"heads": setting.heads}
        return override(self.layer.Config, values if self.method is None else {**values, "implementation": self.method})

    def build(self, setting: Setting) -> nn.Module:
        """The layer of one run, or several on top of each other; fresh parameters from torch's global generator."""
        return stacked([self.layer(self.config(setting), setting.shape) for _ in range(setting.layers)])

    def has_kernel(self, setting: Setting, device: torch.device) -> bool:
        """False where the layer would run another method than the one that is named."""
        if self.method not in ("wavefront", "fused"):
            return True
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        q_BTD = torch.empty(1, 1, setting.width, dtype=dtype, device=device)
        return choose(self.method, q_BTD, setting.mlp_width, setting.heads, 1) == self.method

    def passes(self, *arguments: Any, **settings: Any) -> "LayerWork":
        """Passes of the layer, called in this form; arguments as ``LayerWork``."""
        return (LayerWork if self.form == "stacked" else partial(SingleWork, form=self.form))(*arguments, **settings)


IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "cuda": {
        "rt-naive": Implementation(label="RT naive", layer=RecurrentTransformer, method="naive"),
        "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled"),
        "rt-tiled-graph": Implementation(
            label="RT tiled, graph", layer=RecurrentTransformer, method="tiled", graph=True
        ),
        "rt-fused": Implementation(label="RT fused, graph", layer=RecurrentTransformer, method="fused", graph=True),
        "transformer": Implementation(label="Transformer, graph", layer=Transformer, graph=True),
    },
    "cpu": {
        "rt-naive": Implementation(label="RT naive", layer=RecurrentTransformer, method="naive"),
        "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled"),
        "transformer": Implementation(label="Transformer", layer=Transformer),
    },
}
"""What can be timed, by type of device."""


class Work(ABC):
    """Something to time, pass by pass.

    Attributes:
        replay: one pass of its CUDA graph, once that is captured.
        facts: what else is worth storing about it.
    """

    replay: Callable[[], None] | None = None
    facts: Mapping[str, int] = MappingProxyType({})

    def run(self) -> None:
        """One pass; a replay of its CUDA graph once that is captured."""
        if self.replay is None:
            self.once()
        else:
            self.replay()

    @abstractmethod
    def once(self) -> None:
        """One eager pass."""

    def capture(self) -> None:
        """Capture one pass as a CUDA graph, after a warm-up on a side stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.once()
        self.replay = graph.replay

    @abstractmethod
    def finite(self) -> bool:
        """Whether the last pass gave finite numbers."""


class LayerWork(Work):
    """Forward pass of R runs of a layer, or forward and backward: gradients of the inputs and of all parameters.

    Parameters and inputs carry the run axis, which ``vmap`` adds to the layer as in ``runners.ensemble``. The forward
    pass alone, too, saves what a backward would need.
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
        self.layer, self.params, self.x_RBTD, self.dz_RBTD = layer, params, x_RBTD, dz_RBTD
        self.backward, self.autocast = backward, autocast
        self.outputs: list[Tensor] = []

    @property
    def names(self) -> list[str]:
        """Names of ``outputs``."""
        return ["z", *(["dx", *(f"d{name}" for name in self.params)] if self.backward else [])]

    def once(self) -> None:
        self.outputs = []
        leaves = [y.detach().requires_grad_() for y in (self.x_RBTD, *self.params.values())]
        x_RBTD, *params = leaves
        with torch.autocast(x_RBTD.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            z_RBTD = self.call(dict(zip(self.params, params, strict=True)), x_RBTD)
        gradients = torch.autograd.grad(z_RBTD, leaves, self.dz_RBTD.to(z_RBTD.dtype)) if self.backward else ()
        self.outputs = [z_RBTD.detach(), *gradients]

    def call(self, params: dict[str, Tensor], x_RBTD: Tensor) -> Tensor:
        """Outputs of all runs."""
        return vmap(self.one)(params, x_RBTD)

    def one(self, params: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
        """Output of one run."""
        return functional_call(self.layer, params, (x_BTD,))

    def capture(self) -> None:
        self.outputs = []
        super().capture()

    def finite(self) -> bool:
        return all(bool(y.isfinite().all()) for y in self.outputs)


class SingleWork(LayerWork):
    """Passes of a single run, whose layer is called without ``vmap`` in one of the forms of ``Implementation``."""

    def __init__(self, *arguments: Any, form: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if form == "compiled":
            torch.compiler.reset()  # each shape anew: PyTorch gives up on a function after a few
            self.call = torch.compile(self.call, dynamic=False)  # type: ignore[method-assign]
        elif form == "step":
            self.layer = _Stepping(cast(Layer, self.layer))
            self.params = {f"layer.{name}": p for name, p in self.params.items()}

    def call(self, params: dict[str, Tensor], x_RBTD: Tensor) -> Tensor:
        return self.one({name: p.squeeze(0) for name, p in params.items()}, x_RBTD.squeeze(0)).unsqueeze(0)


class _Stepping(nn.Module):
    """A layer, from position to position."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor) -> Tensor:
        state, outputs = self.layer.init_state(len(x_BTD)), []
        for x_BD in x_BTD.unbind(1):
            z_BD, state = self.layer.step(x_BD, state)
            outputs.append(z_BD)
        return torch.stack(outputs, dim=1)


class StepWork(Work):
    """The trainer's whole optimizer step of R runs, on data that lies on the device."""

    def __init__(self, ensemble: Ensemble, stepper: Stepper) -> None:
        self.ensemble, self.stepper = ensemble, stepper

    def once(self) -> None:
        self.stepper.run(0, 1)

    def capture(self) -> None:
        self.stepper.capture()

    def finite(self) -> bool:
        return bool((self.ensemble.diverged_R < 0).all())


def layer_work(
    implementation: Implementation, setting: Setting, length: int, runs: int, backward: bool, device: torch.device
) -> LayerWork:
    """Passes over random inputs; all runs have the same parameters, for the time does not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = implementation.build(setting).to(device)
    params = {name: p.detach().expand(runs, *p.shape).clone() for name, p in layer.named_parameters()}
    generator = torch.Generator(device).manual_seed(0)
    x_RBTD, dz_RBTD = (
        torch.randn(runs, setting.batch_size, length, setting.width, device=device, generator=generator)
        for _ in range(2)
    )
    return implementation.passes(layer, params, x_RBTD, dz_RBTD, backward=backward, autocast=device.type == "cuda")


def step_work(
    implementation: Implementation, setting: Setting, task: Task, runs: int, device: torch.device
) -> StepWork:
    """Optimizer steps as ``runners.train`` takes them."""
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


class Clock:
    """Seconds and peak memory of a device; the GPU's seconds are read from events."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def seconds(self, run: Callable[[], None], passes: int = 1) -> float:
        """Mean seconds of one of ``passes`` passes, which follow each other without a pause."""
        if not self.cuda:
            started = time.perf_counter()
            for _ in range(passes):
                run()
            return (time.perf_counter() - started) / passes
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(passes):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / passes

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """On a GPU another stream than the current one; what is captured later must be warmed up on one."""
        if not self.cuda:
            yield
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def allocated(self) -> int:
        """Bytes in use; the peak counts from here."""
        if not self.cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_gib(self, before: int) -> float | None:
        """Peak since ``allocated`` returned ``before``, less those bytes; None on the CPU."""
        return (torch.cuda.max_memory_allocated() - before) / 2**30 if self.cuda else None


class TooSlowError(Exception):
    """One pass takes longer than the limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.3g} s a pass")
        self.seconds = seconds


class Ready(NamedTuple):
    """Work that is warm.

    Attributes:
        work: what to time.
        warm_up: seconds of one eager pass.
        passes: passes in one repeat.
        peak_gib: peak memory of a pass with all that it reads and keeps; None on the CPU.
        setup: seconds of building, of the first pass, and of the capture.
    """

    work: Work
    warm_up: float
    passes: int
    peak_gib: float | None
    setup: float


def prepare(build: Callable[[], Work], graph: bool, clock: Clock, limit: float) -> Ready:
    """Build, warm up and, with ``graph``, capture.

    Raises:
        TooSlowError: an eager pass takes longer than ``limit`` seconds.
    """
    before, started = clock.allocated(), time.perf_counter()
    work = build()
    setup = time.perf_counter() - started
    with clock.side_stream() if graph else nullcontext():
        warm_ups = [clock.seconds(work.run) for _ in range(WARM_UPS)]
    setup, warm_up = setup + warm_ups[0], min(warm_ups)
    if warm_up > limit:
        raise TooSlowError(warm_up)
    once = warm_up
    if graph:
        started = time.perf_counter()
        work.capture()
        setup += time.perf_counter() - started
        once = min(clock.seconds(work.run) for _ in range(WARM_UPS))
    return Ready(work, warm_up, max(1, math.ceil(SECONDS_A_REPEAT / once)), clock.peak_gib(before), setup)
