"""The trainer's whole optimizer step of a layer, set up as the trainer sets it up."""

import os
import time
from pathlib import Path

import torch

from mixers.ops.runs import methods_met
from runners.bench.implementations import Implementation, Setting
from runners.bench.work import StepWork, step_work
from tasks.base import Task


def first_step(
    implementation: Implementation, setting: Setting, task: Task, runs: int, device: torch.device
) -> StepWork:
    """Return optimizer steps after the first one, on training data that is drawn before.

    On a GPU the step is compiled and captured before it is taken, as by ``runners.mad.training.loop``.

    Facts of the work:
        first_step_seconds: seconds in which the model was made and its step compiled, captured and taken once.
        methods: names of the operations with kernels that the step ran, in order.
        compiled: whether the step was compiled.
    """
    task.split("train")
    started = time.perf_counter()

    with methods_met() as methods:
        work = step_work(implementation, setting, task, runs, device)
        if device.type == "cuda":
            work.capture()
        work.run()
    if device.type == "cuda":
        torch.cuda.synchronize()

    work.facts = {
        "first_step_seconds": time.perf_counter() - started,
        "methods": list(methods),
        "compiled": work.ensemble.is_compiled,
    }
    return work


def filled_caches() -> dict[str, bool]:
    """Return for the caches of compiled code on the disk whether they hold anything."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds to import

    folders = {
        "inductor": Path(cache_dir()),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")),
    }
    return {name: folder.is_dir() and any(folder.iterdir()) for name, folder in folders.items()}
