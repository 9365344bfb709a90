"""Processes of tests, forked from one that has imported the programs: to start Python and import them takes seconds."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

LATER = (
    *("datasets", "tokenizers", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    *("matplotlib.backends.backend_agg", "runners.c4.compare", "torch.utils.flop_counter", "einops._torch_specific"),
    *("typeguard", "tyro._backends._tyro_backend", "pydantic.dataclasses", "pydantic._internal._serializers"),
)
"""What the programs import when they train."""
PRELOADED = ("runners.mad.__main__", "runners.c4.__main__", "runners.c4.train", *LATER)


def forks() -> ForkServerContext:
    """The context whose processes are forks of one that has imported the programs, and nothing of a test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    return context


def start(work: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Run ``work``, a function of a module, in a process of its own."""
    process = forks().Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def run_program(module: str, arguments: Sequence[str], output: Path) -> None:
    """Body of a process: the ``main`` of a program with one thread, which prints to a file; its figures are empty."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["COLUMNS"] = "200"
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported; to collect it takes a second, and copies its memory
    Figure.savefig = lambda self, path, **_: Image.new("L", (1, 1)).save(path, "PNG")
    import_module(module).main(arguments)


def wait_for(condition: Callable[[], object], patience: float = 100.0) -> None:
    """Wait until a condition holds, at most ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
