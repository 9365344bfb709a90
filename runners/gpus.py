"""One process per GPU: a command runs itself once per GPU, and these processes divide its work among themselves."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from runners.interrupt import asked_to_stop

WORKER = "RUNNERS_WORKER"
"""Environment variable of the processes that a command starts."""
SECONDS_BETWEEN_LOOKS = 0.2


def is_worker() -> bool:
    """Return whether a command has started this process for one GPU."""
    return WORKER in os.environ


def starts_workers() -> bool:
    """Return whether this process is to start workers: the user has started it, and PyTorch sees several GPUs."""
    return torch.cuda.device_count() > 1 and not is_worker()


def run_on_all_gpus(module: str, arguments: Sequence[str]) -> bool:
    """Run a command once per GPU; each process sees only its own. Return whether all did the whole of their work.

    The processes share the CPU's cores, unless OMP_NUM_THREADS is set: with a thread per core each, they would wait for
    each other's threads.

    Args:
        module: module of the command, which ends with status 1 if a part of its work failed and the rest is done.
        arguments: words after its name.

    Raises:
        SystemExit: this process was asked to stop, or another one was stopped or failed; the exit has the status.
    """
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    command = [sys.executable, "-m", module, *arguments]
    processes: list[subprocess.Popen[bytes]] = []

    # A stop is passed on; each process saves its state and says so.
    with asked_to_stop() as asked:
        for gpu in visible:
            own = {"CUDA_VISIBLE_DEVICES": gpu, WORKER: gpu}
            processes.append(subprocess.Popen(command, env={"OMP_NUM_THREADS": str(threads), **os.environ, **own}))
        while waiting := [process for process in processes if process.poll() is None]:
            while asked:
                number = asked.pop()
                for process in waiting:
                    process.send_signal(number)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    statuses = [process.returncode for process in processes]
    for gpu, status in zip(visible, statuses, strict=True):
        if status < 0:
            print(
                f"the process of GPU {gpu} was ended by signal {-status}: give the same command again", file=sys.stderr
            )
    if ended := [status for status in statuses if status > 1]:
        raise SystemExit(ended[0])
    return not any(statuses)
