"""The processes that train together: those started by ``torchrun``, or a single process without it."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mixers.models import LanguageModel
from mixers.ops.ahead import compiling_ahead, without_launches
from runners.device import find_devices


@dataclass(frozen=True, kw_only=True)
class World:
    """This process, and the number of processes that train together.

    Attributes:
        rank: index of this process.
        size: number of processes.
        device: device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes on behalf of all."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over the processes; ``values`` is overwritten."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def any(self, is_so: bool) -> bool:
        """Return whether something is so in any process; all must call this."""
        return self.mean(torch.tensor(float(is_so), device=self.device)).item() > 0

    def wait(self) -> None:
        """Block until all processes have called this."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(device: str) -> Iterator[World]:
    """Join the processes that ``torchrun`` started (https://docs.pytorch.org/docs/stable/elastic/run.html), if any.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA if there is a GPU.

    Raises:
        ValueError: ``cuda`` without a GPU, or fewer GPUs than processes on this machine.
    """
    places = find_devices(device)
    on_gpu = places[0].type == "cuda"
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))

    # Each process takes its own GPU.
    if on_gpu and local >= len(places):
        here = len(places)
        raise ValueError(f"process {local} finds no GPU ({here} here): lower --nproc-per-node or give --device cpu")
    place = places[local] if on_gpu else places[0]
    if on_gpu:
        torch.cuda.set_device(place)

    if size == 1:
        yield World(rank=0, size=1, device=place)
        return

    # Several processes form a group; PyTorch reads the same variables.
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=place if on_gpu else None)
    try:
        yield World(rank=rank, size=size, device=place)
    finally:
        dist.destroy_process_group()


def distribute(
    objective: nn.Module,
    model: LanguageModel,
    batch: tuple[int, int],
    world: World,
    parallel: Literal["ddp", "fsdp"],
) -> nn.Module:
    """Return the objective with layers captured as CUDA graphs on a GPU, and gradients averaged over processes.

    Args:
        objective: the module to train, which calls ``model``.
        model: its language model.
        batch: number of sequences per forward pass and their length, the same in every call in training. Calls in
            evaluation mode run without graphs.
        world: the processes.
        parallel: ``ddp`` if each process holds the whole model; ``fsdp`` if it holds a part, which is not captured.
    """
    sharded = world.size > 1 and parallel == "fsdp"
    if world.device.type == "cuda" and not sharded:
        # Layers that are recomputed one by one are not captured: they may draw random numbers.
        x_BTD = torch.randn(*batch, model.embedding.weight.shape[1], device=world.device, requires_grad=True)

        # PyTorch keeps the graph of its warm-up, which ran on another stream; captures add to no gradient.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            if not model.layers.recompute or model.layers.at_once(x_BTD):
                if all(type(layer).__module__.partition(".")[0] == "mixers" for layer in model.layers):
                    compile_kernels(model.layers, x_BTD)
                torch.cuda.make_graphed_callables(model.layers, (x_BTD,), num_warmup_iters=1)

    # Shard each layer separately, then the rest.
    if sharded:
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(objective)
        return objective

    if world.size == 1:
        return objective
    return DistributedDataParallel(objective, gradient_as_bucket_view=True)


def compile_kernels(layers: nn.Module, x_BTD: Tensor) -> None:
    """Compile the kernels of both passes, several at a time, in a pass that launches none of them.

    Its numbers mean nothing, so no layer may keep them or use them as indices, as a user's layer might. The pass runs
    on a stream of its own, and nothing of it stays, because a capture cannot wait for work on the default stream.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), compiling_ahead(), without_launches():
        z_BTD = layers(x_BTD)
        wanted = [y for y in (x_BTD, *layers.parameters()) if y.requires_grad]
        torch.autograd.grad(z_BTD, wanted, torch.empty_like(z_BTD), allow_unused=True)
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def gradients_together(objective: nn.Module, last: bool) -> Iterator[None]:
    """Share gradients between processes only after the ``last`` part of a batch."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    waits: AbstractContextManager[Any] = nullcontext()
    if isinstance(objective, FSDPModule):
        objective.set_requires_gradient_sync(last)
    elif isinstance(objective, DistributedDataParallel) and not last:
        waits = objective.no_sync()

    with waits:
        yield


def gathered(value: Tensor) -> Tensor:
    """Return a sharded tensor as a whole tensor; return any other tensor unchanged."""
    from torch.distributed.tensor import DTensor  # takes half a second to import

    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def whole(objective: nn.Module) -> Iterator[None]:
    """Gather the sharded parameters of embedding, norm and readout, for forward passes outside the objective."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(objective, FSDPModule):
        yield
        return

    objective.unshard()
    yield
    objective.reshard()


def require_shared(folder: Path, world: World) -> None:
    """Check that all processes see the same results folder: the first writes a file, and the others look for it.

    The folder holds the corpus and the checkpoints. A process that saw another folder would resume from another step.

    Raises:
        ValueError: a process sees another folder; raised in all of them.
    """
    if world.size == 1:
        return

    # Use a new name, because network file systems cache for a while which files do not exist.
    name = [f".shared-{uuid4().hex}"]
    dist.broadcast_object_list(name)
    mark = folder / name[0]
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.wait()

    is_lacking = world.any(not mark.exists())
    if world.is_first:
        mark.unlink()
    if is_lacking:
        raise ValueError(f"--out {folder} is not one folder for all processes: give one that the machines share")
