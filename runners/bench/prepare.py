"""Set-up and checks of cases in several processes at a time: what they compile stays in the caches on disk."""

import gc
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from unittest.mock import patch

import torch

from runners.bench.measure import Case, set_up
from runners.device import MOST_PROCESSES
from runners.interrupt import end_at_once, end_with_parent


def prepared(cases: Sequence[Case], device: torch.device) -> list[Case]:
    """Set up and check each case in another process; return the cases with the seconds and the outcomes.

    The caller's own set-up then finds everything compiled. Numbers of runs of an implementation share kernels, so one
    process takes them one after another; long sequences come first. What a process cannot do, as for lack of memory,
    is left to the caller.
    """
    jobs: dict[tuple[int, str], dict[int, Case]] = {}
    for n, case in enumerate(cases):
        jobs.setdefault((-case.place["length"], case.place["implementation"]), {})[n] = case
    cores = len(os.sched_getaffinity(0))
    count = max(1, min(MOST_PROCESSES, cores // 2, len(jobs)))
    print(f"{len(cases)} cases are set up in {count} processes first", end="\n\n", flush=True)

    from triton import knobs  # Triton does not exist on every platform

    # Where TorchInductor compiles for the first time, it would move Triton's cache.
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(max(1, cores // count)))
    with patch.dict(os.environ, threads), ProcessPoolExecutor(count, get_context("spawn"), begin) as pool:
        setups = [pool.submit(set_up_in_turn, jobs[key], device) for key in sorted(jobs, key=lambda key: key[0])]
        outcomes = {name: pool.submit(check) for name, check in {str(case.check): case.check for case in cases}.items()}

    seconds = {n: taken for setup in setups if not setup.exception() for n, taken in setup.result().items()}
    known = {name: outcome.result for name, outcome in outcomes.items() if not outcome.exception()}
    return [
        case._replace(setup_seconds=seconds.get(n), check=known.get(str(case.check), case.check))
        for n, case in enumerate(cases)
    ]


def begin() -> None:
    """Let a process work in silence, and end with its parent."""
    end_at_once()
    end_with_parent()
    logging.disable()
    from torch._inductor import config  # takes a second to import

    config.autotune_local_cache = False  # beside other processes, times say little about the fastest settings


def set_up_in_turn(job: dict[int, Case], device: torch.device) -> dict[int, float]:
    """Set up cases; return the seconds of those that do not fail, by their numbers."""
    seconds = {}
    for n, case in job.items():
        with suppress(Exception):
            seconds[n] = set_up(case.build, device)[1]
        gc.collect()
        torch.cuda.empty_cache()
    return seconds
