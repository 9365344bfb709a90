"""Time the trainer's whole optimizer step of layers by name, on in-context recall.

    python -m runners.bench layers
    python -m runners.bench layers --layers rt gla package.module:Class --lengths 128 1024 --runs 1 6
    python -m runners.bench layers --width 1024    # as in language models: 32 sequences of 512, 8 of 2048

A layer's numbers of runs take turns, then its memory is freed: all layers together would not fit. On a GPU all
cases are set up and checked in several processes before, so that little is left to compile; ``setup_seconds`` are those
of these processes, which share the CPU's cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated

import torch
import tyro

from mixers.base import Shape
from mixers.models import BACKBONES
from mixers.named import members_of
from mixers.ops.runs import methods_met
from mixers.registry import MIXERS, find_mixer
from runners.bench.measure import (
    CHECK_RUNS,
    TRANSFORMER,
    Case,
    Common,
    Implementation,
    Pass,
    Record,
    check,
    options_and_device,
)
from runners.bench.prepare import prepared
from runners.ending import user_errors
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.step import Stepper
from runners.options import expand
from tasks.base import Task
from tasks.recall import InContextRecall


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Time the trainer's whole optimizer step of layers, on in-context recall.

    Attributes:
        lengths: sequence lengths N; on a GPU 512 and 2048 if the width is above 128.
        runs: numbers R of runs trained together; 1 if the width is above 128.
        batch_size: sequences of each run in a step; None for those of 16,384 tokens, as on a GPU if the width is above
            128.
        width: model width D.
        mlp_width: hidden width of the MLP; unless given, 4 times the model's.
        head_width: width of a head; None for each layer's own number of heads, 64 if the width is above 128.
    """

    layers: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help=f"all, or what to time, of {', '.join(MIXERS)}; package.module:Class; or a stack of them."),
    ] = ("all",)
    lengths: tuple[int, ...] = (128,)
    runs: tuple[int, ...] = (1, 6, 30)
    batch_size: int | None = 128
    width: int = 128
    mlp_width: int | None = None
    head_width: int | None = None


PRESETS = {"cuda": Options(), "cpu": Options(lengths=(32,), runs=(1,), batch_size=4, limit=5.0)}
"""Defaults by type of device."""
WIDE = {
    "cuda": Options(lengths=(512, 2048), runs=(1,), batch_size=None, head_width=64),
    "cpu": replace(PRESETS["cpu"], head_width=64),
}
"""Those of widths above that of the diagnostics."""
TOKENS = 16_384
"""Tokens of each run in a step, unless the number of sequences is given."""


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    with user_errors(ValueError):
        options, device = options_and_device(Options, PRESETS, arguments)
        if options.width > PRESETS[device.type].width:
            options, device = options_and_device(Options, WIDE, arguments)
        if options.head_width and options.width % options.head_width:
            raise ValueError(f"width {options.width} is no multiple of --head-width {options.head_width}")
        shape = Shape(width=options.width, mlp_width=options.mlp_width or 4 * options.width)
        heads = None if options.head_width is None else options.width // options.head_width
        tasks = [InContextRecall(InContextRecall.Config(length=length)) for length in options.lengths]
        # The others are relative to the Transformer.
        names = sorted(expand(options.layers, MIXERS), key=lambda name: name != TRANSFORMER)
        shapes = {name: replace(shape, layers=len(members_of(name))) for name in names}
        for name in names:
            Implementation(mixer=name).build(shapes[name], heads, device)

    record = Record("layers", options, device, arguments)
    cases: list[Case] = []
    for task, name in product(tasks, names):
        batch_size = options.batch_size or max(1, TOKENS // task.config.length)
        place = {"width": options.width, "batch_size": batch_size, "length": task.config.length}
        step = Implementation(mixer=name, graph=device.type == "cuda")
        cases += (
            Case(
                place={**place, "runs": runs, "implementation": name},
                build=partial(optimizer_step, step, shapes[name], heads, runs, device, task, batch_size),
                check=partial(check, Implementation(mixer=name), shapes[name], heads, CHECK_RUNS, device),
            )
            for runs in options.runs
        )
    if device.type == "cuda":
        cases = prepared(cases, device)
    for first in range(0, len(cases), len(options.runs)):
        record.measure(cases[first : first + len(options.runs)])
    record.finish()


def optimizer_step(
    implementation: Implementation,
    shape: Shape,
    heads: int | None,
    runs: int,
    device: torch.device,
    task: Task,
    batch_size: int,
) -> Pass:
    """Return the optimizer step of a layer, as ``runners.mad.training`` takes it, after the first one.

    Facts of the record:
        methods: names of the operations with kernels that the step ran, in order.
        compiled: whether PyTorch compiled the step.

    Args:
        implementation: how the layer is computed; with ``graph`` the step is compiled and captured, as on a GPU.
        shape: its shape.
        heads: its heads; None for its default.
        runs: number of runs that are trained together.
        device: where they are trained.
        task: the task on whose training data they are trained.
        batch_size: sequences of each run.
    """
    implementation.build(shape, heads, device)  # or there is no such kernel
    protocol, data = Protocol(batch_size=batch_size), task.split("train")
    protocol.check(len(data))
    layer, config = find_mixer(implementation.mixer), implementation.config(heads)
    build = partial(BACKBONES[task.backbone], layer, config, shape, task.vocab_size)
    members = [Run(lr=1e-3, weight_decay=0.1, seed=seed) for seed in range(runs)]

    with methods_met() as methods:
        ensemble = Ensemble(build, members, protocol.optimizer, protocol.total_steps(len(data)), device)
        stepper = Stepper(ensemble, data, protocol)
        if implementation.graph:
            stepper.capture()
        stepper.begin(0)
        stepper.take_step()

    return Pass(
        stepper.take_step,
        lambda: bool((ensemble.diverged_R < 0).all()),
        tokens=runs * batch_size * data.inputs_ST.shape[1],
        facts={"methods": list(methods), "compiled": ensemble.is_compiled},
        held=stepper,
    )
