"""Training steps compiled by TorchInductor: what the kernels of the project do not compute is fused.

A plain PyTorch layer under ``torch.func.vmap`` is a long chain of small operations on large tensors, and each reads and
writes memory. The step is recorded once, gradient included, with the operations that launch kernels as single
operators (``mixers.ops.operators``). The record is a plain list of operations, which TorchInductor takes as it is:
``torch.compile`` would read the program once more, and it refuses parts of it. The compiled step takes tensors of one
shape. TorchInductor keeps what it compiles on disk, so that a later process finds a step of equal operations.
"""

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from mixers.base import log_once
from mixers.ops.ahead import compiling_ahead
from mixers.ops.method import Method
from mixers.ops.operators import as_operators, operators_of

log = logging.getLogger(__name__)

Step = TypeVar("Step", bound=Callable[..., tuple[Tensor, Tensor]])
"""Maps parameters (R, P), inputs and targets (R, B, T) to losses (R,) and gradients (R, P)."""


def compiled(step: Step, arguments: tuple[Tensor, Tensor, Tensor], name: str) -> Step:
    """Return a step compiled for tensors such as these, and log how long this took.

    Args:
        step: what is compiled; it must do the same operations whatever the numbers are.
        arguments: parameters, inputs and targets.
        name: of the layer, for the log.

    Returns:
        The compiled step; ``step`` itself, with a warning, if PyTorch cannot compile it.
    """
    from torch._functorch.compile_utils import fx_graph_cse  # these take a second to import
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def recorded(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return step(*tensors)  # make_fx counts the arguments of a bound method wrongly

    began = time.monotonic()
    methods: list[Method] = []

    def run(*tensors: Tensor) -> Any:
        with operators_of(methods), torch.no_grad():
            return fast(*tensors)

    try:
        # Inductor warns of what it leaves to PyTorch, such as complex numbers, which is no fault.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with compiling_ahead(), operators_of(methods):
                with as_operators():
                    graph = make_fx(recorded, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)

                # Do once what is done several times with the same tensors, unless any of them is changed in place: a
                # layer that goes through segments one by one casts its weights for each.
                calls = (node.target for node in graph.graph.nodes)
                if not any(isinstance(call, OpOverload) and call._schema.is_mutable for call in calls):
                    graph.graph = fx_graph_cse(graph.graph)
                    graph.recompile()

                # The cache on disk goes by the text of a graph, which does not tell what operators return, and wants an
                # environment of shapes, here one that stays empty.
                values = (node.meta.get("val") for node in graph.graph.nodes)
                results = str([(y, y.stride()) for y in values if isinstance(y, Tensor)])
                context = TracingContext(FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
                tagged = torch.compiler.config.patch(cache_key_tag=results)  # type: ignore[attr-defined]
                with torch.no_grad(), tracing(context), tagged:
                    fast: Any = compile_fx(graph, list(arguments), ignore_shape_env=True)
            run(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail in any way
        (reason, *_) = str(error).strip().splitlines() or [""]
        log_once(f"mixer {name} is trained without TorchInductor, which failed: {type(error).__name__}: {reason}")
        return step

    log.warning("mixer %s: training step compiled in %.0f s", name, time.monotonic() - began)
    return run  # type: ignore[return-value]
